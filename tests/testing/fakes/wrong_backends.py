"""One deliberately wrong backend per check: each replaces one part of the toy."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import attrs
import torch
import toy_backend as toy
from captured_backends import Planned, graph_safe, on_the_host, uploading, with_mask
from toy_backend import Parts, Tensor, Weights
from wrong_numbers import (
    coarse_row,
    exact_row,
    first_scale_row,
    gelu_row,
    inverted_scales_row,
    plain_row,
    sixteenths_row,
    swapped_row,
    transposed_row,
    unbiased_row,
    weighted_twice,
    wide_output,
    wide_rows,
)
from wrong_results import (
    announcing,
    by_one_hot_rows,
    combine_flat_rows,
    in_inference_mode,
    transposed,
    up_to_512,
    with_grad_mode,
    with_gradient,
    with_workspace,
    without_answer,
)
from wrong_routing import (
    Routed,
    as_if_contiguous,
    as_if_rows,
    dense,
    dividing_row,
    first_block_row,
    in_a_byte,
    last_for_none,
    masked_in_place,
    needs_a_token,
    nothing_to_do,
    once_per_row,
    one_tile,
    one_token_alone,
    squeezed,
    through_fp16,
    up_to_missing,
    where_positive,
    with_capacity,
)
from wrong_weights import (
    claiming,
    consuming,
    echoing,
    flat,
    forgetful,
    hasty,
    hoarding,
    keeping,
    loyal,
    misnaming,
    moving,
    unlisted,
)

from moe_core.activation import ActivationSpec
from moe_core.quant import W8A8_INT8


@attrs.frozen(eq=False)
class Fake:
    """A wrong backend: the check that is made for it, and what that check must say."""

    check: str
    says: str
    parts: Callable[[], Parts]

    def module(self, name: str) -> types.ModuleType:
        return toy.make_plugin(name, self.parts())


# --- dispatch ------------------------------------------------------------------------------------------------------


def trusting_dispatch(plan: Any, group: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Any:
    return toy.group_rows(hidden, ids, weights, plan.request.local_slots(group.rank), toy.ALIGNMENT)


def dense_groups(plan: Any, group: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Any:
    toy.check_ids(ids, plan.request.num_slots)
    return toy.group_rows(hidden, ids, weights, plan.request.local_slots(group.rank), 1)


def first_experts(plan: Any, group: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Any:
    """Takes global ids for local ones."""
    toy.check_ids(ids, plan.request.num_slots)
    count = len(plan.request.local_slots(group.rank))
    return toy.group_rows(hidden, ids, weights, range(count), toy.ALIGNMENT)


def experts_for_slots(plan: Any, group: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Any:
    """Knows as many places as experts, and nothing of their copies."""
    toy.check_ids(ids, plan.request.num_slots)
    known = torch.where(ids < plan.request.num_experts, ids, -1)
    return toy.group_rows(hidden, known, weights, plan.request.local_slots(group.rank), toy.ALIGNMENT)


def floored_share(parts: Parts, weights: Weights, plan: Any) -> Any:
    """Takes half of I for a rank's share, rounded down."""
    share = plan.request.intermediate_size // plan.request.tp_size

    def gate_and_up(h: Tensor) -> Tensor:
        hidden = torch.nn.functional.silu(h[:, :share]) * h[:, share : 2 * share]
        return torch.nn.functional.pad(hidden, (0, h.shape[1] // 2 - share))

    is_plain = weights.spec == ActivationSpec() and plan.request.tp_size > 1
    return toy.experts_of(parts, attrs.evolve(weights, activation=gate_and_up) if is_plain else weights, plan)


def unweighted_combine(rows: Tensor, handle: Any) -> Tensor:
    places, weights, shape = handle
    return toy.combine(rows, (places, torch.ones_like(weights), shape))


class Moody:
    """Rounds differently in every second call."""

    def __init__(self) -> None:
        self.calls = 0

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        self.calls += 1
        return toy.combine(rows, handle) * (1.0 + self.calls % 2 / 128)


# --- memory and state ----------------------------------------------------------------------------------------------


def leaking(tokens: Any, row: Any) -> Tensor:
    """Reads every row of the padded input, if only to find the largest value."""
    return toy.contiguous(tokens, row) + tokens.hidden_states.abs().max() * 0.0


def trusting_memory(tokens: Any, row: Any) -> Tensor:
    """Takes fresh memory to be zero."""
    fresh = torch.empty(1, dtype=torch.int64)
    is_poison = fresh == torch.iinfo(torch.int64).max // 2
    return torch.where(is_poison, torch.nan, toy.standard(tokens, row))


def in_place(tokens: Any, row: Any) -> Tensor:
    out = toy.standard(tokens, row)
    tokens.hidden_states.zero_()
    return out


class OneBuffer:
    """Writes every output to the same memory."""

    def __init__(self) -> None:
        self.memory = torch.empty(1 << 16, dtype=torch.bfloat16)

    def standard(self, tokens: Any, row: Any) -> Tensor:
        out = toy.standard(tokens, row)
        return self.memory[: out.numel()].view(out.shape).copy_(out)


def seeding(parts: Parts, weights: Weights, plan: Any) -> Any:
    torch.manual_seed(0)
    return toy.experts_of(parts, weights, plan)


def batch_dependent(tokens: Any, row: Any) -> Tensor:
    return toy.standard(tokens, row) * (1.0 + len(tokens.topk_ids) % 4 / 256)


# --- declarations --------------------------------------------------------------------------------------------------


def changing_declaration() -> dict[str, Any]:
    names = itertools.count()

    def declare_backends() -> Any:
        return attrs.evolve(toy.specs("changing_declaration", Parts()), description=f"answer {next(names)}")

    return {"declare_backends": declare_backends}


def misannotated(plan: MoEPlan, route: Route, weights: RawWeights) -> Any:  # type: ignore[name-defined]  # noqa: F821
    raise NotImplementedError


def single_minded(candidates: Any) -> Any:
    return "my favourite"


def _format(format_: str, **changes: Any) -> Callable[[], Parts]:
    return lambda: Parts(format=format_, **changes)


FAKES = {
    "changing_declaration": Fake(
        "specs", "another declaration every time", lambda: Parts(hooks=changing_declaration())
    ),
    "misannotated_hook": Fake(
        "signatures", "annotated 'RawWeights'", lambda: Parts(hooks={"fused_experts": misannotated})
    ),
    "echoes_the_layout": Fake(
        "foreign_plans",
        "labelled 'other_layout' because a plan says so",
        lambda: Parts(hooks={"process_weights_after_loading": echoing}),
    ),
    "single_minded_selection": Fake(
        "foreign_plans", "none of the candidates", lambda: Parts(hooks={"select_dispatcher": single_minded})
    ),
    "coarse_rows": Fake("answer", "is due to rounding", _format("standard", expert_row=coarse_row)),
    "swapped_halves": Fake(
        "gate_up_order", "gate and up rows of w13 are swapped", _format("standard", expert_row=swapped_row)
    ),
    "plain_swiglu": Fake(
        "activation_parameters", "alpha, limit and beta are ignored", _format("masked", expert_row=plain_row)
    ),
    "gelu_for_silu": Fake("answer", "gelu instead of silu", _format("standard", expert_row=gelu_row)),
    "inverted_scales": Fake(
        "answer", "scales divide", _format("standard", scheme=W8A8_INT8, expert_row=inverted_scales_row)
    ),
    "transposed_w2": Fake("answer", "w2 is read as transposed", _format("standard", expert_row=transposed_row)),
    "weights_twice": Fake("router_weights", "applied twice", _format("standard", standard=weighted_twice)),
    "drops_weights_below_zero": Fake("router_weights", "below zero", _format("standard", standard=where_positive)),
    "rows_in_fp16": Fake("value_range", "512 times as large", _format("standard", standard=through_fp16)),
    "divides_by_zero": Fake("value_range", "token of zeros", _format("standard", expert_row=dividing_row)),
    "mixes_tokens": Fake("value_range", "beside a token of NaN", _format("standard", standard=by_one_hot_rows)),
    "no_biases": Fake("features", "biases are ignored", _format("masked", expert_row=unbiased_row)),
    "exact_activations": Fake(
        "activation_rounding", "not rounded to int8", _format("standard", scheme=W8A8_INT8, expert_row=exact_row)
    ),
    "first_activation_scale": Fake(
        "activation_scales",
        "first expert's activation scale is used for all",
        _format("standard", scheme=toy.STATIC_INT8, expert_row=first_scale_row),
    ),
    "fp32_output": Fake("output_form", "the output is torch.float32", _format("standard", standard=wide_output)),
    "fp32_rows": Fake(
        "output_form", "rows in torch.float32 to combine, expected bf16", _format("contiguous", contiguous=wide_rows)
    ),
    "transposed_output": Fake(
        "output_form", "the output [7, 64] has strides [1, 7]", _format("standard", standard=transposed)
    ),
    "trained_output": Fake("output_form", "the output requires grad", _format("standard", standard=with_gradient)),
    "locked_output": Fake("output_form", "made in inference mode", _format("standard", standard=in_inference_mode)),
    "gives_nothing": Fake("answer", "a forward gives NoneType", _format("standard", standard=without_answer)),
    "minus_one_is_last": Fake(
        "missing_experts", "-1 is read as the last expert", _format("standard", standard=last_for_none)
    ),
    "ends_at_minus_one": Fake("missing_experts", "-1 before others", _format("standard", standard=up_to_missing)),
    "one_token_ignores_minus_one": Fake(
        "missing_experts", "one token with id -1 in slot 1", _format("standard", standard=one_token_alone)
    ),
    "returns_its_input": Fake("missing_experts", "none with an expert", _format("standard", standard=nothing_to_do)),
    "dense_experts": Fake("idle_experts", "NaN or infinity", _format("standard", standard=dense)),
    "capacity": Fake("one_expert", "relative error", _format("standard", standard=with_capacity)),
    "needs_a_token": Fake("no_tokens", "max()", _format("standard", standard=needs_a_token)),
    "ids_as_a_set": Fake("repeated_ids", "counts once", _format("standard", standard=once_per_row)),
    "one_tile": Fake("row_counts", "9 rows for one expert", _format("contiguous", contiguous=one_tile)),
    "sorts_once_per_size": Fake("batch_sizes", "batch number 3", lambda: Parts(standard=Routed().standard)),
    "forgets_what_follows": Fake("batch_sizes", "batch number 7", _format("standard", standard=up_to_512)),
    "keeps_its_first_workspace": Fake("batch_sizes", "outside InferenceMode", _format("standard", bind=with_workspace)),
    "assumes_contiguous_rows": Fake("id_layouts", "lie transposed", _format("standard", standard=as_if_rows)),
    "assumes_contiguous_ids": Fake(
        "id_layouts", "a slice of a wider tensor", _format("standard", standard=as_if_contiguous)
    ),
    "trusts_ids": Fake("bad_ids", "is taken without an error", _format("contiguous", dispatch=trusting_dispatch)),
    "claims_raw_memory": Fake("prepared_form", "yet owned=True", _format("standard", prepare=claiming)),
    "names_a_tensor_plan": Fake(
        "prepared_form", "attributes of MoELayer, which has plan itself", _format("standard", prepare=misnaming)
    ),
    "consumes_raw_weights": Fake(
        "raw_weights", "raw tensors w13 were written to", _format("standard", prepare=consuming)
    ),
    "forgets_w2": Fake("reload", "w2 are not what a fresh load gives", _format("standard", prepare=forgetful)),
    "moves_w2": Fake("reload", "w2 has other memory", _format("standard", prepare=moving)),
    "hides_an_expert_axis": Fake("rebalancing", "changed places", _format("standard", prepare=unlisted)),
    "releases_early": Fake("released_memory", "released had been overwritten", _format("standard", prepare=hasty)),
    "never_releases": Fake("released_memory", "keeps the raw memory of experts", _format("standard", prepare=hoarding)),
    "keeps_raw_tensors": Fake(
        "released_memory", "still holds the raw tensors w13, w2", _format("standard", prepare=keeping)
    ),
    "assumes_contiguous_weights": Fake("weight_strides", "not contiguous", _format("standard", prepare=flat)),
    "keeps_the_first_activation": Fake("callables", "set out.activation", _format("standard", prepare=loyal)),
    "floors_its_share": Fake("tensor_parallel", "rank 0 of 2 with 48 of 95", _format("standard", bind=floored_share)),
    "counts_experts_not_slots": Fake(
        "expert_copies", "5 experts in 7 slots", _format("contiguous", dispatch=experts_for_slots)
    ),
    "reads_padding": Fake("padding", "NaN in every undefined row", _format("contiguous", contiguous=leaking)),
    "trusts_fresh_memory": Fake(
        "uninitialised_memory", "uninitialised memory", _format("standard", standard=trusting_memory)
    ),
    "writes_to_its_input": Fake("inputs", "wrote to its inputs hidden_states", _format("standard", standard=in_place)),
    "masks_in_place": Fake("inputs", "its inputs topk_weights", _format("standard", standard=masked_in_place)),
    "reuses_its_output": Fake("inputs", "a buffer that is used again", lambda: Parts(standard=OneBuffer().standard)),
    "seeds_torch": Fake("process_state", "get_rng_state", _format("standard", bind=seeding)),
    "turns_gradients_on": Fake("process_state", "is_grad_enabled()", _format("standard", standard=with_grad_mode)),
    "prints_in_a_forward": Fake(
        "process_state", "stdout, by 'one more forward", _format("standard", standard=announcing)
    ),
    "whole_blocks_only": Fake("odd_sizes", "H 17", _format("standard", expert_row=sixteenths_row)),
    "one_block_only": Fake("odd_sizes", "H 521", _format("standard", expert_row=first_block_row)),
    "squeezes_one_slot": Fake("odd_sizes", "K 1,", _format("standard", standard=squeezed)),
    "ids_in_a_byte": Fake("odd_sizes", "E 257", _format("standard", standard=in_a_byte)),
    "batch_dependent": Fake("batch_invariance", "other bits", _format("standard", standard=batch_dependent)),
    "moody_combine": Fake("repeatability", "give different bits", lambda: Parts("contiguous", combine=Moody().combine)),
    "unaligned_groups": Fake("dispatched_form", "the plan aligns to 4", _format("contiguous", dispatch=dense_groups)),
    "unweighted_combine": Fake(
        "round_trip", "router weights are not applied", _format("contiguous", combine=unweighted_combine)
    ),
    "combines_flat_rows": Fake(
        "round_trip", "do not bring tokens back", _format("contiguous", combine=combine_flat_rows)
    ),
    "reads_ids_on_the_host": Fake(
        "graph_capture", "Tensor.tolist reads data on the host, standard (", lambda: graph_safe(on_the_host)
    ),
    "shapes_from_data": Fake("graph_capture", "shape that depends on data", lambda: graph_safe(with_mask)),
    "routes_of_the_warm_up": Fake(
        "graph_capture", "a captured forward, replayed", lambda: graph_safe(Planned().standard)
    ),
    "uploads_a_table": Fake("graph_capture", "a tensor of Python values", lambda: graph_safe(uploading)),
    "global_ids": Fake("replicated_ranks", "the sum over 3 ranks", _format("contiguous", dispatch=first_experts)),
}
