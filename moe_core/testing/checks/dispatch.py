"""What a dispatcher does by itself: the form of what it sends, the groups, and the way there and back."""

from __future__ import annotations

import itertools

import attrs
import torch

from moe_core.errors import counted
from moe_core.payloads import TORCH_DTYPES, ContiguousTokens, Dispatched, MaskedTokens, StandardTokens, Tensor
from moe_core.testing.bench import Bench
from moe_core.testing.capture import CAPTURES, Capture
from moe_core.testing.compare import Tokens, mismatch
from moe_core.testing.outcome import NotRun, require
from moe_core.testing.tokens import check_token_form, token_values
from moe_core.testing.tolerance import wire_tolerance

_TYPES = {"standard": StandardTokens, "contiguous": ContiguousTokens, "masked": MaskedTokens}


def check_dispatched_form(bench: Bench) -> None:
    """Dispatched tokens have the declared format, dtype and scale layout; each group holds its expert's tokens."""
    hidden, ids, weights = bench.tokens()
    ids = ids.clone()
    ids[0, -1] = -1
    dispatched = _dispatch(bench, (hidden, ids, weights))[0]
    route = bench.plan.routes[0]
    check_token_form(dispatched.hidden_states, dispatched.scales, route.token_dtype, bench.request.hidden_size)
    if isinstance(dispatched, StandardTokens):
        require(dispatched.topk_ids.dtype in (torch.int32, torch.int64), f"ids are {dispatched.topk_ids.dtype}")
        return
    values = token_values(dispatched.hidden_states, dispatched.scales, route.token_dtype)
    for expert, (start, count) in enumerate(_groups(dispatched, route.row_alignment)):
        wanted = hidden[(ids == expert).any(dim=1)].cpu().double()
        sent = counted(len(wanted), "token")
        require(count == len(wanted), f"expert {expert} has {counted(count, 'row')} for the {sent} sent to it")
        exact = route.token_dtype.scales == "none"
        rows = values[start : start + count]
        same = torch.equal(rows.sort(dim=0).values, wanted.sort(dim=0).values)
        require(same or not exact, f"the rows of expert {expert} are not the tokens that were sent to it")


def _groups(dispatched: ContiguousTokens | MaskedTokens, alignment: int) -> list[tuple[int, int]]:
    """First row and count of each expert's rows, after checks on how they lie."""
    if isinstance(dispatched, MaskedTokens):
        counts, block = dispatched.masked_m, dispatched.hidden_states.shape[1]
        require(counts.dtype == torch.int32, f"masked_m is {counts.dtype}, expected int32")
        full = [expert for expert, count in enumerate(counts.tolist()) if count > block]
        require(not full, f"experts {full} have more rows than the {block} of their block")
        require(block % alignment == 0, f"blocks of {block} rows, the plan says multiples of {alignment}")
        return [(expert * block, count) for expert, count in enumerate(counts.tolist())]
    counts, ends = dispatched.num_tokens_per_expert, dispatched.group_ends
    require(counts.dtype == ends.dtype == torch.int32, f"counts are {counts.dtype}, ends {ends.dtype}, expected int32")
    bounds = [0, *ends.tolist()]
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        count = int(counts[expert])
        require(end - start >= count, f"expert {expert} has {counted(count, 'row')} in a group of {end - start}")
        require(start % alignment == 0, f"group {expert} begins at row {start}, the plan aligns to {alignment}")
    require(bounds[-1] <= dispatched.hidden_states.shape[0], f"groups end at row {bounds[-1]} of fewer")
    return list(zip(bounds[:-1], counts.tolist(), strict=True))


def _dispatch(bench: Bench, tokens: Tokens) -> tuple[Dispatched, object]:
    dispatch, _, _ = bench.steps
    dispatched, handle = dispatch(*tokens)
    expected = _TYPES[bench.cell.format]
    require(isinstance(dispatched, expected), f"dispatch gives {type(dispatched).__name__}, not {expected.__name__}")
    return dispatched, handle


def check_round_trip(bench: Bench) -> None:
    """Dispatch, experts that change nothing, combine: each token comes back times the sum of its router weights.

    Rows may have any strides: GEMMs write them as they like.
    """
    hidden, ids, weights = bench.tokens()
    ids = ids.clone()
    ids[0, -1], ids[1] = -1, -1
    tokens = (hidden, ids, weights)
    dispatched, handle = _dispatch(bench, tokens)
    rows = _unchanged(dispatched, bench)
    strided = rows.mT.contiguous().mT if bench.cell.format != "standard" else rows
    _, _, combine = bench.steps
    output = combine(strided, handle)
    dtype = TORCH_DTYPES[bench.request.dtype]
    require(output.dtype == dtype, f"combine gives {output.dtype}, the layer's dtype is {dtype}")
    limit = bench.tolerance + wire_tolerance(bench.plan.routes[0].token_dtype)
    kept = (ids >= 0).cpu()
    once = weights.cpu().double() * kept
    problem = mismatch(output, _scaled(hidden, once), limit)
    if problem is None:
        return
    for name, factor in (("not applied", kept.double()), ("applied twice", once * weights.cpu().double())):
        if mismatch(output, _scaled(hidden, factor), limit) is None:
            problem += f"; it is what comes out if router weights are {name}"
    require(False, f"dispatch and combine do not bring tokens back: {problem}")


def _scaled(hidden: Tensor, factors: Tensor) -> Tensor:
    """`[T, H]` times the sum of each token's factors; rows without any are zero whatever they hold."""
    total = factors.sum(dim=1, keepdim=True)
    return torch.where(total == 0, 0.0, hidden.cpu().double() * total)


def _unchanged(dispatched: Dispatched, bench: Bench) -> Tensor:
    """What experts that change nothing give back, in the layer's dtype."""
    token_dtype = bench.plan.routes[0].token_dtype
    values = token_values(dispatched.hidden_states, dispatched.scales, token_dtype, _unit(bench))
    if isinstance(dispatched, StandardTokens):
        factors = dispatched.topk_weights.cpu().double() * (dispatched.topk_ids >= 0).cpu()
        values = _scaled(values, factors)
    shape = (*dispatched.hidden_states.shape[:-1], bench.request.hidden_size)
    return values.view(shape).to(TORCH_DTYPES[bench.request.dtype]).to(bench.backend.device)


def _unit(bench: Bench) -> float:
    """The calibrated scale of tokens that have one."""
    weights = bench.layer.weights
    if weights.token_scale is None or not bench.plan.routes[0].token_dtype.is_calibrated:
        return 1.0
    return 1 / float(weights[weights.token_scale].view(-1)[0])


def check_graph_capture(bench: Bench, capture: Capture | None = None) -> None:
    """Declared `graph_safe`: a captured forward, replayed with other tokens in the same memory, gives their answer.

    Args:
        bench: The cell.
        capture: How to capture; default: as the device does, on a CPU by an emulation.
    """
    capture = capture or CAPTURES.get(bench.backend.device)
    if capture is None:
        raise NotRun(f"no way to capture on device {bench.backend.device} is known here")
    workload = attrs.evolve(bench.request.workloads[0], graph_capture=True)
    captured = Bench(bench.backend, bench.cell, bench.sizes, workloads=(workload,))
    tokens, others = captured.tokens(), captured.tokens(seed=1)
    # Other numbers of rows for each expert.
    others[1][:, -1] = -1
    replay = capture(captured.run, tokens, others)
    for seed in (2, 3):
        later = captured.tokens(seed=seed)
        for target, source in zip(tokens, later, strict=True):
            target.copy_(source)
        captured.require(later, "a captured forward, replayed with other tokens and another routing", replay())
