"""moe-core as the acceptance cases see it: every method goes through the public API."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch

# The cases may be run as a script, without the test runner's path; ranks are processes and inherit this.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from case_lib import Lib, NotOffered
from fake_backends import RESTRICTED_RUNNERS, make_plugin_module, restricted_plugin
from layers import torch_manager
from ranks import RankError, run_on_ranks

from moe_core import BackendManager, ExpertGroup, LayerRequest, MoELayer, RawWeights, Workload, make_plan, routing
from moe_core.activation import ActivationSpec
from moe_core.discovery import Found
from moe_core.environment import Environment, probe_environment
from moe_core.quant import FP8_BLOCK128, MXFP4_W4A16, NVFP4, NVFP4_W4A16, W8A8_INT8, QuantScheme
from moe_core.weights.canonical import canonical_weights

DTYPES = {"float32": ("fp32", torch.float32), "bfloat16": ("bf16", torch.bfloat16), "float16": ("fp16", torch.float16)}
ACTIVATIONS = {
    "swiglu": ActivationSpec(),
    "geglu": ActivationSpec(kind="gelu"),
    "geglu_tanh": ActivationSpec(kind="gelu_tanh"),
    "swiglu_oai": ActivationSpec(alpha=1.702, limit=7.0, beta=1.0),
    "swiglu_limit": ActivationSpec(limit=7.0),
    "swiglu_step": ActivationSpec(limit=7.0, clamp="after"),
    **{kind: ActivationSpec(kind=kind, gated=False) for kind in ("relu2", "gelu", "gelu_tanh", "silu", "relu")},
}
#: What a spec may say that this version does not offer yet.
NOT_OFFERED = ("tp", "eplb", "shared")


def _activation(spec: dict[str, Any]) -> ActivationSpec:
    activation = ACTIVATIONS[spec["activation"]]
    changed = {}
    if activation.limit is not None:
        changed["limit"] = spec.get("limit", activation.limit)
    if activation.alpha != 1.0:
        changed["alpha"] = spec.get("alpha", activation.alpha)
    return ActivationSpec(**{**_fields(activation), **changed})


def _fields(activation: ActivationSpec) -> dict[str, Any]:
    return {name: getattr(activation, name) for name in ("kind", "gated", "alpha", "limit", "beta", "clamp")}


def _scheme(ckpt: dict[str, Any], dtype: str) -> QuantScheme:
    if ckpt["fmt"] == "plain":
        return QuantScheme.from_name(dtype)
    if ckpt["fmt"] == "int8" and ckpt["group"] is None and ckpt.get("act_bits", 8) == 8:
        return W8A8_INT8
    if ckpt["fmt"] == "mxfp4" and ckpt["nibbles"] == "low_first":
        return MXFP4_W4A16
    if (
        ckpt["fmt"] == "fp8_block"
        and tuple(ckpt["block"]) == (128, 128)
        and not (ckpt.get("ue8m0") or ckpt.get("halves"))
    ):
        return FP8_BLOCK128
    if ckpt["fmt"] in ("nvfp4_modelopt", "nvfp4_ct"):
        return NVFP4_W4A16 if ckpt.get("weight_only") else NVFP4
    raise NotOffered


#: Names of the NVFP4 scales as checkpoints have them -> canonical name.
_NVFP4_NAMES = {
    "w13_scale_2": "w13_global_scale",
    "w2_scale_2": "w2_global_scale",
    "w13_global": "w13_global_scale",
    "w2_global": "w2_global_scale",
    "in13_global": "w13_input_scale",
    "in2_global": "w2_input_scale",
}


def _nvfp4_tensors(ckpt: dict[str, Any], stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Canonical names, block scales as e4m3, divisors of compressed-tensors as multipliers."""
    named = {}
    for name, tensor in stored.items():
        canonical = _NVFP4_NAMES.get(name, name)
        is_divisor = ckpt["fmt"] == "nvfp4_ct" and name.endswith("_global")
        value = 1.0 / tensor.float() if is_divisor else tensor
        is_block_scale = canonical in ("w13_scale", "w2_scale")
        named[canonical] = value.view(torch.float8_e4m3fn) if is_block_scale else value
    if ckpt.get("weight_only"):
        named = {name: tensor for name, tensor in named.items() if not name.endswith("_input_scale")}
    return named


def make_request(spec: dict[str, Any], **more: Any) -> LayerRequest:
    """The request of a case's spec."""
    if any(spec.get(name) for name in NOT_OFFERED):
        raise NotOffered
    name, _ = DTYPES[spec.get("dtype", "bfloat16")]
    limit = spec.get("max_dispatch_tokens_per_rank")
    return LayerRequest(
        num_experts=spec["num_experts"],
        top_k=spec["ids"].shape[1] if "ids" in spec else spec["top_k"],
        hidden_size=spec["x"].shape[1] if "x" in spec else spec["hidden_size"],
        intermediate_size=_intermediate_size(spec),
        activation=_activation(spec),
        dtype=name,
        quant=_scheme(spec["ckpt"], name),
        bias=spec["ckpt"].get("b13") is not None,
        weight_on_input=spec.get("weight_on_input", False),
        deterministic=spec.get("deterministic", False),
        workloads=[Workload(max_tokens=limit)],
        **more,
    )


def _intermediate_size(spec: dict[str, Any]) -> int:
    w13, gated = spec["ckpt"]["w13"], ACTIVATIONS[spec["activation"]].gated
    rows = w13.shape[2] if spec["ckpt"]["orientation"] == "in_out" else w13.shape[1]
    return rows // 2 if gated else rows


def make_weights(spec: dict[str, Any], ckpt: dict[str, Any], experts: tuple[int, ...] | None = None) -> RawWeights:
    """Canonical weights of some experts of a case's checkpoint (all of them by default)."""
    _, dtype = DTYPES[spec.get("dtype", "bfloat16")]
    stored = {name: tensor for name, tensor in ckpt.items() if isinstance(tensor, torch.Tensor)}
    if ckpt["fmt"] == "plain":
        stored = {name: tensor.to(dtype) for name, tensor in stored.items()}
    elif ckpt["fmt"] == "int8":
        # One scale per output channel comes as [E, rows, 1].
        stored = {n: t.squeeze(-1) if n.endswith("_scale") else t for n, t in stored.items()}
    elif ckpt["fmt"] == "fp8_block":
        stored = {name.removesuffix("_inv"): tensor for name, tensor in stored.items()}
        stored = {n: t if n.endswith("_scale") else t.view(torch.float8_e4m3fn) for n, t in stored.items()}
    elif ckpt["fmt"].startswith("nvfp4"):
        stored = _nvfp4_tensors(ckpt, stored)
    gated = ACTIVATIONS[spec["activation"]].gated
    tensors = canonical_weights(stored, layout=ckpt["layout"], orientation=ckpt["orientation"], gated=gated)
    if ckpt["fmt"] == "fp8_block":
        tensors["w13_scale"] = _cut_tile_rows(tensors["w13_scale"], make_request(spec), tensors["w13"].shape[1])
    return RawWeights(tensors={n: t if experts is None else t[list(experts)] for n, t in tensors.items()})


def _cut_tile_rows(scale: torch.Tensor, request: LayerRequest, num_rows: int) -> torch.Tensor:
    """The scale of every tile that ends where the gate ends, from those of the checkpoint's tiles."""
    tile, cut = request.quant.w13.weight_block[0], request.local_quant.w13.weight_block[0]
    return scale[:, torch.arange(0, num_rows, cut) // tile]


class BuiltLayer:
    """One layer with float64 inputs, as the cases give them."""

    def __init__(self, spec: dict[str, Any], group: ExpertGroup | None = None, **more: Any) -> None:
        self.spec = spec
        self.dtype = DTYPES[spec.get("dtype", "bfloat16")][1]
        manager = torch_manager()
        environment = probe_environment(manager.modules_required(), "cpu")
        self.layer = MoELayer(make_request(spec, **more), environment=environment, manager=manager, group=group)
        self.reload(spec["ckpt"])

    def reload(self, ckpt: dict[str, Any]) -> None:
        """Load a checkpoint, the first time or again."""
        owned = self.layer.local_experts
        num_stored = ckpt["w13"].shape[0]
        everything = len(owned) == self.spec["num_experts"] or num_stored != self.spec["num_experts"]
        self.layer.load_weights(make_weights(self.spec, ckpt, None if everything else owned))

    def parameters(self) -> list[torch.Tensor]:
        """The prepared weights."""
        return list(self.layer.parameters())

    def forward(self, x: torch.Tensor, ids: torch.Tensor, wts: torch.Tensor) -> torch.Tensor:
        """Cast the inputs to the layer's dtype and run."""
        return self.layer(x.to(self.dtype), ids, wts.float())


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
    built = BuiltLayer({**spec, **inputs}, group, ep_size=group.size)
    return built.forward(inputs["x"], inputs["ids"], inputs["wts"])


class MoECore(Lib):
    """The adapter."""

    name = "moe-core"
    deterministic = True
    reference_runner = "torch"
    restricted_runners = tuple(RESTRICTED_RUNNERS)
    runners = ("torch", *RESTRICTED_RUNNERS)

    def run(self, **spec: Any) -> torch.Tensor:
        return BuiltLayer(spec).forward(spec["x"], spec["ids"], spec["wts"])

    def build(self, **spec: Any) -> BuiltLayer:
        return BuiltLayer(spec)

    def run_ranks(self, per_rank: list[dict[str, torch.Tensor]], ep: int, **spec: Any) -> list[torch.Tensor]:
        outputs = run_on_ranks(_rank_output, [(spec, inputs) for inputs in per_rank])
        errors = [output.text for output in outputs if isinstance(output, RankError)]
        if errors:
            # The rank that refused its input explains why the others lost their connection.
            raise RuntimeError(next((text for text in errors if text.startswith("InputError")), errors[0]))
        return [output for output in outputs if isinstance(output, torch.Tensor)]

    def rank_part(self, rank: int, ep: int, **spec: Any) -> torch.Tensor:
        group = ExpertGroup(rank=rank, size=ep)
        built = BuiltLayer(spec, group, ep_size=ep, token_placement="replicated")
        return built.forward(spec["x"], spec["ids"], spec["wts"]).double()

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
            quant=QuantScheme.from_name("bf16" if scheme == "none" else scheme),
            a2a_backend=None if a2a == "auto" else a2a,
            runner_backend=None if runner == "auto" else runner,
            exclude=sorted(names - set(device.get("only", names))),
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
