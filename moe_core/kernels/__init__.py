"""Building blocks on plain tensors that plugins share, without plugins or plans; this package itself imports nothing."""

from __future__ import annotations
