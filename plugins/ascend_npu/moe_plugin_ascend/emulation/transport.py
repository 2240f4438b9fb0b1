"""How the emulated library moves rows: every rank shows everything, and picks its own."""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist

Tensor: TypeAlias = torch.Tensor


@attrs.define(eq=False)
class Rows:
    """What arrived on one rank.

    Attributes:
        values: bf16 `[R, H]`, grouped by local expert.
        counts: int64 `[L]`, rows of each expert.
        places: int64 `[R, 3]`, rank, token and slot of each row.
    """

    values: Tensor
    counts: Tensor
    places: Tensor


def every_rank(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What every rank of `group` shows; a collective."""
    shown: list[Any] = [None] * group.size()
    dist.all_gather_object(shown, mine, group=group)
    return shown


def rows_for(group: dist.ProcessGroup, x: Tensor, ids: Tensor, num_experts: int) -> Rows:
    """The rows of this rank's experts: `[T, H]` and ids `[T, K]` of all ranks, sorted out."""
    share = num_experts // group.size()
    first = group.rank() * share
    values, places, counts = [x[:0]], [torch.empty(0, 3, dtype=torch.int64)], []
    everything = every_rank(group, (x, ids))
    for expert in range(first, first + share):
        found = 0
        for rank, (tokens, names) in enumerate(everything):
            token, slot = torch.where(names == expert)
            values.append(tokens[token])
            places.append(torch.stack([torch.full_like(token, rank), token, slot], dim=1))
            found += len(token)
        counts.append(found)
    return Rows(torch.cat(values), torch.tensor(counts), torch.cat(places))


def returned(group: dist.ProcessGroup, x: Tensor, rows: Rows, ids: Tensor) -> Tensor:
    """Rows `[>= R, H]` of all ranks -> those of this rank's tokens, `[T, K, H]`; NaN where no rank has one."""
    mine = torch.full((*ids.shape, x.shape[1]), torch.nan, dtype=x.dtype)
    for values, places in every_rank(group, (x[: len(rows.places)], rows.places)):
        is_mine = places[:, 0] == group.rank()
        mine[places[is_mine, 1], places[is_mine, 2]] = values[is_mine]
    return mine


def round_to_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """`[R, C]` -> int8 codes and fp32 scales `[R]`: amax / 127, to nearest, ties to even; zeros stay zeros."""
    wide = values.float()
    scales = wide.abs().amax(1) / 127
    return (wide / torch.where(scales == 0, 1.0, scales)[:, None]).round().to(torch.int8), scales
