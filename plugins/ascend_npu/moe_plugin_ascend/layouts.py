"""Weights as torch_npu's grouped GEMM reads them: pure functions of one or more matrices.

Shapes: a projection has `N` outputs (rows of the canonical matrix) and `K` inputs; leading axes, if any, count experts.
The forms are those of the vendor's serving code for ModelSlim checkpoints: `[K, N]` matrices for integers, two int4
along `N` in a byte, scales of int4 weights as the bits of their fp32 in an int64.
"""

from __future__ import annotations

import torch

from moe_core.errors import WeightsError
from moe_core.payloads import Tensor

#: int4 in one of the int32 words that the operators take for it.
INT4_PER_WORD = 8
#: Outputs that are repacked at a time: unpacked they take twice their memory.
_OUTPUTS_AT_A_TIME = 256


def transposed(weight: Tensor) -> Tensor:
    """`[.., N, K]` -> contiguous `[.., K, N]` in memory of its own."""
    return weight.mT.clone(memory_format=torch.contiguous_format)


def unpack_int4(packed: Tensor) -> Tensor:
    """Canonical int4 (uint8, two along the last axis, the first in the low nibble) -> int8 `-8 .. 7`, twice as wide."""
    pairs = packed.contiguous().view(torch.int8)
    # Shifts of signed bytes carry the sign along.
    return torch.stack(((pairs << 4) >> 4, pairs >> 4), dim=-1).flatten(-2)


def pack_int4(values: Tensor) -> Tensor:
    """int8 `-8 .. 7` `[.., N]` -> int8 bytes `[.., N / 2]` of two, the even one in the low nibble.

    Raises:
        WeightsError: `N` does not fill words of eight.
    """
    width = values.shape[-1]
    if width % INT4_PER_WORD:
        raise WeightsError(
            f"int4 weights fill words of {INT4_PER_WORD}: {width} outputs do not; those of w13 follow from "
            "intermediate_size and tp_size, those of w2 are hidden_size"
        )
    # The mask takes the sign off the low value, which would fill the high nibble.
    return (values[..., 0::2] & 15) | (values[..., 1::2] << 4)


def int4_columns(packed: Tensor) -> Tensor:
    """Canonical int4 `[N, K / 2]`, two inputs in a byte -> bytes `[K, N / 2]`, two outputs in a byte."""
    parts = torch.split(packed, _OUTPUTS_AT_A_TIME)
    columns = packed.new_empty((2 * packed.shape[1], packed.shape[0] // 2), dtype=torch.int8)
    for part, place in zip(parts, torch.split(columns, _OUTPUTS_AT_A_TIME // 2, dim=1), strict=True):
        place.copy_(pack_int4(unpack_int4(part).mT))
    return columns


def scale_bits(scale: Tensor) -> Tensor:
    """fp32 -> int64 with the same 32 bits below and zeros above: what the operators call a scale of int4 weights."""
    return scale.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def scale_bias(packed: Tensor, scale: Tensor) -> Tensor:
    """`8 * sum of the inputs' weights * scale`, fp32 `[.., N]`, of canonical int4 `[.., N, K / 2]` under int8 tokens.

    The operator splits a token `x` into nibbles, `x = 16 * high + low`, and multiplies `low - 8`, a signed int4. The
    eight that it left out comes back through its bias.
    """
    pairs = packed.contiguous().view(torch.int8)
    total = ((pairs << 4) >> 4).sum(-1, dtype=torch.int32) + (pairs >> 4).sum(-1, dtype=torch.int32)
    return total.float() * 8.0 * scale.float()
