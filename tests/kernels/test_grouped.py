"""On a CPU: which products are made in one batch, and that it gives what the other ways give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch

from moe_core.activation import ActivationSpec
from moe_core.kernels import grouped
from moe_core.kernels.activation import activation_function
from moe_core.kernels.expert_weights import ExpertLinear, Experts
from moe_core.kernels.experts import experts_standard
from moe_core.quant import BF16

_BF16 = torch.bfloat16
_SWIGLU = ActivationSpec()


@pytest.fixture(autouse=True)
def _fast_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that multiplies bf16, wherever the tests run."""
    monkeypatch.setitem(grouped.HAS_FAST_GEMM, _BF16, True)
    monkeypatch.setattr(grouped, "_GROUPED_GEMM_ROWS", 64)


def _experts(params: dict[str, Any], *, deterministic: bool = False) -> Experts:
    w13, w2 = (ExpertLinear.of(BF16, params[f"w{n}"], bias=params.get(f"b{n}")) for n in ("13", "2"))
    return Experts(w13=w13, w2=w2, activation=activation_function(_SWIGLU), deterministic=deterministic)


def _counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[torch.Tensor]:
    """The results of a function of torch, which goes on as before."""
    results: list[torch.Tensor] = []
    function: Callable[..., torch.Tensor] = getattr(owner, name)

    def counted(*arguments: Any, **more: Any) -> torch.Tensor:
        results.append(function(*arguments, **more))
        return results[-1]

    monkeypatch.setattr(owner, name, counted)
    return results


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_batch_gives_what_the_grouped_gemm_gives(bias: bool, missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    params = oracle.make_params(6, 32, 24, _BF16, bias=bias)
    x, ids, weights = oracle.make_tokens(19, 32, 6, 3, _BF16)
    if missing:
        ids[3], ids[:, 1] = -1, -1
    batches = _counted(monkeypatch, torch, "bmm")
    got = experts_standard(x, ids, weights, _experts(params))
    most = int(torch.bincount(ids[ids >= 0], minlength=6).max())
    assert [tuple(batch.shape) for batch in batches] == [(6, most, 48), (6, most, 32)]
    assert oracle.relative_error(got, oracle.layer(x, ids, weights, params, _SWIGLU)) < oracle.TOLERANCE[_BF16]
    monkeypatch.setattr(grouped, "_BYTES_TO_BEGIN", 0)
    calls = _counted(monkeypatch, torch.nn.functional, "grouped_mm")
    assert oracle.relative_error(experts_standard(x, ids, weights, _experts(params)), got) < oracle.TOLERANCE[_BF16]
    assert (len(batches), len(calls)) == (2, 2)


def test_an_expert_without_rows_and_undefined_memory_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    params = oracle.make_params(6, 32, 24, _BF16, bias=True)
    for tensor in params.values():
        tensor[5] = torch.nan
    new_empty = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *size: Any, **more: Any) -> torch.Tensor:
        out = new_empty(self, *size, **more)
        return out.fill_(torch.nan if out.is_floating_point() else -1)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    batches = _counted(monkeypatch, torch, "bmm")
    x, ids, weights = oracle.make_tokens(19, 32, 5, 3, _BF16)
    got = experts_standard(x, ids, weights, _experts(params))
    assert len(batches) == 2
    assert oracle.relative_error(got, oracle.layer(x, ids, weights, params, _SWIGLU)) < oracle.TOLERANCE[_BF16]


def test_a_deterministic_layer_makes_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = _counted(monkeypatch, torch, "bmm")
    params, tokens = oracle.make_params(6, 32, 24, _BF16), oracle.make_tokens(19, 32, 6, 3, _BF16)
    experts_standard(*tokens, _experts(params, deterministic=True))
    assert not batches


@pytest.mark.parametrize(
    ("sizes", "num_experts", "shape", "pays"),
    [
        ([16] * 8, 8, (64, 64), True),
        ([16] * 8, 8, (512, 512), True),
        # Reading the weights is what takes the time, and filling up costs more than beginnings.
        ([16, 40, 10, 8, 20, 12, 12, 10], 8, (1536, 2048), False),
        # Three products do not pay for the steps around a batch, nor do any number of single rows.
        ([5, 5, 5], 8, (64, 64), False),
        ([1] * 100, 128, (64, 64), False),
        # Weights of experts without rows would be read.
        ([4] * 16, 128, (64, 64), True),
        ([4] * 16, 128, (256, 256), False),
        # So many rows take longer to copy than products to begin.
        ([256] * 8, 8, (256, 256), False),
        # One expert has nearly all rows, and the others' would be filled up.
        ([2000, 2, 2, 2, 2, 2, 2, 2], 8, (64, 64), False),
    ],
)
def test_what_pays_as_a_batch(sizes: list[int], num_experts: int, shape: tuple[int, int], pays: bool) -> None:
    weight = torch.empty(num_experts, *shape, dtype=_BF16, device="meta")
    assert grouped._pays_as_batch(sizes, weight) is pays


def test_without_a_fast_gemm_nothing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grouped.HAS_FAST_GEMM, _BF16, False)
    assert not grouped._pays_as_batch([16] * 8, torch.empty(8, 64, 64, dtype=_BF16))
