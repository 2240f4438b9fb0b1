"""Building blocks on plain tensors that plugins share; this package itself imports nothing."""
