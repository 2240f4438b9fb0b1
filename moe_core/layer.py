"""`MoELayer`: resolve, load, prepare, run, reload and explain one layer that owns its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch

from moe_core.agreement import Compared, telling_other_ranks
from moe_core.bound import BoundExperts, check_reload, telling_other_ranks_of_reload
from moe_core.decision import Decision
from moe_core.environment import Environment
from moe_core.errors import InputError, WeightsError, counted
from moe_core.manager import BackendManager, default_manager
from moe_core.measurements import MeasurementTable
from moe_core.payloads import ExpertGroup, PreparedTensor, PreparedWeights, RawWeights, Tensor
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan
from moe_core.request import LayerRequest
from moe_core.weights.expected import check_weights


class MoELayer(torch.nn.Module):
    """The routed experts of one layer.

    Example:
        >>> import torch
        >>> from moe_core import LayerRequest, MoELayer, RawWeights
        >>> request = LayerRequest(num_experts=4, top_k=2, hidden_size=32, intermediate_size=16)
        >>> layer = MoELayer(request, device="cpu")
        >>> w13 = torch.randn(4, 32, 32, dtype=torch.bfloat16)
        >>> w2 = torch.randn(4, 32, 16, dtype=torch.bfloat16)
        >>> layer.load_weights(RawWeights(tensors={"w13": w13, "w2": w2}))
        >>> hidden_states = torch.randn(3, 32, dtype=torch.bfloat16)
        >>> topk_ids = torch.tensor([[0, 1], [2, 3], [1, -1]])
        >>> layer(hidden_states, topk_ids, torch.full((3, 2), 0.5)).shape
        torch.Size([3, 32])

    Attributes:
        request: What was asked.
        plan: The finished choice.
        decision: Why; `explain()` gives it as text.
    """

    request: LayerRequest
    plan: MoEPlan
    decision: Decision

    def __init__(
        self,
        request: LayerRequest,
        *,
        environment: Environment | None = None,
        device: str | None = None,
        manager: BackendManager | None = None,
        group: ExpertGroup | None = None,
        measurements: MeasurementTable | None = None,
    ) -> None:
        """Resolve the request; nothing is allocated yet.

        Args:
            request: The layer.
            environment: The machine; default: this one, probed.
            device: Device type to probe for (`cpu` on a GPU machine); default: the accelerator if there is one.
            manager: The plugins; default: the installed ones.
            group: This process's place among the expert-parallel ranks; needed if `ep_size > 1`.
            measurements: Measured times that rank the candidates; default: the user's and the shipped ones.

        Raises:
            ResolutionError: Nothing fits, or a pin does not.
            InputError: The group does not fit `ep_size`.
        """
        super().__init__()
        self._manager = manager or default_manager()
        self._group = group or ExpertGroup()
        if self._group.size != request.ep_size:
            raise InputError(
                f"request.ep_size is {request.ep_size}, the group has {counted(self._group.size, 'rank')}; "
                "pass group=ExpertGroup(rank=..., size=..., process_group=...)"
            )
        if environment is None:
            environment = self._manager.probe(device)
        self.request = request
        self._device_type = environment.device_type
        self.plan, self.decision = make_plan(self._manager, request, environment, measurements)
        # What a reload refills, and what a forward runs: nothing after a reload that failed.
        self._loaded: BoundExperts | None = None
        self._bound: BoundExperts | None = None

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts, in the order of its weight rows."""
        return self.request.local_experts(self._group.rank)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_weights(self, weights: RawWeights) -> None:
        """Load, check, prepare and bind this rank's weights; called again, refill the same storage.

        A reload that fails after its plugin was called may have overwritten some experts: the layer then refuses
        forwards until a later call has succeeded. One that is refused before leaves it serving the earlier weights.

        Args:
            weights: Canonical tensors of `local_experts`. They are copied unless `weights.handed_over`.

        Raises:
            WeightsError: Tensors are missing, unknown or misshapen, or ranks would round tokens with different scales,
                or another rank refused its weights; nothing has changed then.
            PlanMismatchError: The ranks disagree, or some of them do not load.
            PluginError: The plugin fails or answers wrongly; errors of the project that it raises itself come as they
                are. After a reload a note says that weights may be partly overwritten.
        """
        if self._loaded is not None:
            self._reload(weights, self._loaded)
            return
        with telling_other_ranks(Compared.PLAN, self._group, _device_of(weights, self._device_type)):
            self._check(weights)
            prepared = self._manager.process_weights(self.plan, weights, None)
            self._manager.check_parameter_names(self.plan, prepared, self)
            _take_ownership(prepared, weights, len(self.local_experts))
        bound = BoundExperts(self.plan, prepared, self._manager, self._group)
        for name, tensor in prepared.tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor.data, requires_grad=False))
        self._loaded = self._bound = bound

    def _check(self, weights: object) -> None:
        if not isinstance(weights, RawWeights):
            found = type(weights).__name__
            raise WeightsError(f"weights: expected RawWeights(tensors={{'w13': ...}}), got {found}; nothing was loaded")
        check_weights(weights, self.request, len(self.local_experts))

    def _reload(self, weights: RawWeights, bound: BoundExperts) -> None:
        prepared = bound.weights
        device = next(iter(prepared.tensors.values())).data.device
        with telling_other_ranks_of_reload(self.plan, self._group, device):
            # A plugin that was unregistered meanwhile has written nothing.
            self._manager.require(self.plan.runner_plugin)
            self._check(weights)
            foreign = {name: str(t.device) for name, t in weights.tensors.items() if t.device != device}
            if foreign:
                raise WeightsError(f"the layer lies on {device}, these weights do not: {foreign}; nothing was loaded")
        check_reload(self.plan, weights, self._group)
        self._bound = None
        self._manager.process_weights(self.plan, weights, prepared)
        if (prepared.activation, prepared.post_norm) != bound.callables:
            # Bound functions hold the callables themselves.
            bound = BoundExperts(self.plan, prepared, self._manager, self._group)
        self._loaded = self._bound = bound

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        phase: str | None = None,
        overlap: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run the experts; arguments, result and errors as `BoundExperts.__call__`.

        Raises:
            WeightsError: Nothing was loaded yet, or the last reload failed midway or still runs in another thread.
        """
        bound = self._bound
        if bound is None:
            raise WeightsError(
                "this layer has no weights yet; call load_weights first"
                if self._loaded is None
                else "the last reload of this layer failed or is not over, and its weights may be partly overwritten; "
                "wait for it, or call load_weights again with all of them"
            )
        return bound(hidden_states, topk_ids, topk_weights, phase=phase, overlap=overlap)

    def explain(self, *, full: bool = False) -> str:
        """The plan, and what was considered for it as text; `full` as in `Decision.explain`."""
        return f"{self.plan}\n{self.decision.explain(full=full)}"

    def extra_repr(self) -> str:
        """The routes, for `print(model)`."""
        return "; ".join(map(str, self.plan.routes))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse to move or cast prepared weights: their layout belongs to one device and dtype."""
        for name, parameter in self.named_parameters(recurse=False):
            probe = fn(parameter.new_empty(0))
            if (probe.device, probe.dtype) != (parameter.device, parameter.dtype):
                raise InputError(
                    f"MoELayer weights ({name}, {parameter.dtype} on {parameter.device}) are prepared for their device "
                    f"and cannot become {probe.dtype} on {probe.device}; build and load a new layer for that"
                )
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        """Copy always: the bound functions read these very tensors, so that assigned ones would go unnoticed."""
        copying = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, copying, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """Bound functions are not picklable; pickle the plan and load the weights again."""
        raise TypeError(
            "MoELayer cannot be pickled: its functions are bound to this process; pickle layer.plan instead"
        )


def _device_of(weights: object, device_type: str) -> torch.device:
    """Where a rank's weights lie, whatever else is wrong with them; without any, a device of the layer's type.

    A machine that is emulated has its weights elsewhere, and a type that this torch need not know.
    """
    tensors: Iterable[object] = weights.tensors.values() if isinstance(weights, RawWeights) else ()
    devices = [tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)]
    of_type = [device for device in devices if device.type == device_type]
    if devices:
        return (*of_type, *devices)[0]
    try:
        return torch.device(device_type)
    except RuntimeError:
        return torch.device("cpu")


def _take_ownership(prepared: PreparedWeights, weights: RawWeights, num_experts: int) -> None:
    """Copy what still belongs to the caller, so that a reload never writes into the caller's tensors."""
    borrowed = [tensor for tensor in prepared.tensors.values() if not tensor.owned]
    # A preparation that copied everything has given the experts back itself.
    if borrowed and not weights.handed_over:
        if weights.release is not None:
            _copy_by_expert(borrowed, num_experts, weights.release)
        else:
            for tensor in borrowed:
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    for tensor in borrowed:
        tensor.data, tensor.owned = tensor.data.detach(), True


def _copy_by_expert(borrowed: list[PreparedTensor], num_experts: int, release: Callable[[int], None]) -> None:
    """Copy and give back one expert after the other: two copies of the whole layer never exist."""
    raw = [tensor.data for tensor in borrowed]
    for tensor in borrowed:
        tensor.data = torch.empty_like(tensor.data, memory_format=torch.contiguous_format)
    for expert in range(num_experts):
        for tensor, source in zip(borrowed, raw, strict=True):
            # A tensor shared by all experts is copied with the first.
            if tensor.expert_axis is not None:
                tensor.data.select(tensor.expert_axis, expert).copy_(source.select(tensor.expert_axis, expert))
            elif expert == 0:
                tensor.data.copy_(source)
        release(expert)
