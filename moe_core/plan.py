"""The finished choice for one layer: picklable, equal on every rank, and all that execution needs to know."""

from __future__ import annotations

import bisect
import json
from typing import Any

import attrs

from moe_core.errors import InputError
from moe_core.request import LayerRequest
from moe_core.specs import Candidate, DeclaredDispatcher, DeclaredRunner, TokenDtype
from moe_core.vocabulary import ANY, as_tuple, tuple_of


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

    @property
    def candidate(self) -> Candidate:
        """The pair that this route uses."""
        return Candidate(self.dispatcher, self.runner)

    def __str__(self) -> str:
        """`any: torch:none.standard + torch:torch.standard, bf16 by runner`."""
        limit = f", up to {self.max_tokens} tokens" if self.max_tokens else ""
        return f"{self.phase}: {self.candidate.full_name}, {self.token_dtype} by {self.dtype_rule}{limit}"


@attrs.frozen(kw_only=True)
class MoEPlan:
    """The routes of one layer over one weight layout.

    Attributes:
        request: What was asked.
        routes: One per workload. Several local routes are ordered by `max_tokens`.
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
    def is_multi_rank(self) -> bool:
        """Whether a forward communicates, so that the phase, never a local token count, picks the route."""
        return self.request.ep_size > 1 and self.request.token_placement == "distributed"

    def route_index(self, num_tokens: int, phase: str | None = None) -> int:
        """The route of a forward: by `phase` if given, else by the number of tokens of a local plan.

        Raises:
            InputError: The phase has no route, a multi-rank plan of several routes was not told the phase, or
                there are more tokens than any route takes.
        """
        if phase is not None and (len(self.routes) > 1 or self.routes[0].phase != ANY):
            return self._index_of_phase(phase)
        if len(self.routes) == 1:
            return 0
        if self.is_multi_rank:
            phases = ", ".join(route.phase for route in self.routes)
            raise InputError(f"this layer has routes for {phases}: say which with phase=; token counts differ by rank")
        limits = [float("inf") if route.max_tokens is None else route.max_tokens for route in self.routes]
        index = bisect.bisect_left(limits, num_tokens)
        if index == len(self.routes):
            raise InputError(f"{num_tokens} tokens exceed the largest workload of this layer, {limits[-1]}")
        return index

    def _index_of_phase(self, phase: str) -> int:
        for index, route in enumerate(self.routes):
            if route.phase == phase:
                return index
        raise InputError(f"no route for phase {phase!r}; this layer has {', '.join(r.phase for r in self.routes)}")

    def canonical(self) -> dict[str, str]:
        """Flat field -> value form that is equal on every rank with the same plan (no rank, no local count)."""
        flat: dict[str, str] = {}
        _flatten("", attrs.asdict(attrs.evolve(self, notes=())), flat)
        return flat

    def __str__(self) -> str:
        """One line per route and the weight layout."""
        return "\n".join([*map(str, self.routes), f"weights: {self.weight_layout}"])


def _flatten(prefix: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, element in value.items():
            _flatten(f"{prefix}.{key}" if prefix else key, element, into)
    elif isinstance(value, (tuple, list)) and value and isinstance(value[0], (dict, tuple, list)):
        for index, element in enumerate(value):
            _flatten(f"{prefix}[{index}]", element, into)
    else:
        into[prefix] = json.dumps(value)
