"""Declarations of the fused runner `fuseep`: dispatch, both GEMMs and combine in one call of Ascend's DeepEP.

A plan with it has no dispatcher. Two operators hide behind one function, each with its own weight layout, its own
limits and its own meaning of the capacity. Both are declared for int8 weights with int8 activations and plain SwiGLU on
A3, and for nothing else: given anything else they would compute something else, without a word.

Source: document of `fused_deep_moe` in sgl-kernel-npu (August 2026).
"""

from __future__ import annotations

from moe_core.activation import ActivationPattern
from moe_core.quant import W8A8_INT8
from moe_core.specs import Limit, RunnerSpec, TokenDtype
from moe_plugin_ascend import variables
from moe_plugin_ascend.deepep_specs import DEEP_EP
from moe_plugin_ascend.machine import DEVICES

#: Weight layout -> `fuse_mode` of the library.
FUSE_MODES = {"ascend_fuseep_1": 1, "ascend_fuseep_2": 2}

#: Weight layout -> module with its `prepare`; its `bind` takes the group besides, so that the hook calls it by itself.
LAYOUTS = dict.fromkeys(FUSE_MODES, "moe_plugin_ascend.fuseep")

_CHUNKS = "send the tokens in chunks"
#: Of both operators: experts, a transport, and rows of 32 bytes, in which int8 weights are stored.
_COMMON = (
    Limit("num_experts", "<=", 512),
    Limit("ep_size", ">=", 2, "say how many expert-parallel ranks there are; one has nothing to fuse"),
    Limit("hidden_size", "<=", 7168),
    Limit("hidden_size", "multiple_of", 32),
)
_LIMITS = {
    1: (
        *_COMMON,
        Limit("max_tokens", "<=", 256, _CHUNKS),
        Limit("hidden_size", ">=", 512),
        # 2I, of gate and up together, is 1024 to 6144 in steps of 128.
        Limit("intermediate_size", ">=", 512),
        Limit("intermediate_size", "<=", 3072, "fuseep.mode2 takes more"),
        Limit("intermediate_size", "multiple_of", 64),
        Limit("top_k", "<=", 12),
    ),
    # Its own limits are not documented; these are of the low-latency buffer that it runs on.
    2: (
        *_COMMON,
        Limit("max_tokens", "<=", 512, _CHUNKS),
        Limit("intermediate_size", "multiple_of", 32),
        Limit("top_k", "<=", 16),
    ),
}


def _fuseep(layout: str, mode: int) -> RunnerSpec:
    return RunnerSpec(
        name="fuseep",
        kernel=f"mode{mode}",
        format="fused",
        a2a="ascend_fuseep",
        # It rounds the tokens itself.
        reads=(TokenDtype("bf16"),),
        schemes=(W8A8_INT8,),
        activations=(ActivationPattern(),),
        dtypes=("bf16",),
        weight_layout=layout,
        token_placements=("distributed",),
        id_space="global",
        devices=DEVICES,
        archs=("a3",),
        limits=_LIMITS[mode],
        requirements=(DEEP_EP,),
        settings=variables.EXPECTED,
        buffer_sizes=(variables.FUSED[mode],),
        phases=("any", "decode", "verify"),
        # Below the grouped GEMMs, so that it runs where it is asked for: mode 1 takes few tokens, and a request may
        # leave open how many it has; mode 2 carries sums times weight scales in fp16, which large weights exceed.
        tier="generic" if mode == 1 else "reference",
    )


RUNNERS = tuple(_fuseep(layout, mode) for layout, mode in FUSE_MODES.items())
