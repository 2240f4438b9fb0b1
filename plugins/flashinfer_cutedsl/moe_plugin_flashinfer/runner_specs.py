"""Declarations of runner `flashinfer_cutedsl`: NVFP4 experts on blocks of rows, and on tokens as they came.

Both read one checkpoint and want its weights in different layouts (see `prepared`): a plan whose routes would need both
is refused.
"""

from __future__ import annotations

import attrs

from moe_core.activation import ActivationPattern
from moe_core.quant import NVFP4, LayerQuant
from moe_core.specs import Limit, RunnerSpec, TokenDtype
from moe_plugin_flashinfer.machine import (
    ARCHS,
    CUTLASS_DSL,
    DEVICES,
    FLASHINFER,
    LATER_FLASHINFER,
    RUBIN_ARCHS,
)

_BF16 = TokenDtype("bf16")
_SWIGLU, _RELU2 = ActivationPattern(), ActivationPattern(kind="relu2", gated=False)
_HINT = "runner torch takes any size"

#: Weight layout of the kernels on blocks of rows: rows as they are stored, scales in tiles.
MASKED = "cutedsl_masked"
#: Weight layout of the kernels on tokens as they came: rows of up and gate by turns, scales in tiles.
WRAPPER = "cutedsl_wrapper"
#: Rows of a tile of scales; each expert's block begins at one.
ROW_ALIGNMENT = 128

_masked = RunnerSpec(
    name="flashinfer_cutedsl",
    kernel="masked",
    format="masked",
    reads=(TokenDtype("nvfp4", "block_16_tiled"), _BF16),
    schemes=(LayerQuant.of(NVFP4),),
    activations=(_SWIGLU, _RELU2),
    dtypes=("bf16",),
    devices=DEVICES,
    archs=ARCHS,
    weight_layout=MASKED,
    limits=(
        # Tiles of 128 rows and of 64 columns, of both matrices.
        Limit("hidden_size", "multiple_of", 128, _HINT),
        Limit("intermediate_size", "multiple_of", 64, _HINT),
    ),
    row_alignment=ROW_ALIGNMENT,
    requirements=(FLASHINFER, CUTLASS_DSL),
    graph_safe=True,
    # A tile of the result is computed by one multiprocessor, whatever else there is.
    deterministic=True,
    tier="tuned",
)
#: The second projection tells which experts are done; its kernel keeps a byte for each in one register.
_masked_overlap = attrs.evolve(
    _masked,
    kernel="masked_overlap",
    limits=(
        *_masked.limits,
        Limit("num_local_experts", "<=", 8, "without down_gemm_overlap masked serves; or more ranks"),
    ),
    down_gemm_overlap=True,
)
_wrapper = attrs.evolve(
    _masked,
    kernel="wrapper",
    format="standard",
    reads=(TokenDtype("nvfp4", "block_16"), _BF16),
    activations=(_SWIGLU,),
    weight_layout=WRAPPER,
    one_input_scale=True,
    row_alignment=1,
    # The slots of a token are added up by atomic additions, in any order.
    deterministic=False,
)
#: Rows first, then their sums in order. The release before takes the argument for it, and ignores it.
_two_stage = attrs.evolve(
    _wrapper, kernel="two_stage", requirements=(LATER_FLASHINFER, CUTLASS_DSL), deterministic=True, tier="generic"
)


def _rubin(runner: RunnerSpec) -> RunnerSpec:
    """The same on the generation that a later release has kernels for."""
    return attrs.evolve(
        runner, kernel=f"{runner.kernel}_rubin", archs=RUBIN_ARCHS, requirements=(LATER_FLASHINFER, CUTLASS_DSL)
    )


RUNNERS = (_masked, _masked_overlap, _wrapper, _two_stage, *map(_rubin, (_masked, _wrapper, _two_stage)))
#: Weight layout -> module with its `prepare(plan, weights, out)` and `bind(plan, route, weights)`.
LAYOUTS = {
    MASKED: "moe_plugin_flashinfer.experts_masked",
    WRAPPER: "moe_plugin_flashinfer.experts_wrapper",
}
