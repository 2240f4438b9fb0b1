"""A plugin that ends the interpreter."""

from __future__ import annotations

import sys

sys.exit(3)
