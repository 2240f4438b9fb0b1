"""What the two operators behind `fused_deep_moe` compute, row by row, from the documents and tests of sgl-kernel-npu.

Weights are read in the vendor's layouts by their definition, with nothing in common with what prepares them.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch.nn import functional

from moe_plugin_ascend.emulation.formats import note_of, values
from moe_plugin_ascend.emulation.transport import Rows, round_to_int8

Tensor: TypeAlias = torch.Tensor


def fused_deep_moe(rows: Rows, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Tensor:
    """Mode 1.

    Args:
        rows: What arrived.
        w13: int8 `[L, H, 2I]`, columns of gate and up in turns of 64.
        w13_scale: `[L, 2I]`, read as fp32, in the order of the columns.
        w2: int8 `[L, H, I]`.
        w2_scale: `[L, H]`, read as fp32.

    Returns:
        Unweighted bf16 rows.
    """
    w13, w2 = _from_tiles(w13), _from_tiles(w2)
    columns = torch.arange(w13.shape[2])
    # Channel of a column, and whether it is of the up half.
    channel, is_up = columns // 128 * 64 + columns % 64, columns % 128 >= 64
    order = torch.cat([columns[~is_up][channel[~is_up].argsort()], columns[is_up][channel[is_up].argsort()]])
    done = []
    for expert, (x, scale) in enumerate(_int8_rows(rows)):
        first = _sums(x, w13[expert]) * w13_scale[expert].float() * scale[:, None]
        hidden, hidden_scale = round_to_int8(_swiglu(first[:, order]))
        done.append((_sums(hidden, w2[expert].T) * w2_scale[expert].float() * hidden_scale[:, None]).bfloat16())
    return torch.cat(done)


def dispatch_ffn_combine(rows: Rows, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Tensor:
    """Mode 2.

    Args:
        rows: What arrived.
        w13: int8 `[L, H, 2I]`, all columns of gate, then all of up.
        w13_scale: int64 `[L * 2I]`, of which the low 32 bits are an fp32.
        w2: int8 `[L, I, H]`.
        w2_scale: int64 `[L * H]`, likewise.

    Returns:
        Unweighted bf16 rows; NaN where an intermediate row is all zeros, since its scale divides by zero.
    """
    w13, w2 = _from_tiles(w13), _from_tiles(w2)
    scale13, scale2 = (_from_bits(scale, len(w13)) for scale in (w13_scale, w2_scale))
    done = []
    for expert, (x, scale) in enumerate(_int8_rows(rows)):
        # Sums leave the matrix unit as fp16.
        first = (_sums(x, w13[expert]) * scale13[expert]).half().float() * scale[:, None]
        hidden, hidden_scale = round_to_int8(_swiglu(first))
        second = (_sums(hidden, w2[expert]) * scale2[expert]).half().float() * hidden_scale[:, None]
        done.append(torch.where(hidden_scale[:, None] == 0, torch.nan, second).bfloat16())
    return torch.cat(done)


#: By `fuse_mode`.
MODES = {1: fused_deep_moe, 2: dispatch_ffn_combine}


def _int8_rows(rows: Rows) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales of each expert's rows."""
    return [round_to_int8(part) for part in torch.split(rows.values, rows.counts.tolist())]


def _sums(codes: Tensor, matrix: Tensor) -> Tensor:
    """Sums of int8 products, exact, rounded to fp32 once."""
    return (codes.double() @ matrix.double()).float()


def _swiglu(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=1)
    return functional.silu(gate) * up


def _from_tiles(weight: Tensor) -> Tensor:
    if note_of(weight) is None or weight.dtype != torch.int8:
        raise RuntimeError("fused_deep_moe: weights are int8 in tiles (NZ)")
    return values(weight)


def _from_bits(scales: Tensor, num_experts: int) -> Tensor:
    if scales.dtype != torch.int64 or scales.dim() != 1:
        raise RuntimeError(f"dispatch_ffn_combine: scales are {scales.dtype} {list(scales.shape)}, not int64 [L * N]")
    return (scales & 0xFFFFFFFF).to(torch.uint32).view(torch.float32).view(num_experts, -1)
