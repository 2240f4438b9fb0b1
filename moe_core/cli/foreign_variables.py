"""Environment variables with which other projects choose MoE kernels, and what says the same here.

moe-core reads none of them but the one in `deprecated`; a user who moves here should hear that they are without effect.
Those that plugins' libraries read are part of the machine instead.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from moe_core.deprecated import BF16_DISPATCH_VARIABLE


@attrs.frozen
class ForeignVariable:
    """One variable that is set.

    Attributes:
        name: Its name.
        value: Its value.
        effect: What it decides where it is read.
        here: What to say to moe-core instead, or why there is nothing to say.
    """

    name: str
    value: str
    effect: str
    here: str


_A2A, _RUNNER = "a2a_backend=... or --a2a-backend", "runner_backend=... or --runner-backend"
#: Name -> what it decides, and what says it here.
KNOWN: dict[str, tuple[str, str]] = {
    BF16_DISPATCH_VARIABLE: ("tokens are sent in bf16", "deprecated: dispatch_dtype='bf16' or --dispatch-dtype bf16"),
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": ("tokens a dispatch takes", "Workload(max_tokens=...)"),
    "SGLANG_NPU_FUSED_MOE_MODE": ("which fused kernel runs", _RUNNER),
    "VLLM_ALL2ALL_BACKEND": ("who moves tokens", _A2A),
    "VLLM_USE_DEEP_GEMM": ("which FP8 GEMM runs", _RUNNER),
    "VLLM_USE_FLASHINFER_MOE_FP16": ("which kernel runs", _RUNNER),
    "VLLM_USE_FLASHINFER_MOE_FP8": ("which kernel runs", _RUNNER),
    "VLLM_USE_FLASHINFER_MOE_FP4": ("which kernel runs", _RUNNER),
    "VLLM_PLUGINS": ("which plugins are loaded", "MOE_CORE_PLUGINS"),
    "FLASHINFER_NVFP4_4OVER6": ("how NVFP4 scales are chosen", "not read: as the format defines them"),
}
#: Prefixes of projects that choose kernels by variables.
_PREFIXES = ("SGLANG_", "VLLM_", "TRTLLM_")


def foreign_variables(environ: Mapping[str, str]) -> list[ForeignVariable]:
    """Those that are set, by name; unknown ones of the same projects too, since their effect is missing here."""
    found = []
    for name in sorted(environ):
        if name in KNOWN:
            found.append(ForeignVariable(name, environ[name], *KNOWN[name]))
        elif name.startswith(_PREFIXES):
            found.append(ForeignVariable(name, environ[name], "another project's setting", "not read"))
    return found
