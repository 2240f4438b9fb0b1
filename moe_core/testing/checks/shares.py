"""Layers that are not whole: one tensor-parallel rank's share of I, and experts with copies in any order."""

from __future__ import annotations

import attrs

from moe_core.placement import ExpertPlacement
from moe_core.testing.bench import Bench
from moe_core.testing.cells import Cell
from moe_core.testing.outcome import NotRun
from moe_core.testing.stored import without_last_channel

#: Most further copies that are tried for a number of slots that the limits allow.
_MOST_COPIES = 64


def check_tensor_parallel(bench: Bench) -> None:
    """Of two tensor-parallel ranks each gives its part of the sum, where I does not divide and the last is padded."""
    share = bench.sizes.intermediate_size
    sizes = attrs.evolve(bench.sizes, intermediate_size=2 * share - 1)
    part = Bench(bench.backend, bench.cell, sizes, tp_size=2)
    tokens = part.tokens()
    text = f"{share} of {sizes.intermediate_size} intermediate channels, tensor-parallel"
    part.require(tokens, f"rank 0 of 2 with {text}")
    stored = without_last_channel(part.stored)
    output = part.run(tokens, part.bind(part.prepare(part.raw(stored))))
    part.require(tokens, f"rank 1 of 2 with {text}, the last one padding", output, stored)


def check_expert_copies(bench: Bench) -> None:
    """Experts in any slots, some of them twice: backends know slots, not experts."""
    copied = Bench(bench.backend, bench.cell, bench.sizes, placement=placement_with_copies(bench.cell))
    _, ids, _ = copied.tokens()
    ids = ids.clone()
    ids[0, -1] = -1
    tokens = copied.tokens(ids=ids)
    copied.require(tokens, f"{copied.request.num_experts} experts in {copied.request.num_slots} slots")


def placement_with_copies(cell: Cell) -> ExpertPlacement:
    """All experts in another order, and further copies of some, as many as the limits want.

    Raises:
        NotRun: The limits allow no number of copies.
    """
    experts = cell.base_sizes().num_experts
    fields = ("num_experts", "num_local_experts")
    for copies in range(2, _MOST_COPIES):
        slots = experts + copies
        counts = {"num_experts": slots, "num_local_experts": -(-slots // cell.ep_size)}
        if all(limit.allows(counts[limit.field]) for limit in cell.limits if limit.field in fields):
            order = [*reversed(range(experts)), *(copy % experts for copy in range(copies))]
            return ExpertPlacement("map", order)
    kept = " and ".join(str(limit) for limit in cell.limits if limit.field in fields)
    raise NotRun(f"no number of copies keeps {kept}")
