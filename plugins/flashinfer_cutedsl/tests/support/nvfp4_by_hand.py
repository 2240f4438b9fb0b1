"""NVFP4 by hand, in float64 and loops: what tests hold the emulation to. Nothing here is shared with either side."""

from __future__ import annotations

import functools

import attrs
import torch

BLOCK = 16
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
#: Numbers of the codes 0 .. 126; bias 7, three fraction bits, the first eight without a hidden one.
E4M3 = torch.tensor(
    [(code % 8 + 8 * (code >= 8)) * 2.0 ** (max(code // 8, 1) - 10) for code in range(127)], dtype=torch.float64
)


def nearest(numbers: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Index of the nearest entry for numbers from 0, the even one of two that are as near."""
    # So far outside float64 would not tell the entries apart.
    distances = (numbers.double().clamp(max=2 * table[-1])[..., None] - table).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)
    return torch.where(is_nearest, torch.arange(len(table)) % 2, 2).argmin(-1)


@attrs.frozen(eq=False)
class Rounded:
    """Rows in NVFP4.

    Attributes:
        codes: `[rows, K]`, 0 .. 15.
        scale_codes: `[rows, K / 16]`, 0 .. 126.
        global_scale: What the numbers were multiplied with.
    """

    codes: torch.Tensor
    scale_codes: torch.Tensor
    global_scale: float

    @property
    def raw(self) -> torch.Tensor:
        """The numbers as a GEMM sees them: without the global scale."""
        sizes = E2M1[self.codes % 8] * torch.where(self.codes >= 8, -1.0, 1.0)
        return (sizes.unflatten(1, (-1, BLOCK)) * E4M3[self.scale_codes][..., None]).flatten(1)

    @property
    def values(self) -> torch.Tensor:
        """float64 `[rows, K]`."""
        return self.raw / self.global_scale

    @property
    def packed(self) -> torch.Tensor:
        """uint8 `[rows, K / 2]`, the even element in the low nibble."""
        return (self.codes[:, 0::2] + 16 * self.codes[:, 1::2]).to(torch.uint8)

    @property
    def scales(self) -> torch.Tensor:
        """e4m3 `[rows, K / 16]`."""
        return self.scale_codes.to(torch.uint8).view(torch.float8_e4m3fn)

    def ordered(self, rows: torch.Tensor) -> Rounded:
        """The same with its rows in another order."""
        return Rounded(self.codes[rows], self.scale_codes[rows], self.global_scale)


def rounded(numbers: torch.Tensor, global_scale: float) -> Rounded:
    """Rows `[rows, K]` rounded by definition."""
    blocks = numbers.double().unflatten(1, (-1, BLOCK))
    scale_codes = nearest(blocks.abs().amax(-1) * global_scale / 6, E4M3)
    scale = E4M3[scale_codes][..., None]
    sizes = nearest(blocks.abs() * global_scale / torch.where(scale == 0, 1e-300, scale), E2M1)
    return Rounded((sizes + 8 * torch.signbit(blocks)).flatten(1), scale_codes, global_scale)


def place(row: int, scale: int, scales_in_row: int) -> int:
    """Byte of a block scale in 128x4 tiles."""
    tile = (row // 128) * (-(-scales_in_row // 4)) + scale // 4
    return 512 * tile + 16 * (row % 32) + 4 * (row // 32 % 4) + scale % 4


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """`[rows, K / 16]` -> whole tiles `[rows_pad, K_pad]` of its dtype, filled up with zeros."""
    rows, width = scales.shape
    out = torch.zeros(-(-rows // 128) * 128, -(-width // 4) * 4, dtype=torch.uint8)
    out.view(-1)[_places(rows, width)] = scales.view(torch.uint8)
    return out.view(scales.dtype)


@functools.cache
def _places(rows: int, width: int) -> torch.Tensor:
    return torch.tensor([[place(row, column, width) for column in range(width)] for row in range(rows)])


def mma_view(tiles: list[torch.Tensor]) -> torch.Tensor:
    """One expert's tiles after the other -> the view `(32, 4, rows / 128, 4, K / 64, experts)` of them."""
    stored = torch.stack([tile.view(torch.uint8) for tile in tiles])
    count, rows, width = stored.shape
    view = stored.view(count, rows // 128, width // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
    return view.view(torch.float8_e4m3fn)


def bf16(numbers: torch.Tensor) -> torch.Tensor:
    """Rounded to bf16, in float64."""
    return numbers.float().bfloat16().double()


def silu(numbers: torch.Tensor) -> torch.Tensor:
    """In float64."""
    return numbers.double() / (1 + torch.exp(-numbers.double()))
