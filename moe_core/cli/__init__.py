"""The command `moe-core`. Importing it needs no torch; a command that computes imports torch when it runs."""

from __future__ import annotations

from moe_core.cli.app import main

__all__ = ["main"]
