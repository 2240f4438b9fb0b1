"""Every built-in activation variant against its formula in float64."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch

from moe_core.activation import ActivationSpec
from moe_core.errors import SpecError
from moe_core.kernels.activation import activation_function

_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
_GATED = [
    ActivationSpec(kind=kind, limit=limit, beta=beta, clamp=clamp, row_order=order)
    for kind, (limit, clamp), beta, order in itertools.product(
        _KINDS, ((None, "before"), (0.8, "before"), (0.8, "after")), (0.0, 1.0), ("gate_up", "interleaved")
    )
]
_VARIANTS = [
    *_GATED,
    *(ActivationSpec(kind=kind, gated=False) for kind in _KINDS),
    ActivationSpec(alpha=1.702, gated=False),
    ActivationSpec(alpha=1.702, limit=0.7, beta=1.0, row_order="interleaved"),
]
#: One rounding of the result (half of one unit in the last place), plus fp32 exponentials.
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: Of `1 + erf` in torch's vectorised gelu on CPU, which is near 0 where its terms are not: the polynomial 7.1.26 of
#: Abramowitz and Stegun is exact to 1.5e-7, and is evaluated in fp32. Four million values below 0 show 5.3e-7.
_ERF_ERROR = 6e-7


@pytest.mark.parametrize("dtype", _ROUNDING)
@pytest.mark.parametrize("spec", _VARIANTS, ids=str)
def test_variant_equals_its_formula(spec: ActivationSpec, dtype: torch.dtype) -> None:
    h = (torch.randn(5, 26) * 2).to(dtype)
    before = h.clone()
    got = activation_function(spec)(h)
    want = oracle.activate(h.double(), spec)
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert bool(((got.double() - want).abs() <= _ROUNDING[dtype] * want.abs() + _absolute(h.double(), spec)).all())
    assert torch.equal(h, before)


def _absolute(h: torch.Tensor, spec: ActivationSpec) -> torch.Tensor | float:
    """Error of each element beside its rounding."""
    if spec.kind != "gelu":
        return 1e-6
    if not spec.gated:
        return 1e-6 + _ERF_ERROR * h.abs() / 2
    gate, up = (h[:, 0::2], h[:, 1::2]) if spec.row_order == "interleaved" else h.chunk(2, dim=-1)
    if spec.limit is not None:
        up = up.clamp(-spec.limit, spec.limit)
    return 1e-6 + _ERF_ERROR * (gate * (up + spec.beta)).abs() / 2


def test_gate_is_not_clamped_from_below() -> None:
    spec = ActivationSpec(kind="silu", limit=0.5)
    got = activation_function(spec)(torch.tensor([[-3.0, 0.4]]))
    assert float(got) == pytest.approx(-3.0 / (1 + torch.e**3) * 0.4, rel=1e-6)


@pytest.mark.parametrize("kind", ["module", "any"])
def test_kinds_without_a_function_are_refused(kind: str) -> None:
    with pytest.raises(SpecError, match=kind):
        activation_function(ActivationSpec(kind=kind))
