"""The finished choice for one layer: picklable, equal on every rank, and all that execution needs to know."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs

from moe_core.declared import Candidate, DeclaredDispatcher, DeclaredRunner
from moe_core.errors import InputError, counted
from moe_core.request import LayerRequest
from moe_core.specs import TokenDtype
from moe_core.vocabulary import ANY, PHASES, as_tuple, tuple_of


@attrs.frozen(kw_only=True)
class Route:
    """One way through the layer, valid for one phase or up to a token count.

    Attributes:
        phase: The workload's phase.
        max_tokens: Most tokens per rank, None for any number.
        dispatcher: None for a fused route.
        runner: The runner.
        token_dtype: The dtype in which tokens reach the runner.
        dtype_rule: The rule that chose it.
        dtype_requested: What was asked for if a documented adjustment replaced it.
        row_alignment: Rows per expert are padded to a multiple of this.
        selected_by: `rank`, or the plugin whose hook chose the candidate.
        graph_capture: Whether this route will be captured.
        down_gemm_overlap: Whether combine begins while the second projection runs.
    """

    phase: str
    max_tokens: int | None
    dispatcher: DeclaredDispatcher | None
    runner: DeclaredRunner
    token_dtype: TokenDtype
    dtype_rule: str
    dtype_requested: str | None = None
    row_alignment: int = 1
    selected_by: str = "rank"
    graph_capture: bool = False
    down_gemm_overlap: bool = False

    @property
    def candidate(self) -> Candidate:
        """The pair that this route uses."""
        return Candidate(self.dispatcher, self.runner)

    def __str__(self) -> str:
        """`any: torch:none.standard + torch:torch.standard, bf16 by runner`."""
        limit = f", up to {counted(self.max_tokens, 'token')}" if self.max_tokens else ""
        return f"{self.phase}: {self.candidate.full_name}, {self.token_dtype} by {self.dtype_rule}{limit}"


@attrs.frozen(kw_only=True)
class MoEPlan:
    """The routes of one layer over one weight layout.

    Attributes:
        request: What was asked.
        routes: One per workload, or one per range of its token counts; ordered by `max_tokens`.
        weight_layout: Tag of the prepared weights.
        output_is_complete: Whether the layer's output is the whole sum; otherwise the caller reduces it over
            the ranks that hold the parts (tensor parallel, or expert parallel over replicated tokens).
        notes: What the user should know: adjustments, fallbacks.
    """

    request: LayerRequest
    routes: tuple[Route, ...] = attrs.field(converter=as_tuple, validator=tuple_of(Route))
    weight_layout: str
    output_is_complete: bool
    notes: tuple[str, ...] = ()

    @property
    def runner_plugin(self) -> str:
        """Name of the plugin that prepares the weights."""
        return self.routes[0].runner.plugin

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of the plugins whose functions run in a forward."""
        parts = (part for route in self.routes for part in (route.dispatcher, route.runner) if part is not None)
        return tuple(sorted({part.plugin for part in parts}))

    @property
    def is_multi_rank(self) -> bool:
        """See `LayerRequest.is_multi_rank`."""
        return self.request.is_multi_rank

    def route_index(self, num_tokens: int, phase: str | None = None) -> int:
        """The route of a forward; see `RouteTable.index`."""
        return RouteTable.of(self).index(num_tokens, phase)

    def canonical(self) -> dict[str, str]:
        """Flat field -> value form that is equal on every rank with the same plan (no rank, no local count)."""
        flat: dict[str, str] = {}
        _flatten("", attrs.asdict(attrs.evolve(self, notes=())), flat)
        return flat

    def __str__(self) -> str:
        """One line per route and the weight layout."""
        return "\n".join([*map(str, self.routes), f"weights: {self.weight_layout}"])


@attrs.frozen
class RouteTable:
    """Which route takes a forward, prepared for a look-up per forward.

    Attributes:
        phases: What a caller may name; empty where the layer does not tell phases apart.
        steps: Phase -> its routes as (most tokens, index in the plan), ascending. None stands for no phase.
        needs_phase: Whether only the phase may choose: a multi-rank plan with routes of several phases.
    """

    phases: tuple[str, ...]
    steps: dict[str | None, tuple[tuple[float, int], ...]]
    needs_phase: bool

    @classmethod
    def of(cls, plan: MoEPlan) -> RouteTable:
        """The table of a plan's routes."""
        found: dict[str, list[tuple[float, int]]] = {}
        for index, route in enumerate(plan.routes):
            limit = math.inf if route.max_tokens is None else route.max_tokens
            found.setdefault(route.phase, []).append((limit, index))
        steps: dict[str | None, tuple[tuple[float, int], ...]] = {
            phase: tuple(sorted(of_phase)) for phase, of_phase in found.items()
        }
        phases = tuple(phase for phase in found if phase != ANY)
        needs_phase = plan.is_multi_rank and len(phases) > 1
        steps[None] = _across_phases(list(found.values()))
        return cls(phases, steps, needs_phase)

    def index(self, num_tokens: int, phase: str | None = None) -> int:
        """The route of a forward: of `phase` if given, and among those by the number of tokens.

        Without a phase the smallest workload that takes the tokens serves. Where one phase or one route is left and
        takes fewer tokens, it is the answer all the same: whoever runs it knows its limit.

        Raises:
            InputError: The phase has no route, a multi-rank plan of several phases was not told which, or there are
                more tokens than any route takes.
        """
        # A layer without phases accepts any phase that exists; a misspelt one is an error there too.
        phases = self.phases or PHASES
        if phase is not None and phase not in phases:
            raise InputError(f"no route for phase {phase!r}; this layer has {', '.join(phases)}")
        if phase is None and self.needs_phase:
            names = ", ".join(phases)
            raise InputError(f"this layer has routes for {names}: say which with phase=; token counts differ by rank")
        steps = self.steps[phase if self.phases else None]
        for limit, index in steps:
            if num_tokens <= limit:
                return index
        if phase is None and len(steps) > 1:
            raise InputError(f"{num_tokens} tokens exceed the largest workload of this layer, {steps[-1][0]}")
        return steps[-1][1]


def _across_phases(phases: list[list[tuple[float, int]]]) -> tuple[tuple[float, int], ...]:
    """The steps where no phase is said: smaller phases first, so that each takes over where those end."""
    return tuple(step for of_phase in sorted(phases, key=max) for step in sorted(of_phase))


def _flatten(prefix: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, element in value.items():
            _flatten(f"{prefix}.{key}" if prefix else key, element, into)
    elif isinstance(value, (tuple, list)) and value and isinstance(value[0], (dict, tuple, list)):
        for index, element in enumerate(value):
            _flatten(f"{prefix}[{index}]", element, into)
    else:
        into[prefix] = json.dumps(value)
