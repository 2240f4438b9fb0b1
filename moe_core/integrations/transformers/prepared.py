"""One experts module resolved and bound, and the choices that every module of a model shares."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from moe_core.bound import BoundExperts
from moe_core.decision import Decision
from moe_core.environment import Environment
from moe_core.errors import InputError, PluginError, UnsupportedModelError, WeightsError
from moe_core.integrations.transformers.layout import ExpertsLayout, borrow_weights, read_layout
from moe_core.integrations.transformers.selfcheck import check_against_eager
from moe_core.manager import BackendManager
from moe_core.measurements import MeasurementTable
from moe_core.payloads import TORCH_DTYPES, PreparedWeights, Tensor
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan, without_copies
from moe_core.request import LayerRequest
from moe_core.weights.expected import check_weights


@attrs.define(eq=False, kw_only=True)
class PreparedExperts:
    """One experts module, resolved and bound for one top-k and dtype of tokens.

    Attributes:
        plan: The finished choice.
        decision: Why.
        bound: What runs; its weights are views of the module's parameters wherever the backend reads them as they lie.
    """

    plan: MoEPlan
    decision: Decision
    bound: BoundExperts

    def __repr__(self) -> str:
        """The routes; the whole decision would flood a notebook."""
        return f"<PreparedExperts {'; '.join(map(str, self.plan.routes))}>"

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts on transformers' arguments; inference only: a backward raises `InputError`.

        Args:
            hidden_states: `[T, H]` in the layer's dtype: that of the weights, if they are floats. Under autocast any.
            top_k_index: `[T, K]` integer ids of this rank's experts; any id out of range means "not on this rank".
            top_k_weights: `[T, K]`, any float dtype.

        Returns:
            `[T, H]`, dtype of `hidden_states`.

        Raises:
            PluginError: What the plugins' functions gave has another form, on which transformers would fail later.
        """
        dtype = TORCH_DTYPES[self.plan.request.dtype]
        if hidden_states.dtype != dtype and torch.is_autocast_enabled(hidden_states.device.type):
            # Autocast has lowered what comes before the experts; their own operations keep the dtype of their weights.
            return self(hidden_states.to(dtype), top_k_index, top_k_weights).to(hidden_states.dtype)
        num_experts, top_k = self.plan.request.num_experts, self.plan.request.top_k
        # Expert parallelism marks experts of other ranks by one id past the last; backends know -1 alone.
        local = top_k_index.clamp(0, num_experts - 1) == top_k_index
        topk_ids = torch.where(local, top_k_index, -1)
        num_slots = topk_ids.shape[1]
        if num_slots == top_k or top_k > 1:
            return self._run(hidden_states, topk_ids, top_k_weights)
        # A rank with fewer experts than a token has slots: each slot becomes a token.
        rows = hidden_states.repeat_interleave(num_slots, dim=0)
        out = self._run(rows, topk_ids.reshape(-1, 1), top_k_weights.reshape(-1, 1))
        return out.view(-1, num_slots, out.shape[-1]).sum(dim=1, dtype=torch.float32).to(out.dtype)

    def _run(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out: object = self.bound(hidden_states, topk_ids, topk_weights)
        # Attributes alone, below a microsecond; without this the error is transformers' own, somewhere behind.
        if (
            isinstance(out, torch.Tensor)
            and out.shape == hidden_states.shape
            and out.dtype is hidden_states.dtype
            and out.device == hidden_states.device
        ):
            return out
        plugins = self.bound.plugins
        raise PluginError(
            f"{self}: expected {_form(hidden_states)} as the tokens are, got {_form(out)}, of plugin "
            f"{' and '.join(map(str, plugins))}; moe-core verify {' '.join(found.name for found in plugins)} tells "
            "what is wrong there, and another runner_backend runs without it"
        )


@attrs.define(eq=False, kw_only=True)
class Preparer:
    """What the user said about a model's layers, and what followed from it: equal layers are resolved and checked once.

    Attributes:
        manager: The plugins.
        environment: The machine; None: this one, probed, as seen from the device of each module's parameters.
        a2a_backend: Pin of the dispatcher.
        runner_backend: Pin of the runner.
        measurements: Measured times that rank the candidates; None: the user's and the shipped ones.
    """

    manager: BackendManager
    environment: Environment | None = None
    a2a_backend: str | None = None
    runner_backend: str | None = None
    measurements: MeasurementTable | None = None
    _probed: dict[str, Environment] = attrs.field(factory=dict, init=False)
    _planned: dict[tuple[str, LayerRequest, bool], tuple[MoEPlan, Decision]] = attrs.field(factory=dict, init=False)
    _checked: set[tuple[type, ExpertsLayout]] = attrs.field(factory=set, init=False)

    def prepare(
        self, module: torch.nn.Module, top_k: int, dtype: torch.dtype, others: Iterable[PreparedExperts] = ()
    ) -> PreparedExperts:
        """Read, resolve, bind and check one experts module.

        Args:
            module: The module; left as it is.
            top_k: Experts per token.
            dtype: Of the tokens, where the weights do not tell it.
            others: The same module prepared for other calls; their weights are used again where the layout fits.
        """
        layout = read_layout(module, dtype)
        plan, decision = self.plan(layout, top_k, keeps_weights=True)
        weights = _shared_weights(plan, others) or _prepare_weights(module, layout, plan, self.manager)
        prepared = PreparedExperts(plan=plan, decision=decision, bound=BoundExperts(plan, weights, self.manager))
        if (type(module), layout) not in self._checked:
            try:
                check_against_eager(module, prepared, layout, plan.request.top_k)
            except UnsupportedModelError as error:
                error.add_note(f"or {prepared} is wrong, which moe-core verify would tell")
                raise
            self._checked.add((type(module), layout))
        return prepared

    def plan(
        self, layout: ExpertsLayout, top_k: int, *, keeps_weights: bool = False, like: MoEPlan | None = None
    ) -> tuple[MoEPlan, Decision]:
        """The choice for one layout, and why.

        Args:
            layout: The layer.
            top_k: Experts per token.
            keeps_weights: The model has the weights whatever is chosen.
            like: Its runner is pinned, as weights were prepared for it; None for the user's pin.
        """
        request = layout.request(
            # A token cannot have more experts than this rank holds: its slots are then taken one by one.
            top_k if top_k <= layout.num_experts else 1,
            a2a_backend=self.a2a_backend,
            runner_backend=self.runner_backend if like is None else like.routes[0].runner.full_name,
        )
        key = (layout.device_type, request, keeps_weights)
        if key not in self._planned:
            environment = self._environment(layout.device_type)
            table = self.measurements
            if keeps_weights:
                table = without_copies(self.manager, request, environment, table)
            self._planned[key] = make_plan(self.manager, request, environment, table)
        return self._planned[key]

    def _environment(self, device_type: str) -> Environment:
        given = self.environment
        if given is None:
            if device_type not in self._probed:
                self._probed[device_type] = self.manager.probe(device_type)
            return self._probed[device_type]
        if given.device_type != device_type:
            raise InputError(
                f"the environment ({given.source}) is of device type {given.device_type!r}, the experts lie on "
                f"{device_type!r}; call prepare with an environment of that type, or with none"
            )
        return given


def _form(output: object) -> str:
    if not isinstance(output, torch.Tensor):
        return type(output).__name__
    return f"{list(output.shape)} {str(output.dtype).removeprefix('torch.')} on {output.device}"


def _prepare_weights(
    module: torch.nn.Module, layout: ExpertsLayout, plan: MoEPlan, manager: BackendManager
) -> PreparedWeights:
    raw = borrow_weights(module, layout)
    try:
        check_weights(raw, plan.request, layout.num_experts)
    except WeightsError as error:
        name = type(module).__qualname__
        raise UnsupportedModelError(f"{name} does not have the tensors that its flags tell of: {error}") from error
    return manager.process_weights(plan, raw, None)


def _shared_weights(plan: MoEPlan, others: Iterable[PreparedExperts]) -> PreparedWeights | None:
    wanted = (plan.runner_plugin, plan.weight_layout)
    fitting = (other for other in others if (other.plan.runner_plugin, other.plan.weight_layout) == wanted)
    return next((other.bound.weights for other in fitting), None)
