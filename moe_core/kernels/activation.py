"""The element-wise function between the GEMMs, built once from its spec."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from moe_core.activation import ActivationSpec
from moe_core.errors import SpecError
from moe_core.kernels.real_rows import map_rows
from moe_core.payloads import ActivationFn, Tensor


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def _silu_alpha(x: Tensor, alpha: float) -> Tensor:
    return torch.sigmoid(x * alpha).mul_(x)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": _relu2,
}


def activation_function(spec: ActivationSpec) -> ActivationFn:
    """The function of one variant: `[rows, 2I]` (`[rows, I]` when not gated) -> contiguous `[rows, I]`, same dtype.

    Half precision inputs are computed in fp32 and rounded once, which is closer to the exact value than computing
    in the layer's dtype; the input is not written.

    Raises:
        SpecError: `module` (that callable comes with the weights) or `any`.
    """
    if spec.kind not in _FUNCTIONS:
        raise SpecError(f"activation kind {spec.kind!r} has no built-in function; known: {', '.join(_FUNCTIONS)}")
    function = _FUNCTIONS[spec.kind] if spec.alpha == 1.0 else partial(_silu_alpha, alpha=spec.alpha)
    return partial(_gated, function=function, spec=spec) if spec.gated else partial(_plain, function=function)


def activate(hidden: Tensor, spec: ActivationSpec, *, real: Tensor | None = None) -> Tensor:
    """As `ops.activate`."""
    return map_rows(activation_function(spec), hidden, hidden.shape[-1] // spec.rows_per_channel, real)


def _plain(x: Tensor, *, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(_wide(x)).to(x.dtype).contiguous()


def _gated(x: Tensor, *, function: Callable[[Tensor], Tensor], spec: ActivationSpec) -> Tensor:
    wide = _wide(x)
    gate, up = (wide[:, 0::2], wide[:, 1::2]) if spec.row_order == "interleaved" else wide.chunk(2, dim=-1)
    if spec.limit is not None:
        if spec.clamp == "before":
            gate = gate.clamp(max=spec.limit)
        up = up.clamp(-spec.limit, spec.limit)
    if spec.beta != 0.0:
        up = up + spec.beta
    if spec.kind == "relu2" and spec.clamp == "before":
        # The square alone may exceed fp32 beside an up half that is small.
        root = functional.relu(gate)
        return (root * up).mul_(root).to(x.dtype).contiguous()
    value = function(gate)
    if spec.limit is not None and spec.clamp == "after":
        value = value.clamp(max=spec.limit)
    return value.mul_(up).to(x.dtype).contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
