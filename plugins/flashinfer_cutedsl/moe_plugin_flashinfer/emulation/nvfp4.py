"""NVFP4 as its definition has it: what bytes mean, and rounding to them.

An element is e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), the even one in the low nibble; 16 of them share an e4m3
block scale. With a quantization scale `g` a block of largest size `a` gets the scale `b = e4m3(g * a / 6)` and codes
`q = e2m1(x * g / b)`, and stands for `q * b / g`. Both roundings go to nearest, ties to even, and saturate. They are
done in float64, so that nothing is rounded but what the format rounds.
"""

from __future__ import annotations

import torch

from moe_core.payloads import Tensor
from moe_plugin_flashinfer.emulation.memory import BLOCK

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST, LARGEST_SCALE = 6.0, 448.0
#: e4m3 has three fraction bits, and its numbers below 2 ** -6 the step of those from there.
_FRACTION_BITS, _LEAST_EXPONENT = 3, -6

_BY_CODE = torch.tensor([*_SIZES, *(-size for size in _SIZES)])
#: Both fp32 numbers of each byte as one word of 64 bits: one look-up gives two.
_BY_BYTE = torch.stack((_BY_CODE[torch.arange(256) & 15], _BY_CODE[torch.arange(256) >> 4]), dim=1).view(torch.int64)


def _upper_ends() -> Tensor:
    """The largest number that rounds to each code below the last: a tie belongs to the even code."""
    sizes = torch.tensor(_SIZES, dtype=torch.float64)
    middles = (sizes[:-1] + sizes[1:]) / 2
    below = torch.nextafter(middles, torch.zeros_like(middles))
    return torch.where(torch.arange(len(middles)) % 2 == 0, middles, below)


_UPPER_ENDS = _upper_ends()


def values(packed: Tensor, scales: Tensor) -> Tensor:
    """Bytes `[rows, K / 2]` and e4m3 scales `[rows, K / 16]` -> fp32 `[rows, K]`; exact."""
    elements = _BY_BYTE[packed.int(), 0].view(torch.float32)
    return _in_blocks(elements).mul_(scales.float()[..., None]).flatten(1)


def to_e4m3(numbers: Tensor) -> Tensor:
    """Nearest e4m3 of float64 numbers from 0, ties to even; larger ones become 448, NaN stays."""
    saturated = numbers.clamp(max=LARGEST_SCALE)
    exponent = (torch.frexp(saturated).exponent - 1).clamp(min=_LEAST_EXPONENT)
    step = torch.exp2((exponent - _FRACTION_BITS).double())
    return ((saturated / step).round() * step).float().to(torch.float8_e4m3fn)


def to_e2m1(numbers: Tensor) -> Tensor:
    """Codes of the nearest e2m1 of float64 numbers, uint8; larger ones become 6, and so does NaN."""
    size = torch.bucketize(numbers.abs(), _UPPER_ENDS)
    sign = torch.signbit(numbers) & ~numbers.isnan()
    return (size + 8 * sign).to(torch.uint8)


def quantize(numbers: Tensor, global_scale: Tensor, largest: float = LARGEST) -> tuple[Tensor, Tensor]:
    """Numbers `[rows, K]` -> bytes `[rows, K / 2]` and e4m3 block scales `[rows, K / 16]`.

    Args:
        numbers: Any float dtype, `K` a multiple of 16.
        global_scale: The quantization scale `g`, fp32 `[1]` or `[rows]`.
        largest: What the largest number of a block shall become: 6, or 4 where a finer grid is tried.
    """
    blocks = _in_blocks(numbers.double())
    scale = global_scale.double().view(-1, 1, 1)
    is_nan = blocks.isnan()
    # The hardware's maximum takes the number where the other is none.
    amax = blocks.abs().masked_fill_(is_nan, 0.0).amax(-1, keepdim=True)
    amax = amax.masked_fill_(is_nan.all(-1, keepdim=True), torch.nan)
    block_scale = to_e4m3(scale * amax / largest)
    # A scale that rounded to zero leaves codes of any size; they stand for zero.
    scaled = torch.where(amax == 0, blocks, blocks * scale / block_scale.double())
    codes = to_e2m1(scaled).view(numbers.shape)
    return codes[:, 0::2] | codes[:, 1::2] << 4, block_scale.squeeze(-1)


def quantize_by_search(numbers: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize`, with the largest number of each block at 6 or at 4, whichever is nearer on average."""
    tried = [quantize(numbers, global_scale, largest) for largest in (LARGEST, 4.0)]
    wanted = numbers.double() * global_scale.double().view(-1, 1)
    misses = [(values(*pair).double() - wanted).abs() for pair in tried]
    errors = [_in_blocks(miss).sum(-1) for miss in misses]
    (packed, scales), (packed_at_4, scales_at_4) = tried
    is_better = errors[1] < errors[0]
    by_byte = is_better.repeat_interleave(BLOCK // 2, dim=1)
    chosen = torch.where(is_better, scales_at_4.view(torch.uint8), scales.view(torch.uint8))
    return torch.where(by_byte, packed_at_4, packed), chosen.view(torch.float8_e4m3fn)


def _in_blocks(numbers: Tensor) -> Tensor:
    return numbers.view(numbers.shape[0], numbers.shape[1] // BLOCK, BLOCK)
