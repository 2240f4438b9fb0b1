"""Layer sizes that keep every declared limit and are small enough to be exact about."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from moe_core.quant import WHOLE, LayerQuant, QuantScheme
from moe_core.specs import Limit
from moe_core.testing.outcome import NotRun

#: Layers whose weights would have more elements than this in one expert are not drawn.
_MOST_ELEMENTS = 1 << 26
#: Channels of which a kernel reads several blocks, and a last one that is not whole.
_MANY_CHANNELS = 521
#: Experts and experts per token: a dense layer, all experts at once, one per token, and more than a byte can number.
_EXPERTS = ((1, 1), (3, 3), (17, 1), (257, 2))
#: A declared maximum of top-k is tried up to this.
_LARGEST_TOP_K = 32


@attrs.frozen(kw_only=True)
class Sizes:
    """The sizes of one test layer; the limits of its specs hold.

    Attributes:
        num_experts: Experts.
        top_k: Experts per token.
        hidden_size: H.
        intermediate_size: I.
        max_tokens: Most tokens of a forward, None for any number.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    max_tokens: int | None


def base_sizes(quant: LayerQuant, limits: Iterable[Limit], ep_size: int = 1) -> Sizes:
    """Sizes with more than one block of scales along each axis, none of them a power of two where that is free.

    Raises:
        NotRun: The limits leave no size, or none that is small enough.
    """
    rows, columns = _blocks(quant)
    hidden = max(64, 2 * columns)
    return sizes_near(quant, limits, hidden, max(48, 2 * rows if rows > 1 else 0, columns), ep_size)


def sizes_near(
    quant: LayerQuant, limits: Iterable[Limit], hidden_size: int, intermediate_size: int, ep_size: int = 1
) -> Sizes:
    """The closest allowed sizes from these on; raises `NotRun` as `base_sizes`."""
    kept = tuple(limits)
    # An odd number of experts that no small group of ranks divides.
    experts = _allowed("num_experts", 5, kept)
    if not all(limit.allows(-(-experts // ep_size)) for limit in kept if limit.field == "num_local_experts"):
        experts = _allowed("num_local_experts", -(-experts // ep_size), kept) * ep_size
    even = 2 if any(scheme.weight_bits == 4 for scheme in (quant.w13, quant.w2)) else 1
    sizes = Sizes(
        num_experts=experts,
        top_k=min(_allowed("top_k", 2, kept), experts),
        hidden_size=_allowed("hidden_size", hidden_size, kept, even),
        intermediate_size=_allowed("intermediate_size", intermediate_size, kept, even),
        max_tokens=min(_maxima("max_tokens", kept), default=None),
    )
    elements = 3 * sizes.hidden_size * sizes.intermediate_size * sizes.num_experts
    if elements > _MOST_ELEMENTS:
        raise NotRun(f"the smallest allowed layer has {elements} weights, too many for a float64 answer")
    return sizes


def odd_sizes(quant: LayerQuant, limits: Iterable[Limit]) -> list[Sizes]:
    """Sizes just past what is round, in the smallest steps that the limits allow, and extreme numbers of experts."""
    kept = tuple(limits)
    base = base_sizes(quant, kept)
    even = 2 if any(scheme.weight_bits == 4 for scheme in (quant.w13, quant.w2)) else 1
    hidden_step, inner_step = _step("hidden_size", kept, even), _step("intermediate_size", kept, even)
    wanted = [
        (_from(17, hidden_step), _from(17, inner_step)),
        (_from(33, hidden_step), base.intermediate_size + inner_step),
        (base.hidden_size + hidden_step, _from(33, inner_step)),
        # Several blocks of any kernel along both.
        (_from(_MANY_CHANNELS, hidden_step), _from(_MANY_CHANNELS, inner_step)),
    ]
    found = [sizes_near(quant, kept, hidden, inner) for hidden, inner in wanted]
    found += [attrs.evolve(found[0], num_experts=e, top_k=k) for e, k in _EXPERTS if _allows_experts(e, k, kept)]
    top_k = min(_maxima("top_k", kept), default=0)
    if 0 < top_k <= _LARGEST_TOP_K:
        # A declared maximum is a promise too.
        experts = _allowed("num_experts", max(base.num_experts, top_k), kept)
        found.append(attrs.evolve(base, num_experts=experts, top_k=min(top_k, experts)))
    return list(dict.fromkeys(found))


def _allows_experts(num_experts: int, top_k: int, limits: Iterable[Limit]) -> bool:
    values = {"num_experts": num_experts, "num_local_experts": num_experts, "top_k": top_k}
    return all(limit.allows(values[limit.field]) for limit in limits if limit.field in values)


def _from(least: int, step: int) -> int:
    """The first multiple of `step` that is not below `least`."""
    return -(-least // step) * step


def _blocks(quant: LayerQuant) -> tuple[int, int]:
    """Largest rows and columns of a block of either projection, activation groups included."""
    rows, columns = 1, 1
    for scheme in (quant.w13, quant.w2):
        block = scheme.weight_block if isinstance(scheme.weight_block, tuple) else (1, 1)
        rows = max(rows, block[0] if block[0] != WHOLE else 1)
        columns = max(columns, block[1] if block[1] != WHOLE else 1, _group(scheme))
    return rows, columns


def _group(scheme: QuantScheme) -> int:
    group = scheme.activation_group
    return group if isinstance(group, int) and group > 0 else 1


def _maxima(field: str, limits: Iterable[Limit]) -> list[int]:
    bounds = [limit.value for limit in limits if (limit.field, limit.relation) == (field, "<=")]
    return [bound for bound in bounds if isinstance(bound, int)]


def _step(field: str, limits: tuple[Limit, ...], even: int) -> int:
    multiples = [limit.value for limit in limits if (limit.field, limit.relation) == (field, "multiple_of")]
    return math.lcm(even, *[value for value in multiples if isinstance(value, int)])


def _allowed(field: str, wanted: int, limits: tuple[Limit, ...], even: int = 1) -> int:
    """The first allowed size from `wanted` on, else the largest allowed one below it."""
    mine = [limit for limit in limits if limit.field == field]
    step = _step(field, tuple(mine), even)
    listed = {size for limit in mine if isinstance(limit.value, tuple) for size in limit.value}
    above = [*range(_from(wanted, step), 16 * max(wanted, step) + 1, step), *sorted(listed)]
    least = [limit.value for limit in mine if limit.relation == ">=" and isinstance(limit.value, int)]
    above += [_from(value, step) for value in least]
    candidates: list[int] = sorted(size for size in above if size >= wanted)
    candidates += sorted({*range(step, wanted, step), *listed} - set(candidates), reverse=True)
    for size in candidates:
        if all(limit.allows(size) for limit in mine):
            return size
    raise NotRun(f"no {field} keeps {' and '.join(map(str, mine))}")
