"""What is checked and timed: dispatchers, by what their layers are pinned to."""

from __future__ import annotations

from typing import Any

import attrs

from moe_core.quant import BF16, FP8_BLOCK128, QuantScheme


@attrs.frozen
class Contender:
    """A dispatcher whose layers are checked, and timed beside those of others and bare calls.

    Attributes:
        name: In what is printed.
        pins: Fields of its requests, also `workloads` if those of all others do not fit.
        forms: Of the layers that are checked: schemes of the weights, and `dispatch_dtype`. A layer with the first and
            one with the last alternate. Timed are bf16 layers.
    """

    name: str
    pins: dict[str, Any]
    forms: tuple[tuple[QuantScheme, str | None], ...] = ((BF16, None),)


DEEP_EP = Contender(
    "deepep",
    {"a2a_backend": "deepep", "runner_backend": "deep_gemm"},
    ((BF16, None), (FP8_BLOCK128, "bf16"), (FP8_BLOCK128, None)),
)
CONTENDERS = (DEEP_EP,)
