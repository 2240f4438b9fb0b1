"""Declarations of runner `deep_gemm`: DeepGEMM's grouped GEMMs on rows grouped by expert, and on blocks of rows."""

from __future__ import annotations

import attrs

from moe_core.activation import ActivationPattern
from moe_core.quant import BF16, FP8_BLOCK128, FP8_BLOCK128_UE8M0, LayerQuant
from moe_core.specs import Limit, RunnerSpec, TokenDtype
from moe_core.vocabulary import CANONICAL
from moe_plugin_deepgemm.machine import DEEP_GEMM, DEVICES, UNVERIFIED_ARCHS, VERIFIED_ARCHS

_FORMATS = ("contiguous", "masked")
_BF16 = TokenDtype("bf16")

#: Any formula between the projections, and a model's own: the blocks of the core compute it.
_ACTIVATIONS = (
    ActivationPattern(kind="any", gated=None, parameters=True, interleaved=True),
    ActivationPattern(kind="module", gated=None, parameters=True, interleaved=True),
)
#: Rows of a tile. Contiguous groups begin at one; a block of rows whose end is inside a tile would be written past it.
ROW_ALIGNMENT = 128
#: Weight layout of fp8 on Blackwell: canonical weights beside packed scales.
UE8M0 = "deepgemm_ue8m0"


def _multiples(size: int) -> tuple[Limit, ...]:
    hint = "runner triton takes other sizes"
    return tuple(Limit(field, "multiple_of", size, hint) for field in ("hidden_size", "intermediate_size"))


def _bf16(format_: str) -> RunnerSpec:
    return RunnerSpec(
        name="deep_gemm",
        kernel=f"bf16_{format_}",
        format=format_,
        reads=(_BF16,),
        schemes=(LayerQuant.of(BF16),),
        activations=_ACTIVATIONS,
        dtypes=("bf16",),
        devices=DEVICES,
        archs=VERIFIED_ARCHS,
        # Read as they are, so that routes of runners torch and triton may share them.
        weight_layout=CANONICAL,
        limits=_multiples(64),
        weight_on_input=True,
        post_norm=True,
        row_alignment=ROW_ALIGNMENT,
        graph_safe=True,
        requirements=(DEEP_GEMM,),
        tier="tuned",
    )


def _fp8(format_: str) -> RunnerSpec:
    """Weights with scales of 128 x 128, tokens and what lies between the projections with scales of 128 channels."""
    return attrs.evolve(
        _bf16(format_),
        kernel=f"fp8_{format_}",
        reads=(TokenDtype("fp8", "column_128"), TokenDtype("fp8", "row_128"), _BF16),
        schemes=(LayerQuant.of(FP8_BLOCK128),),
        limits=_multiples(128),
    )


def _unverified(runner: RunnerSpec) -> RunnerSpec:
    """The same on Blackwell, ranked behind what was run somewhere; its scales are packed powers of two."""
    blackwell = attrs.evolve(runner, kernel=f"{runner.kernel}_unverified", archs=UNVERIFIED_ARCHS, tier="generic")
    if len(runner.reads) == 1:
        return blackwell
    return attrs.evolve(
        blackwell,
        reads=(TokenDtype("fp8", "ue8m0_128"), _BF16),
        schemes=(LayerQuant.of(FP8_BLOCK128_UE8M0),),
        weight_layout=UE8M0,
    )


_VERIFIED = (*map(_bf16, _FORMATS), *map(_fp8, _FORMATS))
RUNNERS = (*_VERIFIED, *map(_unverified, _VERIFIED))
#: Weight layout -> module with its `prepare(plan, weights, out)` and `bind(plan, route, weights)`.
LAYOUTS = dict.fromkeys((CANONICAL, UE8M0), "moe_plugin_deepgemm.experts")
