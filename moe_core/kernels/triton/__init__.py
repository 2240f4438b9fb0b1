"""The building blocks of `moe_core.kernels` for devices that Triton compiles for; importing this imports nothing.

Same words and results as their torch namesakes, without host synchronisation, safe to capture. Letters in kernels: `N`
slots of all tokens (`T * K`), `L` local experts, `BM x BN x BK` the tile of one program, `MASKED` whether each expert's
rows lie in a block of its own (`MaskedTokens`) or back to back.

`pdl` (programmatic dependent launch, NVIDIA GPUs from Hopper on) lets a launch begin before the one in front of it has
ended. A kernel launched so waits for that one itself before it reads or writes anything, which keeps the order of
every launch before; then it lets the next one begin. (`peer` says where its kernels wait only at their end.) Two
launches may follow each other tile by tile of rows: programs of the first count themselves in the table of tiles, those
of the second wait for that instead (`rows.wait_for_rows`), and for the end of the first only when they are done.
"""

from __future__ import annotations
