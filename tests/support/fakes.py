"""A small toolbox: plugins as modules, vendors' declarations as their libraries need them, and machines by hand."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from moe_core.activation import ActivationPattern
from moe_core.decision import Decision
from moe_core.environment import Environment
from moe_core.hookspecs import hookimpl
from moe_core.manager import BackendManager
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan
from moe_core.quant import BF16, FP8_BLOCK128, FP16, FP32, NVFP4, W4A4_INT4, W8A8_INT8
from moe_core.request import LayerRequest, Workload
from moe_core.resolver import resolve
from moe_core.specs import DispatcherSpec, Limit, PluginSpec, Requirement, RunnerSpec, TokenDtype

FLOATS = (TokenDtype("fp32"), TokenDtype("bf16"), TokenDtype("fp16"))
BF16_TOKENS = TokenDtype("bf16")
FP8_ROW, FP8_COLUMN = TokenDtype("fp8", "row_128"), TokenDtype("fp8", "column_128")
FP8_UE8M0 = TokenDtype("fp8", "ue8m0_128")
INT8, NVFP4_TOKENS, MXFP8_TOKENS = (
    TokenDtype("int8", "token"),
    TokenDtype("nvfp4", "block_16"),
    TokenDtype("mxfp8", "e8m0_32"),
)
ANY_ACTIVATION = ActivationPattern(kind="any", gated=None, parameters=True, interleaved=True)

CPU = Environment(device_type="cpu", packages={"torch": "2.13.0"})
_CUDA = {"torch": "2.11.0", "deep_ep": "1.2.1", "deep_gemm": "2.5.0", "flashinfer": "0.6.11"}
SM80, SM90, SM100, SM110 = (
    Environment(device_type="cuda", arch=arch, packages=_CUDA) for arch in ("sm80", "sm90", "sm100", "sm110")
)
_ASCEND = {"torch": "2.13.0", "torch_npu": "2.13.0", "deep_ep": "1.0.0"}
A2, A3, A5 = (Environment(device_type="npu", arch=arch, packages=_ASCEND) for arch in ("a2", "a3", "a5"))


def expect(condition: object, text: object = "") -> None:
    """An assertion that is not one: it also bites where assertions are switched off."""
    if not condition:
        raise AssertionError(str(text))


def dispatcher(name: str = "toy", mode: str = "standard", **fields: Any) -> DispatcherSpec:
    """A dispatcher spec; format `standard` and bf16 unless told otherwise."""
    defaults = {"format": "standard", "sends": (BF16_TOKENS,), "binder": "toy.dispatch:bind"}
    return DispatcherSpec(name=name, mode=mode, **(defaults | fields))


def runner(name: str = "toy", kernel: str = "standard", **fields: Any) -> RunnerSpec:
    """A runner spec; bf16 SwiGLU on format `standard` unless told otherwise."""
    defaults = {
        "format": "standard",
        "reads": (BF16_TOKENS,),
        "schemes": (BF16,),
        "activations": (ActivationPattern(),),
        "dtypes": ("bf16",),
        "weight_layout": "canonical",
    }
    return RunnerSpec(name=name, kernel=kernel, **(defaults | fields))


def plugin(name: str = "toy", **fields: Any) -> PluginSpec:
    """A declaration for hook API 1."""
    return PluginSpec(name=name, hook_api=fields.pop("hook_api", 1), **fields)


def fake_plugin(
    name: str = "toy",
    dispatchers: Sequence[DispatcherSpec] = (),
    runners: Sequence[RunnerSpec] = (),
    hooks: Mapping[str, Callable[..., Any]] | None = None,
    **fields: Any,
) -> types.ModuleType:
    """A plugin module; `hooks` are marked and added, or replace the ones it has."""
    spec = plugin(name, dispatchers=dispatchers, runners=runners, **fields)
    implemented: dict[str, Callable[..., Any]] = {"declare_backends": lambda: spec}
    if runners:
        implemented["process_weights_after_loading"] = lambda plan, weights, out: out
        implemented["fused_experts"] = lambda plan, route, weights: lambda dispatched: dispatched
    return bare_plugin(name, {**implemented, **(hooks or {})})


def bare_plugin(name: str, hooks: Mapping[str, Callable[..., Any]]) -> types.ModuleType:
    """A module with exactly these hooks, for policies and for plugins with faults."""
    module = types.ModuleType(f"fake_{name}")
    for hook, function in hooks.items():
        setattr(module, hook, hookimpl(function))
    return module


def manager_of(*specs: PluginSpec, **policies: types.ModuleType) -> BackendManager:
    """A manager with a fake plugin for each declaration, and more modules by name."""
    manager = BackendManager()
    for spec in specs:
        fields = {field.name: getattr(spec, field.name) for field in attrs.fields(PluginSpec)}
        manager.register(spec.name, fake_plugin(**fields))
    for name, module in policies.items():
        manager.register(name, module)
    return manager


def request(**fields: Any) -> LayerRequest:
    """A layer of ordinary sizes."""
    sizes = {"num_experts": 64, "top_k": 8, "hidden_size": 4096, "intermediate_size": 1536}
    return LayerRequest(**(sizes | fields))


def chosen(decision: Decision) -> list[str]:
    """The first candidate of every workload; raises with the explanation if there is none."""
    expect(decision.is_feasible, decision.explain())
    return [workload.ranked[0].candidate.full_name for workload in decision.workloads]


def decide(layer: LayerRequest, environment: Environment, *plugins: PluginSpec) -> Decision:
    """Resolve against every vendor's declarations, or these."""
    return resolve(plugins or VENDORS, layer, environment)


def plan(layer: LayerRequest, environment: Environment, *plugins: PluginSpec) -> MoEPlan:
    """The finished plan, against every vendor's declarations or these."""
    return make_plan(manager_of(*(plugins or VENDORS)), layer, environment)[0]


PREFILL_AND_DECODE = (Workload(phase="prefill", max_tokens=4096), Workload(phase="decode", max_tokens=128))
DECODE = (Workload(phase="decode", max_tokens=128),)

_DEEP_EP = (Requirement(module="deep_ep", minimum="1.2", install="pip install deep-ep"),)
_DEEP_GEMM = (Requirement(module="deep_gemm", minimum="2.4", install="pip install deep-gemm"),)
_HOPPER_ON = ("sm100", "sm103", "sm90")
_BLACKWELL = ("sm100", "sm103")


def _deep_gemm(format_: str, kind: str, **fields: Any) -> RunnerSpec:
    common = {
        "devices": ("cuda",),
        "archs": ("sm100", "sm90"),
        "requirements": _DEEP_GEMM,
        "row_alignment": 128,
        "tier": "tuned",
    }
    return runner("deep_gemm", f"{format_}_{kind}", format=format_, **common, **fields)


TORCH = plugin(
    "torch",
    dispatchers=[
        dispatcher("none", format_, format=format_, sends=FLOATS, token_placements=("replicated",), deterministic=True)
        for format_ in ("standard", "contiguous", "masked")
    ],
    runners=[
        runner(
            "torch",
            format_,
            format=format_,
            reads=FLOATS,
            schemes=(FP32, BF16, FP16),
            activations=(ANY_ACTIVATION,),
            dtypes=("fp32", "bf16", "fp16"),
            bias=True,
            weight_on_input=True,
            deterministic=True,
            graph_safe=True,
            tier="reference",
        )
        for format_ in ("standard", "contiguous", "masked")
    ],
    requirements=(Requirement(module="torch", minimum="2.10"),),
)
CUDA_DEEPGEMM = plugin(
    "cuda_deepgemm",
    dispatchers=[
        dispatcher(
            "deepep",
            "low_latency",
            format="masked",
            sends=(BF16_TOKENS, FP8_COLUMN),
            devices=("cuda",),
            archs=_HOPPER_ON,
            dtypes=("bf16",),
            limits=(Limit("top_k", "<=", 11), Limit("max_tokens", "<=", 1024, "send the tokens in chunks")),
            phases=("decode", "verify"),
            requirements=_DEEP_EP,
            graph_safe=True,
        ),
        dispatcher(
            "deepep",
            "normal",
            format="contiguous",
            sends=(BF16_TOKENS, FP8_ROW),
            devices=("cuda",),
            archs=_HOPPER_ON,
            dtypes=("bf16",),
            requirements=_DEEP_EP,
        ),
    ],
    runners=[
        _deep_gemm("masked", "bf16", graph_safe=True),
        _deep_gemm("contiguous", "bf16"),
        _deep_gemm("masked", "fp8", reads=(FP8_COLUMN, BF16_TOKENS), schemes=(FP8_BLOCK128,), graph_safe=True),
        _deep_gemm("contiguous", "fp8", reads=(FP8_ROW, BF16_TOKENS), schemes=(FP8_BLOCK128,)),
    ],
)
CUTEDSL = plugin(
    "flashinfer_cutedsl",
    runners=[
        runner(
            "flashinfer_cutedsl",
            kernel,
            format=format_,
            reads=(NVFP4_TOKENS, BF16_TOKENS),
            schemes=(NVFP4,),
            devices=("cuda",),
            archs=_BLACKWELL,
            weight_layout=f"cutedsl-{kernel}",
            requirements=(Requirement(module="flashinfer", minimum="0.6"),),
            tier="tuned",
        )
        for kernel, format_ in (("v1", "masked"), ("v2", "standard"))
    ],
)


def _ascend(kernel: str, **fields: Any) -> RunnerSpec:
    return runner("ascend", kernel, format="contiguous", devices=("npu",), archs=("a2", "a3"), **fields)


def _fuseep(mode: int, limits: tuple[Limit, ...]) -> RunnerSpec:
    return runner(
        "fuseep",
        f"mode{mode}",
        format="fused",
        a2a="ascend_fuseep",
        schemes=(W8A8_INT8,),
        devices=("npu",),
        archs=("a3",),
        weight_layout=f"fuseep-{mode}",
        limits=limits,
        tier="fused",
    )


ASCEND = plugin(
    "ascend_npu",
    dispatchers=[
        dispatcher(
            "deepep",
            mode,
            format="contiguous",
            sends=(BF16_TOKENS, INT8),
            devices=("npu",),
            archs=("a2", "a3"),
            dtypes=("bf16",),
        )
        for mode in ("low_latency", "normal")
    ],
    runners=[
        _ascend("w8a8", reads=(INT8, BF16_TOKENS), schemes=(W8A8_INT8,), weight_layout="w8a8-nz"),
        _ascend("w4a4", schemes=(W4A4_INT4,), weight_layout="w4a4-nz"),
        _ascend("bf16", dtypes=("bf16", "fp16"), reads=(BF16_TOKENS, TokenDtype("fp16"))),
        _fuseep(1, (Limit("intermediate_size", "<=", 3072, "mode 2 takes more"),)),
        _fuseep(2, ()),
    ],
    requirements=(Requirement(module="torch_npu", minimum="2.7"),),
)
VENDORS = (TORCH, CUDA_DEEPGEMM, CUTEDSL, ASCEND)
