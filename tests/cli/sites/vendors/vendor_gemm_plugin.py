"""Declares like a plugin over a CUDA library: two modes, two kernels, its own requirements."""

from __future__ import annotations

from moe_core.activation import ActivationPattern
from moe_core.hookspecs import hookimpl
from moe_core.quant import FP8_BLOCK128
from moe_core.specs import DispatcherSpec, PluginSpec, Requirement, RunnerSpec, Setting, TokenDtype

FP8 = TokenDtype("fp8", "row_128")
DEEP_EP = Requirement(module="deep_ep", install="build deep_ep from source")


def _dispatcher(mode: str, format_: str) -> DispatcherSpec:
    return DispatcherSpec(
        name="deepep",
        mode=mode,
        binder="vendor_gemm_plugin:bind",
        format=format_,
        sends=(FP8,),
        devices=("cuda",),
        archs=("sm90", "sm100"),
        requirements=(DEEP_EP,),
        settings=(Setting(values={"VENDOR_MODE": ("", "default")}, hint="unset it"),),
    )


def _runner(format_: str) -> RunnerSpec:
    return RunnerSpec(
        name="deep_gemm",
        kernel=format_,
        format=format_,
        reads=(FP8,),
        schemes=(FP8_BLOCK128,),
        activations=(ActivationPattern(),),
        dtypes=("bf16",),
        weight_layout="blocks",
        devices=("cuda",),
        archs=("sm90", "sm100"),
        tier="tuned",
    )


@hookimpl
def declare_backends() -> PluginSpec:
    return PluginSpec(
        name="cuda_vendor_gemm",
        hook_api=1,
        description="fp8 grouped GEMMs",
        dispatchers=[_dispatcher("normal", "contiguous"), _dispatcher("low_latency", "masked")],
        runners=[_runner("contiguous"), _runner("masked")],
        requirements=(Requirement(module="deep_gemm", minimum="2.5", install="build deep_gemm from source"),),
    )


@hookimpl
def process_weights_after_loading(plan: object, weights: object, out: object) -> None:
    raise NotImplementedError("declarations only")


@hookimpl
def fused_experts(plan: object, route: object, weights: object) -> None:
    raise NotImplementedError("declarations only")
