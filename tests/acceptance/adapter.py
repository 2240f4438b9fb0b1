"""moe-core as the acceptance cases see it: every method goes through the public API."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import attrs
import torch

# The cases may be run as a script, without the test runner's path; ranks are processes and inherit this.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from case_lib import Lib
from case_requests import activation, dtype_of, make_request, num_ranks
from checkpoints import canonical_tensors, layer_quant, named_scheme, stored_layout, without_halves
from fake_backends import RESTRICTED_RUNNERS, make_plugin_module, restricted_plugin
from layers import torch_manager
from ranks import RankError, run_on_ranks

from moe_core import (
    BackendManager,
    ExpertGroup,
    LayerRequest,
    MoELayer,
    RawWeights,
    make_plan,
    routing,
)
from moe_core.discovery import Found
from moe_core.environment import Environment
from moe_core.probing import probe_environment
from moe_core.weights.loading import cut
from moe_core.weights.requantize import to_ue8m0


def _stored(spec: dict[str, Any], ckpt: dict[str, Any]) -> dict[str, Any]:
    return ckpt if activation(spec).gated else without_halves(ckpt)


def make_weights(
    spec: dict[str, Any], ckpt: dict[str, Any], request: LayerRequest, rank: int, tp_rank: int
) -> dict[str, torch.Tensor]:
    """One rank's share of a case's checkpoint, which may hold this rank's experts only."""
    name, dtype = dtype_of(spec)
    tensors = canonical_tensors(ckpt, dtype, request.activation.gated)
    stored = attrs.evolve(request, quant=layer_quant({**ckpt, "ue8m0": False}, name))
    share = cut(tensors, stored, tp_rank, layout=stored_layout(ckpt))
    if ckpt.get("ue8m0"):
        share = to_ue8m0(share, stored.local_quant)
    owned = list(request.local_experts(rank))
    if len(share["w13"]) == request.num_experts and owned != list(range(request.num_experts)):
        share = {name: tensor[owned] for name, tensor in share.items()}
    return share


def _own(weights: dict[str, torch.Tensor], ckpt: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights, each copied once: from the checkpoint, or where it was read."""
    given = {tensor.untyped_storage().data_ptr() for tensor in ckpt.values() if isinstance(tensor, torch.Tensor)}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        is_borrowed = tensor.untyped_storage().data_ptr() in given
        return tensor.clone(memory_format=torch.contiguous_format) if is_borrowed else tensor.contiguous()

    return {name: own(tensor) for name, tensor in weights.items()}


class BuiltLayer:
    """One rank's layer with float64 inputs, as the cases give them."""

    def __init__(
        self, spec: dict[str, Any], group: ExpertGroup | None = None, tp_rank: int = 0, device: str = "cpu", **more: Any
    ) -> None:
        spec = {**spec, "ckpt": _stored(spec, spec["ckpt"])}
        self._spec, self._tp_rank, self._rank, self._device = spec, tp_rank, group.rank if group else 0, device
        _, self._dtype = dtype_of(spec)
        manager = torch_manager()
        environment = probe_environment(manager.modules_required(), device)
        self.layer = MoELayer(make_request(spec, **more), environment=environment, manager=manager, group=group)
        self.reload(spec["ckpt"])

    def reload(self, ckpt: dict[str, Any]) -> None:
        """Load a checkpoint, the first time or again."""
        stored = _stored(self._spec, ckpt)
        share = make_weights(self._spec, stored, self.layer.request, self._rank, self._tp_rank)
        weights = {name: tensor.to(self._device) for name, tensor in share.items()}
        if not self.parameters():
            weights = _own(weights, ckpt)
        self.layer.load_weights(RawWeights(tensors=weights, handed_over=True))

    def parameters(self) -> list[torch.Tensor]:
        """The prepared weights."""
        return list(self.layer.parameters())

    def forward(self, x: torch.Tensor, ids: torch.Tensor, wts: torch.Tensor) -> torch.Tensor:
        """Cast the inputs to what the layer takes and run; any negative id of a case is a slot without expert."""
        device, top_k = self._device, self.layer.request.top_k
        if not ids.is_floating_point() and ids.dtype != torch.bool:
            ids = ids.to(ids.dtype if ids.dtype == torch.int32 else torch.int64).clamp(min=-1)
        x, ids, wts = x.to(device, self._dtype), ids.to(device), wts.to(device, torch.float32)
        if ids.dim() == 2 and ids.shape == wts.shape and ids.shape[1] != top_k:
            return _over_calls(self.layer, x, ids, wts, top_k).cpu()
        return self.layer(x, ids, wts).cpu()


def _over_calls(layer: MoELayer, x: torch.Tensor, ids: torch.Tensor, wts: torch.Tensor, top_k: int) -> torch.Tensor:
    """The sum over groups of `top_k` slots; those that are missing in the last have no expert."""
    missing = (-ids.shape[1]) % top_k if ids.shape[1] else top_k
    ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
    wts = torch.nn.functional.pad(wts, (0, missing))
    parts = [layer(x, *slots) for slots in zip(ids.split(top_k, 1), wts.split(top_k, 1), strict=True)]
    return torch.stack(parts).double().sum(0)


class Registry:
    """The manager, in the words of the cases."""

    def __init__(self) -> None:
        self._manager = BackendManager()

    def register(self, name: str, plugin: types.ModuleType) -> None:
        plugin.plugin_name = name  # type: ignore[attr-defined]
        self._manager.register(name, plugin)

    def unregister(self, name: str) -> None:
        self._manager.unregister(name)

    def names(self) -> list[str]:
        return list(self._manager.names())

    def failures(self) -> list[tuple[str, str]]:
        return [(failed.found.name, str(failed)) for failed in self._manager.failures()]

    def load(self, entry_points: list[tuple[str, Any]]) -> None:
        def named(name: str, make: Any) -> Any:
            module = make()
            module.plugin_name = name
            return module

        self._manager.load([Found(name=n, load=lambda n=n, f=f: named(n, f)) for n, f in entry_points])


def _rank_output(group: ExpertGroup, spec: dict[str, Any], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """One rank's job; ranks import this file by name."""
    return _sum_of_shares({**spec, **inputs}, group, ep_size=group.size)


class SummedLayers:
    """The layers of all tensor-parallel ranks as one."""

    def __init__(self, shares: list[BuiltLayer]) -> None:
        self._shares = shares

    def reload(self, ckpt: dict[str, Any]) -> None:
        """Every rank loads its share."""
        for share in self._shares:
            share.reload(ckpt)

    def parameters(self) -> list[torch.Tensor]:
        """Those of every rank."""
        return [parameter for share in self._shares for parameter in share.parameters()]

    def forward(self, x: torch.Tensor, ids: torch.Tensor, wts: torch.Tensor) -> torch.Tensor:
        """What the ranks add up to."""
        return torch.stack([share.forward(x, ids, wts).double() for share in self._shares]).sum(0)


def _sum_of_shares(
    spec: dict[str, Any], group: ExpertGroup | None = None, device: str = "cpu", **more: Any
) -> torch.Tensor:
    """What the tensor-parallel ranks of one expert-parallel rank add up to."""
    shares = [BuiltLayer(spec, group, tp_rank, device, **more) for tp_rank in range(num_ranks(spec, "tp"))]
    layer = shares[0] if len(shares) == 1 else SummedLayers(shares)
    return layer.forward(spec["x"], spec["ids"], spec["wts"])


class MoECore(Lib):
    """The adapter."""

    name = "moe-core"
    device = "cpu"
    deterministic = True
    reference_runner = "torch"
    restricted_runners = tuple(RESTRICTED_RUNNERS)
    runners = ("torch", *RESTRICTED_RUNNERS)

    def run(self, **spec: Any) -> torch.Tensor:
        ep_size = num_ranks(spec, "ep")
        spec.pop("ep", None)
        if ep_size == 1:
            output = _sum_of_shares(spec, device=self.device)
        else:
            parts = [self.rank_part(rank, ep_size, **spec) for rank in range(ep_size)]
            output = torch.stack(parts).sum(0)
        shared = spec.get("shared")
        return output.double() + self._always_on(spec, shared) if shared else output

    def _always_on(self, spec: dict[str, Any], shared: dict[str, Any]) -> torch.Tensor:
        """The expert that every token uses with weight 1, as a layer of its own."""
        ones = torch.ones(len(spec["x"]), 1)
        plain = {"fmt": "plain", "layout": "gate_up", "orientation": "out_in", **shared}
        names = ("x", "activation", "dtype")
        alone = {name: spec[name] for name in names if name in spec}
        return self.run(**alone, ids=ones.long() - 1, wts=ones, num_experts=len(shared["w13"]), ckpt=plain)

    def build(self, **spec: Any) -> BuiltLayer | SummedLayers:
        shares = [BuiltLayer(spec, tp_rank=rank, device=self.device) for rank in range(num_ranks(spec, "tp"))]
        return shares[0] if len(shares) == 1 else SummedLayers(shares)

    def run_ranks(self, per_rank: list[dict[str, torch.Tensor]], ep: int, **spec: Any) -> list[torch.Tensor]:
        outputs = run_on_ranks(_rank_output, [(spec, inputs) for inputs in per_rank])
        errors = [output.text for output in outputs if isinstance(output, RankError)]
        if errors:
            # The rank that refused its input explains why the others lost their connection.
            raise RuntimeError(next((text for text in errors if text.startswith("InputError")), errors[0]))
        return [output for output in outputs if isinstance(output, torch.Tensor)]

    def rank_part(self, rank: int, ep: int, **spec: Any) -> torch.Tensor:
        group = ExpertGroup(rank=rank, size=ep)
        return _sum_of_shares(spec, group, ep_size=ep, token_placement="replicated").double()

    def local_experts(self, num_experts: int, ep: int) -> list[list[int]]:
        request = LayerRequest(num_experts=num_experts, top_k=1, hidden_size=8, intermediate_size=8, ep_size=ep)
        return [list(request.local_experts(rank)) for rank in range(ep)]

    def route(self, logits: torch.Tensor, k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        renamed = {"scale": "routed_scaling_factor"}
        tensors = {"correction_bias": options.pop("bias", None), "valid": options.pop("valid", None)}
        spec = routing.RoutingSpec(top_k=k, **{renamed.get(name, name): value for name, value in options.items()})
        return routing.route(logits, spec, **tensors)

    def select(
        self, scheme: str, device: dict[str, Any], a2a: str = "auto", runner: str = "auto"
    ) -> tuple[str, str, str]:
        manager = torch_manager()
        manager.register("restricted", restricted_plugin())
        names = {spec.name for plugin in manager.specs() for spec in plugin.runners}
        request = LayerRequest(
            num_experts=8,
            top_k=2,
            hidden_size=256,
            intermediate_size=256,
            quant=named_scheme(scheme),
            a2a_backend=None if a2a == "auto" else a2a,
            runner_backend=None if runner == "auto" else runner,
            exclude=sorted(names - set(device.get("only", names))),
            # What is named is explained one by one.
            prefer=device.get("only", ()),
        )
        arch = f"sm{device['sm']}" if "sm" in device else ""
        environment = Environment(device_type=device["type"], arch=arch, packages={"torch": torch.__version__})
        plan, _ = make_plan(manager, request, environment)
        candidate = plan.routes[0].candidate
        return candidate.a2a_backend, candidate.runner.spec.name, scheme

    def requirements(self, runner: str) -> dict[str, Any]:
        manager = torch_manager()
        manager.register("restricted", restricted_plugin())
        specs = [spec for plugin in manager.specs() for spec in plugin.runners if spec.name == runner]
        if not specs:
            raise ValueError(f"unknown runner {runner!r}; known: {', '.join(self.runners)}")
        archs = [int(arch.removeprefix("sm")) for spec in specs for arch in spec.archs]
        modules = [requirement.module for spec in specs for requirement in spec.requirements]
        return {
            "device": specs[0].devices[0],
            "min_sm": min(archs, default=0),
            "package": modules[0] if modules else None,
        }

    def registry(self) -> Registry:
        return Registry()

    def make_plugin(self, kind: str) -> types.ModuleType:
        return make_plugin_module(kind)


class MoECoreOnCuda(MoECore):
    """The same on a CUDA device, where equal calls of some kernels differ in the last bits."""

    device = "cuda"
    deterministic = False
