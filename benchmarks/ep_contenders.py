"""What is checked and timed: dispatchers, by what their layers are pinned to."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from moe_core.quant import BF16, FP8_BLOCK128, QuantScheme


@attrs.frozen
class Contender:
    """A dispatcher whose layers are checked, and timed beside those of others and bare calls.

    Attributes:
        name: In what is printed.
        pins: Fields of its requests.
        forms: Of the layers that are checked: schemes of the weights, and `dispatch_dtype`. A layer with the first and
            one with the last alternate. Timed are bf16 layers.
    """

    name: str
    pins: dict[str, Any]
    forms: tuple[tuple[QuantScheme, str | None], ...]


DEEP_EP = Contender(
    "deepep",
    {"a2a_backend": "deepep", "runner_backend": "deep_gemm"},
    ((BF16, None), (FP8_BLOCK128, "bf16"), (FP8_BLOCK128, None)),
)
_FORMS = ((BF16, None), (FP8_BLOCK128, None))
PEER_MEMORY = Contender(
    "peer_memory, triton", {"a2a_backend": "peer_memory.standard", "runner_backend": "triton"}, _FORMS
)
PEER_MEMORY_DEEP_GEMM = Contender(
    "peer_memory, deep_gemm", {"a2a_backend": "peer_memory", "runner_backend": "deep_gemm"}, _FORMS
)
#: On a CPU kernels in Triton would be interpreted, which takes minutes.
CONTENDERS = (DEEP_EP, PEER_MEMORY, PEER_MEMORY_DEEP_GEMM) if torch.cuda.is_available() else (DEEP_EP,)
