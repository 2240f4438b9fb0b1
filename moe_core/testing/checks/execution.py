"""What a forward may touch: padding, uninitialised memory, its inputs, earlier outputs, and the process around it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import TypeAlias

import attrs
import torch

from moe_core.environment import Environment
from moe_core.payloads import ContiguousTokens, ExpertGroup, MaskedTokens, StandardTokens, Tensor
from moe_core.specs import TokenDtype
from moe_core.testing.backend import Backend
from moe_core.testing.bench import Bench
from moe_core.testing.cells import Cell
from moe_core.testing.memory import PoisonedMemory, State, changed, poison, restore_variables
from moe_core.testing.outcome import NotRun, require
from moe_core.testing.ranks import RankError, run_on_ranks
from moe_core.testing.sizes import odd_sizes
from moe_core.testing.tokens import scales_by_row, scales_in_place

#: Undefined rows that are added past the last group, or to every block, in units of the alignment.
_MORE_ROWS = 2


def check_padding(bench: Bench) -> None:
    """Undefined rows hold NaN, before the experts and after them, and reach no result."""
    tokens = bench.tokens(5)
    dispatch, experts, combine = bench.steps
    dispatched, handle = dispatch(*tokens)
    if isinstance(dispatched, StandardTokens):
        raise NotRun("standard tokens have no padding")
    route = bench.plan.routes[0]
    spoilt, num_rows = _spoilt(dispatched, route.row_alignment, route.token_dtype)
    rows = experts(spoilt)
    expected = spoilt.hidden_states.shape[:-1]
    require(rows.shape[:-1] == expected, f"rows {list(rows.shape)} for tokens {list(spoilt.hidden_states.shape)}")
    if isinstance(spoilt, MaskedTokens):
        rows = rows[:, :num_rows].clone()
        for expert, count in enumerate(spoilt.masked_m.tolist()):
            poison(rows[expert, count:])
    else:
        rows = rows[:num_rows].clone()
        _poison_between(rows, spoilt)
    output = combine(rows, handle)
    bench.require(tokens, "with NaN in every undefined row", output)


_Padded: TypeAlias = ContiguousTokens | MaskedTokens


def _spoilt(tokens: _Padded, alignment: int, token_dtype: TokenDtype) -> tuple[_Padded, int]:
    """The tokens with more undefined rows, all of them poisoned, and how many rows there were."""
    rows, scales = tokens.hidden_states, tokens.scales
    axis = rows.dim() - 2
    num_rows = rows.shape[axis]
    if scales is None:
        more = list(rows.shape)
        more[axis] = _MORE_ROWS * alignment
        rows = torch.cat([rows, rows.new_zeros(more)], dim=axis)
    else:
        rows, scales = rows.clone(), scales_by_row(scales, token_dtype).clone()
    spoilt = attrs.evolve(tokens, hidden_states=rows, scales=scales)
    for tensor in (rows, scales) if scales is not None and scales.shape[: axis + 1] == rows.shape[:-1] else (rows,):
        if isinstance(spoilt, MaskedTokens):
            for expert, count in enumerate(spoilt.masked_m.tolist()):
                poison(tensor[expert, count:])
        else:
            _poison_between(tensor, spoilt)
    if scales is not None:
        spoilt.scales = scales_in_place(scales, token_dtype)
    return spoilt, num_rows


def _poison_between(rows: Tensor, tokens: ContiguousTokens) -> None:
    """Poison the rows between each expert's count and the end of its group, and those past the last group."""
    start = 0
    for count, end in zip(tokens.num_tokens_per_expert.tolist(), tokens.group_ends.tolist(), strict=True):
        poison(rows[start + count : end])
        start = end
    poison(rows[start:])


def check_uninitialised_memory(bench: Bench) -> None:
    """Memory that is allocated and not written reaches no result, in preparation and in two forwards."""
    hidden, ids, weights = bench.tokens()
    ids = ids.clone()
    ids[0, :], ids[2, -1] = -1, -1
    tokens = (hidden, ids, weights)
    with PoisonedMemory():  # type: ignore[no-untyped-call]
        layer = bench.bind(bench.prepare())
        first = bench.run(tokens, layer)
        second = bench.run(tokens, layer)
    bench.require(tokens, "with NaN in all uninitialised memory", first)
    bench.require(tokens, "with NaN in all uninitialised memory, second forward", second)


def check_inputs(bench: Bench) -> None:
    """A forward changes neither its inputs nor the output of the forward before."""
    tokens, others = bench.tokens(), bench.tokens(seed=1)
    # What is masked in place shows only where there is something to mask.
    tokens[1][0::3, -1] = -1
    names = ("hidden_states", "topk_ids", "topk_weights")
    before = [(name, tensor.clone()) for name, tensor in zip(names, tokens, strict=True)]
    output = bench.run(tokens)
    found = changed(before, dict(zip(names, tokens, strict=True)))
    require(not found, f"the forward wrote to its inputs {', '.join(found)}")
    kept = output.clone()
    bench.run(others)
    found = changed([("output", kept)], {"output": output})
    require(not found, "a later forward changed the output of an earlier one: it lives in a buffer that is used again")


def check_process_state(bench: Bench) -> None:
    """Preparing, binding and running print nothing and leave variables, settings and random generators as they were."""
    found = _changed_by_a_load(bench)
    require(not found, f"a load and a forward changed {', '.join(found)}")
    backend = bench.backend
    if backend.is_importable and backend.device == "cpu":
        # What changes once stays changed: a process that has not run it yet sees that.
        name, companions = backend.names
        arguments = (name, companions, backend.environment, backend.device, backend.variables, bench.cell)
        (found,) = run_on_ranks(_changed_by_the_first_load, [arguments])
        require(not isinstance(found, RankError), f"in a fresh process: {found}")
        require(not found, f"the first load and forward of a process changed {', '.join(found)}")


def _changed_by_a_load(bench: Bench) -> list[str]:
    tokens = bench.tokens()
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        # A state that no backend sets, or one that seeds in every load would go unnoticed.
        torch.manual_seed(0x5EED)
        found: dict[str, None] = {}
        # With gradients and without: setting what is set already changes nothing.
        for with_gradients in (True, False):
            with torch.set_grad_enabled(with_gradients):
                before = State.now()
                bench.run(tokens, bench.bind(bench.prepare()))
                found |= dict.fromkeys(State.now().changed_since(before))
    return [*found, *([f"stdout, by {printed.getvalue()[:80]!r}"] if printed.getvalue() else [])]


def _changed_by_the_first_load(
    group: ExpertGroup,
    plugin: str,
    companions: tuple[str, ...],
    environment: Environment,
    device: str,
    variables: Mapping[str, str],
    cell: Cell,
) -> list[str]:
    """A job for another process, which is given the plugin by name."""
    restore_variables(variables)
    bench = Bench(Backend(plugin, environment=environment, device=device, companions=companions), cell)
    return _changed_by_a_load(bench)


def check_odd_sizes(bench: Bench) -> None:
    """Sizes just past every round number, and at every declared maximum, give the answer too."""
    for sizes in odd_sizes(bench.cell.quant, bench.cell.limits):
        other = Bench(bench.backend, bench.cell, sizes)
        text = f"E {sizes.num_experts}, K {sizes.top_k}, H {sizes.hidden_size}, I {sizes.intermediate_size}"
        hidden, ids, weights = other.tokens()
        if not (ids == sizes.num_experts - 1).any():
            # Of many experts few are drawn, and the last one is the first to be forgotten.
            ids[-1, -1] = sizes.num_experts - 1
        other.require((hidden, ids, weights), text)
        other.require(other.tokens(1), f"{text}, one token")


def check_batch_invariance(bench: Bench) -> None:
    """Declared `deterministic`: a token's bits are the same alone, in another order and in another batch."""
    together = Bench(bench.backend, bench.cell, bench.sizes, deterministic=True)
    hidden, ids, weights = together.tokens()
    whole = together.run((hidden, ids, weights))
    order = torch.arange(len(hidden) - 1, -1, -1, device=hidden.device)
    again = together.run((hidden, ids, weights))
    require(torch.equal(again, whole), "two equal calls give different bits")
    reverse = together.run((hidden[order], ids[order], weights[order]))
    require(torch.equal(reverse[order], whole), "tokens in another order have other bits")
    for token in range(len(hidden)):
        alone = together.run((hidden[token, None], ids[token, None], weights[token, None]))
        require(torch.equal(alone[0], whole[token]), f"token {token} alone has other bits than in its batch")


def check_repeatability(bench: Bench) -> None:
    """A dispatcher that is declared `deterministic` gives the same bits for equal tokens and equal rows."""
    tokens = bench.tokens()
    dispatch, experts, combine = bench.steps
    dispatched, handle = dispatch(*tokens)
    rows = experts(dispatched)
    first = combine(rows.clone(), handle)
    _, handle = dispatch(*tokens)
    second = combine(rows.clone(), handle)
    require(torch.equal(first, second), "equal tokens and equal rows give different bits")
