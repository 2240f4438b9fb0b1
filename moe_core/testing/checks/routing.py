"""Routings at the edge: slots without expert, idle and crowded experts, no tokens, repeated ids, strided tensors."""

from __future__ import annotations

import torch

from moe_core.errors import MoeCoreError, counted
from moe_core.kernels.checks import can_assert
from moe_core.testing.bench import Bench
from moe_core.testing.compare import require_apart
from moe_core.testing.outcome import NotRun, require

#: Counts around the sizes at which kernels change their way: one row, few rows, one tile and its neighbours.
_ROW_COUNTS = (1, 2, 3, 5)
#: Row counts of larger tiles are tried up to here.
_MOST_ROWS = 257
#: Tokens of batches that follow each other: more and fewer, some as many as before, and once very many.
_BATCHES = (65, 17, 65, 1, 130, 17, 1031)


def check_missing_experts(bench: Bench) -> None:
    """-1 contributes nothing in any slot, and a token with nothing else is not read: its row may be NaN."""
    hidden, ids, weights = bench.tokens()
    _check_leading_slots(bench, hidden, ids.clone(), weights)
    ids = ids.clone()
    ids[0::2, -1] = -1
    tokens = (hidden, ids, weights)
    require_apart(bench.stored, "-1 is read as the last expert", tokens, bench.tolerance)
    bench.require(tokens, "slots with id -1")
    ids[1], hidden = -1, hidden.clone()
    hidden[1] = torch.nan
    bench.require((hidden, ids, weights), "a token without any expert, whose row is NaN")
    hidden, ids = torch.full_like(hidden, torch.nan), torch.full_like(ids, -1)
    for count in (len(ids), 1):
        nothing = (hidden[:count], ids[:count], weights[:count])
        bench.require(nothing, f"{counted(count, 'token')}, none with an expert, whose rows are NaN")


def _check_leading_slots(bench: Bench, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Another rank's expert may stand before one of this rank, and few tokens may take a way of their own."""
    if ids.shape[1] < 2:
        return
    ids[1::2, 0] = -1
    bench.require((hidden, ids, weights), "slots with id -1 before others")
    for token in range(2):
        one = slice(token, token + 1)
        alone = ids[one].clone()
        alone[:, token - 1] = -1
        bench.require((hidden[one], alone, weights[one]), f"one token with id -1 in slot {(token - 1) % ids.shape[1]}")


def check_idle_experts(bench: Bench) -> None:
    """Experts without tokens do not matter: their weights may be NaN."""
    raw = bench.raw()
    if bench.request.quant.is_quantized:
        raise NotRun("codes of quantized weights cannot all be NaN")
    count = bench.request.num_experts
    used = max(bench.request.top_k, 1)
    if used >= count:
        raise NotRun("every token uses every expert")
    for tensor in raw.tensors.values():
        tensor[used:] = torch.nan
    order = torch.arange(bench.request.top_k).expand(5, -1).contiguous()
    tokens = bench.tokens(ids=order)
    output = bench.run(tokens, bench.bind(bench.prepare(raw)))
    bench.require(tokens, f"with NaN weights in the experts {used}..{count - 1}, which no token uses", output)


def check_one_expert(bench: Bench) -> None:
    """All tokens go to one expert."""
    for expert in (0, bench.request.num_experts - 1):
        ids = torch.full((bench.tokens()[1].shape[0], bench.request.top_k), -1)
        ids[:, 0] = expert
        bench.require(bench.tokens(ids=ids), f"all tokens at expert {expert}")


def check_no_tokens(bench: Bench) -> None:
    """A call without tokens gives `[0, H]`, also between calls with some."""
    bench.run(bench.tokens())
    output = bench.run(bench.tokens(0))
    expected = [0, bench.request.hidden_size]
    require(list(output.shape) == expected, f"no tokens give shape {list(output.shape)}, expected {expected}")
    bench.require(bench.tokens(), "after a call without tokens")


def check_repeated_ids(bench: Bench) -> None:
    """An expert that occurs twice in a row counts twice."""
    if bench.request.top_k < 2:
        raise NotRun("top_k is 1")
    _, ids, _ = bench.tokens()
    ids = ids.clone()
    ids[:, 1] = ids[:, 0]
    tokens = bench.tokens(ids=ids)
    require_apart(bench.stored, "an expert that occurs twice in a row counts once", tokens, bench.tolerance)
    bench.require(tokens, "one expert twice in every row")


def check_row_counts(bench: Bench) -> None:
    """One expert gets one row, few rows, and as many as its alignment, one less and one more."""
    alignment = bench.plan.routes[0].row_alignment
    counts = {*_ROW_COUNTS, alignment - 1, alignment, alignment + 1, 2 * alignment + 1}
    limit = bench.sizes.max_tokens or _MOST_ROWS
    if limit <= _MOST_ROWS:
        counts.add(limit)
    for count in sorted(count for count in counts if 0 < count <= limit):
        ids = torch.full((count, bench.request.top_k), -1)
        ids[:, 0] = 1 % bench.request.num_experts
        ids[-1, -1] = 0
        bench.require(bench.tokens(ids=ids), f"{counted(count, 'row')} for one expert")


def check_batch_sizes(bench: Bench) -> None:
    """Batches grow and shrink, each with a routing of its own: nothing is kept from one to the next.

    The first is inside of `torch.inference_mode`: what is made there cannot be written to outside.
    """
    layer = bench.bind(bench.prepare())
    for seed, count in enumerate(_BATCHES):
        tokens = bench.tokens(count, seed=seed)
        with torch.inference_mode(seed == 0):
            output = bench.run(tokens, layer)
        bench.require(tokens, f"{counted(count, 'token')}, the batch number {seed + 1}", output)


def check_id_layouts(bench: Bench) -> None:
    """Ids may be int32 or int64, and all inputs may be slices of wider tensors."""
    hidden, ids, weights = bench.tokens()
    bench.require((hidden, ids.int(), weights), "int32 ids")
    bench.require((hidden, ids.long(), weights), "int64 ids")
    wide_ids = torch.full((ids.shape[0], ids.shape[1] + 3), -1, dtype=ids.dtype, device=ids.device)
    wide_ids[:, : ids.shape[1]] = ids
    sliced = wide_ids[:, : ids.shape[1]]
    bench.require((hidden, sliced, weights), "ids that are a slice of a wider tensor")
    bench.require((hidden, ids, weights.mT.contiguous().mT), "router weights that lie transposed")
    wide = torch.full((hidden.shape[0], hidden.shape[1] + 16), torch.nan, dtype=hidden.dtype, device=hidden.device)
    wide[:, : hidden.shape[1]] = hidden
    bench.require((wide[:, : hidden.shape[1]], ids, weights), "hidden states that are a slice of a wider tensor")
    bench.require((hidden.mT.contiguous().mT, ids, weights), "hidden states that lie transposed")


def check_bad_ids(bench: Bench) -> None:
    """An id beyond the experts, a negative one other than -1, and ids that are no integers are refused.

    A device that cannot assert may make the token of such an id NaN instead.
    """
    hidden, ids, weights = bench.tokens()
    may_be_nan = not can_assert(hidden)
    if bench.backend.device != "cpu" and not may_be_nan:
        raise NotRun("on this device a bad id is an assertion, which ends the process")
    for bad in (bench.request.num_experts, -2, 1_000_000):
        wrong = ids.clone()
        wrong[-1, -1] = bad
        what = f"expert id {bad} of {bench.request.num_experts} experts"
        _require_refusal(bench, (hidden, wrong, weights), what, may_be_nan)
    _require_refusal(bench, (hidden, ids.float(), weights), "ids in float32")


def _require_refusal(bench: Bench, tokens: tuple[torch.Tensor, ...], what: str, may_be_nan: bool = False) -> None:
    try:
        output = bench.layer(*tokens)
        if may_be_nan and output[-1].isnan().all() and not output[:-1].isnan().any():
            return
    except MoeCoreError:
        return
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        require(False, f"{what} must raise an InputError that says so, it raised {told}")
    instead = ", and the output of its token alone is not NaN" if may_be_nan else ""
    require(False, f"{what} is taken without an error{instead}")
