"""What takes part in one comparison: combinations of ours and peers, bound to one layer and its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from moe_core.bench import OURS
from moe_core.bench.peers import Peer
from moe_core.errors import SpecError
from moe_core.layer import MoELayer
from moe_core.manager import default_manager
from moe_core.payloads import RawWeights, Tensor
from moe_core.planner import keeps_weights, without_copies
from moe_core.request import LayerRequest, Workload
from moe_core.tuning.layers import Batches, LayerCall


@attrs.frozen(kw_only=True)
class Bound:
    """An implementation that can be called.

    Attributes:
        layer: The call.
        batches: The inputs in the dtypes that it wants.
        runs: What it is with so many tokens: a combination, or a version.
        not_captured: Why it cannot be captured, "" if it can.
        note: What to know about its figures.
    """

    layer: LayerCall
    batches: Batches
    runs: str
    not_captured: str = ""
    note: str = ""


@attrs.frozen
class Combination:
    """One of ours.

    Attributes:
        pins: `runner` or `dispatcher + runner`, any names that pins take; None for what the resolver chooses.
        of_model: Whether layers are those of a model, which may keep its weights: chosen is then what would serve it.
    """

    pins: str | None = None
    of_model: bool = False

    @property
    def name(self) -> str:
        """How its row is called."""
        return OURS if self.pins is None else f"{OURS} {self.pins}"

    @property
    def fields(self) -> dict[str, str]:
        """The pins as fields of a request; raises `SpecError` for more than two names, and for an empty one."""
        parts = [] if self.pins is None else [part.strip() for part in self.pins.split("+")]
        if len(parts) > 2 or not all(parts):
            raise SpecError(f"combination {self.pins!r}: expected a runner, or 'dispatcher + runner'")
        return dict(zip(("runner_backend", "a2a_backend"), reversed(parts), strict=False))

    def request(self, request: LayerRequest, num_tokens: int) -> LayerRequest:
        """The request with the pins, for so many tokens; raises `SpecError` as `fields`."""
        changes: dict[str, Any] = dict(self.fields)
        return attrs.evolve(request, workloads=Workload(max_tokens=num_tokens), **changes)

    def refusal(self, request: LayerRequest, num_tokens: int, device: str) -> str:
        """Never refuses in advance: the resolver does, with its reasons."""
        return ""

    def bind(self, request: LayerRequest, weights: Mapping[str, Tensor], batches: Batches, device: str) -> Bound:
        """Resolve, prepare and bind; raises what `MoELayer` raises."""
        manager, asked = default_manager(), self.request(request, batches.num_tokens)
        machine = manager.probe(device)
        times = without_copies(manager, asked, machine) if keeps_weights(asked, of_model=self.of_model) else None
        layer = MoELayer(asked, environment=machine, measurements=times)
        layer.load_weights(RawWeights(tensors=dict(weights), handed_over=True))
        # Measured times may give several ranges of token counts a route each.
        candidate = layer.plan.routes[layer.plan.route_index(batches.num_tokens)].candidate
        parts = [part for part in (candidate.dispatcher, candidate.runner) if part is not None]
        waiting = [part.full_name for part in parts if not part.spec.graph_safe]
        return Bound(
            layer=layer,
            batches=batches,
            runs=candidate.full_name,
            not_captured=f"{', '.join(waiting)}: not declared graph_safe" if waiting else "",
        )


@attrs.frozen
class PeerContender:
    """One of others.

    Attributes:
        peer: Which.
        free_bytes: Memory that a forward may take; None if that is not known.
    """

    peer: Peer
    free_bytes: int | None = None

    @property
    def name(self) -> str:
        """How its row is called."""
        return self.peer.name

    def refusal(self, request: LayerRequest, num_tokens: int, device: str) -> str:
        """Why it is not tried, "" if it is."""
        extra = self.peer.extra_bytes(request, num_tokens)
        if self.free_bytes is not None and extra > self.free_bytes:
            return f"needs {extra / 1e9:.0f} GB for one forward, {self.free_bytes / 1e9:.0f} GB are free"
        return self.peer.refusal(request, device)

    def bind(self, request: LayerRequest, weights: Mapping[str, Tensor], batches: Batches, device: str) -> Bound:
        """Import and bind; raises whatever the peer raises."""
        call = self.peer.bind(request, weights)

        def layer(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            # Some of them would keep tensors for a backward.
            with torch.no_grad():
                output: Tensor = call(hidden_states, topk_ids, topk_weights)
            return output

        return Bound(
            layer=layer,
            batches=self.peer.adapt(batches, request.dtype),
            runs=f"{self.peer.module} {self.peer.version or ''}".strip(),
            not_captured=self.peer.not_captured,
            note=self.peer.note,
        )


Contender = Combination | PeerContender
