"""One cell made ready to run: a plan, random weights, a bound layer, tokens, and the answer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import torch

from moe_core.bound import BoundExperts, BoundRoute
from moe_core.errors import ResolutionError
from moe_core.layer import MoELayer
from moe_core.measurements import MeasurementTable
from moe_core.misses import relevant
from moe_core.payloads import (
    TORCH_DTYPES,
    CombineFn,
    DispatchFn,
    ExpertGroup,
    ExpertsFn,
    PreparedWeights,
    RawWeights,
    Tensor,
)
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan
from moe_core.quant import QuantScheme
from moe_core.request import LayerRequest, Workload
from moe_core.specs import TokenDtype
from moe_core.testing.backend import Backend
from moe_core.testing.cells import Cell
from moe_core.testing.compare import Tokens, require_answer
from moe_core.testing.outcome import NotRun, require
from moe_core.testing.sizes import Sizes
from moe_core.testing.stored import DrawnLayer, draw_layer
from moe_core.testing.tolerance import tolerance

#: Tokens of most forwards: more than one row per expert, and an odd number.
NUM_TOKENS = 7


class Bench:
    """A cell on one backend. Weights and tokens are made when first asked for.

    Attributes:
        backend: The plugin under test.
        cell: What is run.
        sizes: Sizes of the layer.
        request: The request that only this cell serves.
        plan: Its plan.
        group: This process's place among the ranks.
        tolerance: See `tolerance.tolerance`.
    """

    def __init__(
        self,
        backend: Backend,
        cell: Cell,
        sizes: Sizes | None = None,
        group: ExpertGroup | None = None,
        **changes: object,
    ) -> None:
        """Plan the cell.

        Args:
            backend: The plugin under test.
            cell: What to run.
            sizes: Sizes of the layer; default: the cell's own.
            group: This process's place among the ranks of a group.
            **changes: Fields of the request that differ from the cell's.

        Raises:
            NotRun: The cell cannot run on this machine; the text has every reason.
        """
        self.backend, self.cell = backend, cell
        self.sizes = sizes or cell.base_sizes()
        self.request = cell.request(self.sizes, **changes)
        self.group = group or ExpertGroup(size=cell.ep_size)
        self.plan = _plan(backend, cell, self.request)
        _require_tokens(cell, self.plan.routes[0].token_dtype, self.request.quant.w13)
        self.tolerance = tolerance(self.request, self.plan.routes[0].token_dtype)

    @functools.cached_property
    def stored(self) -> DrawnLayer:
        """The layer's weights, of all ranks' experts."""
        return self.drawn(0)

    @functools.cached_property
    def other(self) -> DrawnLayer:
        """Other weights of the same layer, for reloads."""
        return self.drawn(1)

    def drawn(self, seed: int, one_input_scale: bool = False) -> DrawnLayer:
        """Weights of this layer, with one calibrated scale for all experts where they cannot have several."""
        return draw_layer(_without_pins(self.request), seed, one_input_scale or self.has_one_input_scale)

    @property
    def has_one_input_scale(self) -> bool:
        """Whether tokens are rounded before it is known which expert reads them, or by a runner with one for all."""
        is_rounded = self.plan.routes[0].token_dtype.scales != "none"
        return is_rounded or self.cell.pair.runner.spec.one_input_scale

    @property
    def experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts."""
        return self.request.local_experts(self.group.rank)

    def raw(self, stored: DrawnLayer | None = None) -> RawWeights:
        """Fresh copies of this rank's raw weights."""
        return (stored or self.stored).raw(self.experts, self.backend.device)

    def prepare(self, raw: RawWeights | None = None, out: PreparedWeights | None = None) -> PreparedWeights:
        """What the plugin makes of raw weights; with `out` a reload."""
        return self.backend.manager.process_weights(self.plan, raw or self.raw(), out)

    def unloaded(self) -> MoELayer:
        """A whole layer, whose attributes tensors must not be called like."""
        backend = self.backend
        return MoELayer(
            self.request,
            environment=backend.environment,
            manager=backend.manager,
            group=self.group,
            measurements=MeasurementTable(),
        )

    def bind(self, prepared: PreparedWeights) -> BoundExperts:
        """A layer over prepared weights."""
        return BoundExperts(self.plan, prepared, self.backend.manager, self.group)

    @functools.cached_property
    def layer(self) -> BoundExperts:
        """The layer with `stored` loaded; checks that change its weights bind their own."""
        return self.bind(self.prepare())

    @property
    def route(self) -> BoundRoute:
        """The functions of the layer's only route."""
        return self.layer.routes[0]

    @property
    def steps(self) -> tuple[DispatchFn, ExpertsFn, CombineFn]:
        """Dispatch, experts and combine of that route.

        Raises:
            NotRun: It is fused, so that it has none of them.
        """
        route = self.route
        if route.dispatch is None or route.experts is None or route.combine is None:
            raise NotRun("a fused route has no steps")
        return route.dispatch, route.experts, route.combine

    def tokens(self, num_tokens: int = NUM_TOKENS, seed: int = 0, ids: Tensor | None = None) -> Tokens:
        """Random tokens; router weights are neither one nor sum to one.

        Args:
            num_tokens: T, cut to what the cell takes.
            seed: Of the draw.
            ids: `[T, K]` expert ids; default: drawn, distinct in each row.
        """
        limit = self.sizes.max_tokens
        count = len(ids) if ids is not None else min(num_tokens, limit) if limit else num_tokens
        generator = torch.Generator().manual_seed(seed + 7)
        request = self.request
        hidden = torch.randn(count, request.hidden_size, generator=generator).to(TORCH_DTYPES[request.dtype])
        if ids is None:
            scores = torch.rand(count, request.num_experts, generator=generator)
            ids = scores.topk(request.top_k, dim=1).indices
        weights = torch.rand(count, request.top_k, generator=generator) * 0.5 + 0.25
        device = self.backend.device
        return hidden.to(device), ids.to(device), weights.to(device)

    def run(
        self, tokens: Tokens, layer: BoundExperts | None = None, overlap: Callable[[], None] | None = None
    ) -> Tensor:
        """One forward; raises `ConformanceError` where it gives no tensor.

        Args:
            tokens: What is given.
            layer: Who runs it; default: the layer of `stored`.
            overlap: As of `BoundExperts`: with it, dispatchers that can do so receive later than they send.
        """
        phase = self.cell.phase if self.plan.is_multi_rank else None
        output = (layer or self.layer)(*tokens, phase=phase, overlap=overlap)
        # Whatever the annotations of a plugin's functions say.
        found: object = output
        require(isinstance(found, Tensor), f"a forward gives {type(found).__name__}, expected a tensor")
        return output

    def require(
        self, tokens: Tokens, what: str, output: Tensor | None = None, stored: DrawnLayer | None = None
    ) -> None:
        """Raise `ConformanceError` unless the output (default: of a forward now) is the answer."""
        got = self.run(tokens) if output is None else output
        require_answer(got, stored or self.stored, tokens, self.tolerance, what)


def _without_pins(request: LayerRequest) -> LayerRequest:
    """What weights depend on; layers that differ in their backend share the draw."""
    return attrs.evolve(
        request,
        a2a_backend=None,
        runner_backend=None,
        dispatch_dtype=None,
        ep_size=1,
        deterministic=False,
        workloads=(Workload(),),
    )


def _require_tokens(cell: Cell, chosen: TokenDtype, scheme: QuantScheme) -> None:
    """Raise `NotRun` where the cell's token dtype cannot be asked for, or has no meaning with its scheme."""
    if cell.token_dtype not in (None, chosen):
        raise NotRun(f"the dispatch dtype {chosen.dtype} means {chosen} here; {cell.token_dtype} is never chosen")
    if chosen.is_calibrated and not scheme.has_input_global_scale:
        raise NotRun(f"tokens of {chosen} need the calibrated scale of their scheme, {scheme} has none")


def _plan(backend: Backend, cell: Cell, request: LayerRequest) -> MoEPlan:
    try:
        return make_plan(backend.manager, request, backend.environment, MeasurementTable())[0]
    except ResolutionError as error:
        raise NotRun(_reasons(error, request)) from error


def _reasons(error: ResolutionError, request: LayerRequest) -> str:
    """Every reason against the pair, without the names that the cell already says."""
    if error.decision is None:
        return str(error)
    (workload,) = error.decision.workloads
    found = relevant(request.pins(workload.workload), workload)
    alone = [reason for spec in found.specs for reason in spec.reasons]
    reasons = [*alone, *(reason for pair in found.pairs for reason in pair.reasons)]
    return "; ".join(dict.fromkeys(map(str, reasons))) or error.decision.error
