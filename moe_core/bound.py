"""A plan bound to its weights: what runs in every forward, and nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import attrs
import torch

from moe_core.agreement import Compared, check_agreement, check_token_scale, telling_other_ranks
from moe_core.errors import InputError, MoeCoreError, PluginError, in_words, is_interrupt
from moe_core.kernels.checks import check_tokens
from moe_core.kernels.slots import slot_map
from moe_core.manager import BackendManager
from moe_core.payloads import (
    TORCH_DTYPES,
    CombineFn,
    DispatchFn,
    ExpertGroup,
    ExpertsFn,
    FusedFn,
    PreparedWeights,
    RawWeights,
    SendFn,
    Tensor,
)
from moe_core.plan import MoEPlan, Route, RouteTable
from moe_core.plugin_frames import name_origin, note

#: What a plugin's function would have given, had it been called.
_NOT_REACHED: Any = object()


def check_reload(plan: MoEPlan, weights: RawWeights, group: ExpertGroup) -> None:
    """Raise unless ranks would round tokens with one scale after a reload too; all of them must reload together.

    Compared is what the scale is made of, so that nothing of the weights has been written yet.

    Raises:
        WeightsError: Scales differ (names each rank's), or another rank refused its weights.
        PlanMismatchError: Some rank did not answer in time.
    """
    if _compares_scales(plan):
        check_token_scale(_first_or_zero(weights.tensors["w13_input_scale"]), group)


def telling_other_ranks_of_reload(
    plan: MoEPlan, group: ExpertGroup, device: torch.device
) -> AbstractContextManager[None]:
    """Around what a rank checks before `check_reload`: the ranks that wait there hear of what is raised.

    Args:
        plan: The layer's plan.
        group: This rank's place in the expert-parallel group.
        device: Of the layer's weights.
    """
    return telling_other_ranks(Compared.TOKEN_SCALE, group, device) if _compares_scales(plan) else nullcontext()


def _compares_scales(plan: MoEPlan) -> bool:
    """Said by the plan alone, so that a rank knows it whose weights are wrong."""
    rounds = any(route.dispatcher is not None and route.token_dtype.is_calibrated for route in plan.routes)
    return rounds and plan.request.local_quant.w13.activation_scaling == "static"


@attrs.define(eq=False, kw_only=True)
class BoundRoute:
    """The functions of one route: `fused` alone, or `dispatch`, `experts`, `combine` and of few dispatchers `send`."""

    route: Route
    fused: FusedFn | None = None
    dispatch: DispatchFn | None = None
    experts: ExpertsFn | None = None
    combine: CombineFn | None = None
    send: SendFn | None = None


class BoundExperts:
    """The experts of one layer, ready to run.

    Holds no parameters of its own: `MoELayer` and the model bridges wrap it and own the weights.

    Attributes:
        plan: What was bound.
        weights: The prepared weights it reads.
        callables: The activation and norm of the model that were bound; a reload may bring others.
        routes: The bound functions, one entry per route of the plan.
        plugins: Where the plugins come from whose functions these are.
    """

    def __init__(
        self, plan: MoEPlan, weights: PreparedWeights, manager: BackendManager, group: ExpertGroup | None = None
    ) -> None:
        """Bind every route; ranks of a process group compare their plans first.

        Raises:
            PluginError: A binder cannot be imported or returns something else, or the weights have a foreign tag.
            PlanMismatchError: The ranks disagree.
        """
        self.plan, self.weights = plan, weights
        self.callables = weights.activation, weights.post_norm
        device = next(iter(weights.tensors.values())).data.device
        group = _with_device(group or ExpertGroup(), device)
        check_agreement(plan, group, device)
        self.routes = tuple(_bind(plan, route, weights, manager, group) for route in plan.routes)
        self._has_one_route = len(self.routes) == 1
        self._table = RouteTable.of(plan)
        self._slots = slot_map(plan.request, device)
        self.plugins = tuple(map(manager.found, plan.plugins))
        request = plan.request
        # As every forward's tensors have to be (`check_tokens`).
        self._expected = request.hidden_size, request.top_k, TORCH_DTYPES[request.dtype], device
        self._device_type = device.type

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        phase: str | None = None,
        overlap: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run the layer's experts.

        Args:
            hidden_states: `[T, H]` in the layer's dtype; left as it is.
            topk_ids: `[T, K]` int32 or int64 global expert ids, -1 = no expert.
            topk_weights: `[T, K]` any float dtype, used as fp32.
            phase: Which workload this is; needed where a multi-rank plan has several.
            overlap: Runs between dispatch and combine, for example a shared expert; while tokens travel, where the
                dispatcher can receive later than it sends.

        Returns:
            `[T, H]` in the layer's dtype; the whole sum if `plan.output_is_complete`, else this rank's part.

        Raises:
            InputError: Wrong shapes, dtypes or devices, ids out of range (on CPU; on a GPU a device-side assertion,
                elsewhere the token's output is NaN), or more tokens than the route's workload declares.
        """
        check_tokens(hidden_states, topk_ids, topk_weights, *self._expected)
        if torch.is_autocast_enabled(self._device_type):
            # The layer has its dtype; autocast would lower it in some of its operations.
            with torch.autocast(self._device_type, enabled=False):
                return self(hidden_states, topk_ids, topk_weights, phase=phase, overlap=overlap)
        if torch.is_grad_enabled() and (hidden_states.requires_grad or topk_weights.requires_grad):
            return _InferenceOnly.apply(self, hidden_states, topk_ids, topk_weights, phase, overlap)  # type: ignore[no-any-return, no-untyped-call]
        return self._run(hidden_states, topk_ids, topk_weights, phase, overlap)

    def _run(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        phase: str | None,
        overlap: Callable[[], None] | None,
    ) -> Tensor:
        index = 0 if self._has_one_route and phase is None else self._table.index(hidden_states.shape[0], phase)
        bound = self.routes[index]
        limit = bound.route.max_tokens
        if limit is not None and hidden_states.shape[0] > limit:
            raise InputError(
                f"{hidden_states.shape[0]} tokens on this rank, the route for phase {bound.route.phase!r} takes at "
                f"most {limit} (max_tokens); declare a larger workload or send the tokens in chunks"
            )
        if self._slots is not None:
            topk_ids = self._slots(topk_ids)
        dispatched = rows = _NOT_REACHED
        # Until something is raised, a `try` costs nothing.
        try:
            if bound.fused is not None:
                output = bound.fused(hidden_states, topk_ids, topk_weights)
                if overlap is not None:
                    overlap()
                return output
            if overlap is None or bound.send is None:
                dispatched, handle = bound.dispatch(hidden_states, topk_ids, topk_weights)  # type: ignore[misc]
                if overlap is not None:
                    overlap()
            else:
                receive, handle = bound.send(hidden_states, topk_ids, topk_weights)
                overlap()
                dispatched = receive()
            rows = bound.experts(dispatched)  # type: ignore[misc]
            return bound.combine(rows, handle)  # type: ignore[misc]
        except BaseException as error:
            ran = bound.route.candidate.full_name
            if rows is not _NOT_REACHED:
                ran += _other_rows(rows, dispatched, hidden_states.shape[1])
            name_origin(error, self.plugins, ran)
            raise


def _other_rows(rows: object, dispatched: object, hidden_size: int) -> str:
    """`, whose experts gave [3, 8] for rows [4, 8]`, "" where combine failed on rows of the right shape."""
    if not isinstance(rows, torch.Tensor):
        return f", whose experts gave {type(rows).__name__} in place of rows"
    tokens = getattr(dispatched, "hidden_states", None)
    expected = None if tokens is None else [*tokens.shape[:-1], hidden_size]
    found = list(rows.shape)
    return "" if expected in (None, found) else f", whose experts gave {found} for rows {expected}"


class _InferenceOnly(torch.autograd.Function):
    """Runs the forward as it is and refuses the backward, instead of losing gradients silently."""

    @staticmethod
    def forward(ctx: Any, experts: BoundExperts, hidden_states: Tensor, *arguments: Any) -> Tensor:
        return experts._run(hidden_states, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise InputError("moe-core computes inference only: there is no gradient; train with the model's own experts")


def _with_device(group: ExpertGroup, device: torch.device) -> ExpertGroup:
    try:
        return attrs.evolve(group, device=device)
    except (TypeError, attrs.exceptions.NotAnAttrsClassError) as error:
        raise InputError(
            f"group: expected an ExpertGroup (or a subclass that attrs makes), got {type(group).__name__}: {error}"
        ) from error


def _bind(
    plan: MoEPlan, route: Route, weights: PreparedWeights, manager: BackendManager, group: ExpertGroup
) -> BoundRoute:
    experts = manager.bind_experts(plan, route, weights, group)
    if route.dispatcher is None:
        return BoundRoute(route=route, fused=cast(FusedFn, experts))
    plugin = manager.found(route.dispatcher.plugin)
    where = f"plugin {plugin}, dispatcher {route.dispatcher.full_name}, binder {route.dispatcher.spec.binder!r}"
    module, _, name = route.dispatcher.spec.binder.partition(":")
    arguments: tuple[object, ...] = (plan, route, group)
    if route.token_dtype.is_calibrated:
        arguments = (*arguments, _token_scale(route, weights, group))
    try:
        functions = tuple(getattr(importlib.import_module(module), name)(*arguments))
    except MoeCoreError as error:
        note(error, f"raised by {where}")
        raise
    except BaseException as error:
        # As where a hook is called.
        if is_interrupt(error):
            raise
        raise PluginError(f"{where}: {in_words(error)}; expected (dispatch, combine)") from error
    if len(functions) not in (2, 3) or not all(map(callable, functions)):
        found = ", ".join(type(function).__name__ for function in functions)
        raise PluginError(f"{where}: expected (dispatch, combine), perhaps with send, got ({found})")
    names = ("dispatch", "combine", "send")
    return BoundRoute(route=route, experts=cast(ExpertsFn, experts), **dict(zip(names, functions, strict=False)))


def _token_scale(route: Route, weights: PreparedWeights, group: ExpertGroup) -> Tensor:
    """0-dim fp32: what the dispatcher multiplies tokens with, on every rank the same; a reload shows in it."""
    if weights.token_scale is None:
        raise PluginError(
            f"runner {route.runner.full_name} reads tokens as {route.token_dtype}, which the dispatcher rounds with "
            "the scale that PreparedWeights.token_scale names; these weights name none"
        )
    scale = _first_or_zero(weights[weights.token_scale])
    check_token_scale(scale, group)
    return scale


def _first_or_zero(scales: Tensor) -> Tensor:
    """0-dim; a rank without experts has no scale, and takes part in telling the others."""
    return scales.view(-1)[0] if scales.numel() else scales.new_zeros(())
