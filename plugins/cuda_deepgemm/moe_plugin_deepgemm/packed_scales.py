"""Weight scales as DeepGEMM reads them on Blackwell: four exponents to a word, a word for every row.

Packed scales are those of the layout `ue8m0_128` (`moe_core.kernels.scale_layouts`): int32 words along the channels,
the first exponent in the low byte, neighbouring rows side by side in memory.
"""

from __future__ import annotations

import torch

from moe_core.kernels.scale_layouts import PACKED_SCALES, code_format
from moe_core.payloads import Tensor
from moe_core.specs import TokenDtype

#: Rows and channels that share a stored scale.
BLOCK = 128
_, PACKED = code_format(TokenDtype("fp8", "ue8m0_128"))


def pack_block_scales(exponents: Tensor, num_rows: int) -> Tensor:
    """Exponent bytes of blocks of 128 x 128 -> words for every row.

    Args:
        exponents: `[L, ceil(N / 128), ceil(K / 128)]` uint8 (the value is `2 ** (byte - 127)`).
        num_rows: `N`, a multiple of 4.

    Returns:
        int32 `[L, N, ceil(K / 512)]` with stride 1 along the rows; bytes past the last block are 0.
    """
    num_experts, _, columns = exponents.shape
    packed = PACKED.empty((num_experts, num_rows), columns * BLOCK, exponents.device)
    by_word = exponents.new_zeros((*exponents.shape[:2], packed.shape[2] * PACKED_SCALES), dtype=torch.uint8)
    by_word[..., :columns] = exponents.view(torch.uint8)
    rows = torch.arange(num_rows, device=exponents.device) // BLOCK
    return packed.copy_(by_word.view(torch.int32)[:, rows])
