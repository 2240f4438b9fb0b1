"""`python -m moe_core`: the same as the command `moe-core`."""

from __future__ import annotations

from moe_core.cli import main

if __name__ == "__main__":
    main()
