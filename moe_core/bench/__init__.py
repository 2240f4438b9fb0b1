"""Whole layers, ours beside those of others on the same inputs, above what the machine allows."""

from __future__ import annotations

#: Name of the implementation that the resolver chooses.
OURS = "moe-core"
