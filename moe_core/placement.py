"""Which rank holds which expert, and how often.

The places for experts, over all ranks in rank order, are *slots* (a token's slots are something else: its K choices).
Each rank owns a run of them. Dispatchers and runners count in slots: the core turns the expert ids of a token into
slots first, so that no backend needs to know of placements and copies.
"""

from __future__ import annotations

from typing import Any

import attrs

from moe_core.errors import SpecError
from moe_core.vocabulary import as_tuple, one_of, tuple_of

PLACEMENTS = ("contiguous", "round_robin", "map")


@attrs.frozen
class ExpertPlacement:
    """Which rank of the expert-parallel group owns which expert; the loader and the id map both ask here.

    Attributes:
        kind: `contiguous` (slots are experts in their order), `round_robin` (expert e on rank e modulo the ranks) or
            `map`.
        experts: For `map`: the expert in each slot. One that stands more than once has that many copies, and a token
            uses one of them; experts that every token uses are experts like the others here.
    """

    kind: str = attrs.field(default="contiguous", validator=one_of(*PLACEMENTS))
    experts: tuple[int, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(int))

    @experts.validator
    def _belongs_to_a_map(self, attribute: attrs.Attribute[Any], value: tuple[int, ...]) -> None:
        if bool(value) != (self.kind == "map"):
            raise SpecError(
                f"ExpertPlacement: experts go with kind 'map' and with no other, got {self.kind!r}, {value}"
            )

    def check(self, num_experts: int) -> None:
        """Raise `SpecError` for a map that misses an expert or names one that the layer does not have."""
        if self.kind != "map":
            return
        unknown = sorted(set(self.experts) - set(range(num_experts)))
        missing = sorted(set(range(num_experts)) - set(self.experts))
        if unknown or missing:
            raise SpecError(
                f"ExpertPlacement: a map must name each of the experts 0..{num_experts - 1} at least once; "
                f"unknown {unknown}, missing {missing}"
            )

    def num_slots(self, num_experts: int) -> int:
        """Slots over all ranks: the experts, and their further copies."""
        return len(self.experts) if self.kind == "map" else num_experts

    def local_slots(self, num_experts: int, ep_size: int, rank: int) -> range:
        """The slots of `rank`: as many for each, one more for the first ranks where they do not divide.

        Raises:
            SpecError: `rank` is not in `0 .. ep_size - 1`.
        """
        if not 0 <= rank < ep_size:
            raise SpecError(f"ExpertPlacement: rank {rank} is not in 0..{ep_size - 1}")
        base, extra = divmod(self.num_slots(num_experts), ep_size)
        start = rank * base + min(rank, extra)
        return range(start, start + base + (rank < extra))

    def local_experts(self, num_experts: int, ep_size: int, rank: int) -> tuple[int, ...]:
        """The experts that `rank` holds, in the order of its slots, which is that of its weight rows.

        Raises:
            SpecError: As `local_slots`.
        """
        slots = self.local_slots(num_experts, ep_size, rank)
        if self.kind == "round_robin":
            return tuple(range(rank, num_experts, ep_size))
        return tuple(self.experts[slot] for slot in slots) if self.kind == "map" else tuple(slots)
