"""Tokens in NVFP4 as DeepEP returns them, and as runners read blocks of rows.

The library calls what it returns `[L, H/2, M]` and hands out views for kernels that read `(M, H/2, L)` over memory
`[L, M, H/2]`, as FlashInfer's do. Whatever is not that is refused: such kernels look at no strides.
"""

from __future__ import annotations

import torch

from moe_core.errors import PluginError
from moe_core.payloads import Tensor

#: Axes of scales `(32, 4, M/128, 4, H/64, L)` in the order of their memory.
_SCALES_IN_MEMORY = (5, 2, 4, 0, 1, 3)


def blocks_of(rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the library `(M, H/2, L)` and `(32, 4, M/128, 4, H/64, L)` -> `[L, M, H/2]` and e4m3 `[L, M, H/16]`.

    Raises:
        PluginError: They lie in memory in another order.
    """
    blocks, tiles = rows.permute(2, 0, 1), scales.permute(_SCALES_IN_MEMORY)
    num_experts, num_rows, packed = blocks.shape
    fits = tiles.shape == (num_experts, num_rows // 128, packed // 32, 32, 4, 4)
    if not (fits and blocks.is_contiguous() and tiles.is_contiguous()):
        raise PluginError(
            f"deep_ep returned tokens {list(rows.shape)} with strides {list(rows.stride())} and scales "
            f"{list(scales.shape)} with strides {list(scales.stride())}; this plugin reads (M, H/2, L) over memory "
            "[L, M, H/2], and scales in tiles of 128 rows: pin dispatch_dtype='bf16'"
        )
    return blocks, tiles.view(torch.float8_e4m3fn).view(num_experts, num_rows, packed // 8)
