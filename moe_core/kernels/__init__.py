"""Building blocks that backends share: plain functions on tensors, without plugins or plans."""
