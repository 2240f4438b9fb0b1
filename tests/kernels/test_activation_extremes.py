"""Activations of any finite numbers, the largest and the smallest included, in torch and in Triton against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_core.activation import ActivationSpec
from moe_core.kernels.activation import activate as in_torch
from moe_core.payloads import Tensor
from moe_core.testing.reference import activate as exact

pytest.importorskip("triton", reason="needs triton")
from moe_core.kernels.triton.activation import activate_rows as in_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
#: Relative error: fp32 functions are right to some units in the last place, and the result is rounded once.
RELATIVE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
#: Of the gate: where a function is nearly zero, one less something is all that fp32 has of it.
ABSOLUTE = 1e-6
#: Columns of every example, so that a kernel is made once.
WIDTH = 256


def specs() -> st.SearchStrategy[ActivationSpec]:
    plain = st.builds(ActivationSpec, kind=st.sampled_from(KINDS), gated=st.just(False))
    limit = st.sampled_from([None, 7.0, 1e30])
    gated = st.builds(
        lambda limit, clamp, **more: ActivationSpec(limit=limit, clamp=clamp if limit else "before", **more),
        kind=st.sampled_from(KINDS),
        limit=limit,
        clamp=st.sampled_from(["before", "after"]),
        beta=st.sampled_from([0.0, 1.0]),
        row_order=st.sampled_from(["gate_up", "interleaved"]),
    )
    oai = st.builds(ActivationSpec, alpha=st.sampled_from([1.702, 0.25]), limit=limit, beta=st.just(1.0))
    return st.one_of(plain, gated, oai)


def _drawn(count: int, seed: int) -> Tensor:
    """`[1, count]` of every size that fp32 has, and as many of those where functions bend."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    near = torch.empty(count).uniform_(-110, 20, generator=generator)
    values = torch.where(torch.rand(count, generator=generator) < 0.5, bits.view(torch.float32), near)
    values[:: count // 8] = torch.tensor([0.0, -0.0, 3e38, -3e38, 65504.0, -88.0, 1e-45, -1e-40])
    values = values[torch.randperm(count, generator=generator)]
    return torch.where(values.isfinite(), values, 1e4)[None]


def _halves(h: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor]:
    """Sizes of what is activated, and of what multiplies it."""
    if not spec.gated:
        return h.abs(), torch.ones_like(h)
    gate, up = (h[:, 0::2], h[:, 1::2]) if spec.row_order == "interleaved" else h.tensor_split(2, dim=1)
    limit = math.inf if spec.limit is None else spec.limit
    return gate.abs(), up.abs().clamp(max=limit) + abs(spec.beta)


# NumPy, in which kernels are interpreted, warns of infinities.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("activate", [in_torch, in_triton], ids=["torch", "triton"])
@settings(max_examples=25, deadline=None)
@given(spec=specs(), seed=st.integers(0, 2**32))
# A large number times one below the normal ones.
@example(spec=ActivationSpec(kind="silu"), seed=0)
# A gate whose square exceeds fp32, times a small number; and one whose square is below it, times a large one.
@example(spec=ActivationSpec(kind="relu2"), seed=0)
@example(spec=ActivationSpec(kind="relu2", limit=1e30, beta=1.0, row_order="interleaved"), seed=1)
def test_no_finite_number_is_lost(
    activate: Callable[[Tensor, ActivationSpec], Tensor], dtype: torch.dtype, spec: ActivationSpec, seed: int
) -> None:
    drawn = _drawn(WIDTH * spec.rows_per_channel, seed)
    h = drawn.to(dtype).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    got, want = activate(h.to(DEVICE), spec).cpu().double(), exact(h.double(), spec)
    gate, up = _halves(h.double(), spec)
    least = torch.finfo(torch.float32).smallest_normal * (1.0 + up) + torch.finfo(dtype).smallest_normal
    allowed = RELATIVE[dtype] * want.abs() + ABSOLUTE * gate * up + least
    largest = torch.finfo(dtype).max
    # What may be rounded to either side of the largest number.
    fits, exceeds = want.abs() + allowed < largest / 2, want.abs() - allowed > largest
    assert (((got - want).abs() <= allowed) | ~fits).all()
    assert (got.isinf() | ~exceeds).all()
    assert not got.isnan().any()
