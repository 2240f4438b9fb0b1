"""Declares like a plugin that runs on one newer device generation only."""

from __future__ import annotations

from moe_core.activation import ActivationPattern
from moe_core.hookspecs import hookimpl
from moe_core.quant import NVFP4
from moe_core.specs import PluginSpec, RunnerSpec, TokenDtype


@hookimpl
def declare_backends() -> PluginSpec:
    runner = RunnerSpec(
        name="flashinfer_cutedsl",
        kernel="masked",
        format="masked",
        reads=(TokenDtype("nvfp4", "block_16"),),
        schemes=(NVFP4,),
        activations=(ActivationPattern(),),
        dtypes=("bf16",),
        weight_layout="fp4",
        devices=("cuda",),
        archs=("sm100", "sm103"),
    )
    return PluginSpec(name="cuda_vendor_fp4", hook_api=1, description="fp4 grouped GEMMs", runners=[runner])


@hookimpl
def process_weights_after_loading(plan: object, weights: object, out: object) -> None:
    raise NotImplementedError("declarations only")


@hookimpl
def fused_experts(plan: object, route: object, weights: object) -> None:
    raise NotImplementedError("declarations only")
