"""Building blocks on plain tensors that plugins share, without plugins or plans; importing this imports nothing."""

from __future__ import annotations
