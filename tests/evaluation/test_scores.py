"""Log-likelihoods and divergences against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from moe_core.evaluation import divergences, log_likelihoods, same_top, scores

#: Sums of a few terms of order one in float64.
EXACT = 1e-13


def _two_tokens(odds: list[float]) -> torch.Tensor:
    """Logits of a two-token vocabulary, an arbitrary constant added to each row."""
    constants = torch.tensor([0.0, 3.5, -700.0], dtype=torch.float64)[: len(odds)]
    return torch.stack([constants, constants + torch.tensor(odds, dtype=torch.float64)], dim=1)


def test_log_likelihood_is_that_of_a_logistic_function() -> None:
    odds, targets = [0.25, -1.5, 4.0], torch.tensor([1, 0, 1])
    wanted = [-math.log1p(math.exp(-0.25)), -math.log1p(math.exp(-1.5)), -math.log1p(math.exp(-4.0))]
    assert log_likelihoods(_two_tokens(odds), targets).tolist() == pytest.approx(wanted, abs=EXACT)


def test_divergence_is_that_of_two_coins() -> None:
    p, q = [0.5, 0.9, 0.2], [0.9, 0.5, 0.2]
    reference, model = (_two_tokens([math.log(x / (1 - x)) for x in probabilities]) for probabilities in (p, q))
    wanted = [a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in zip(p, q, strict=True)]
    # 700 was added to a row: its logits are exact to 1e-13 only.
    assert divergences(reference, model).tolist() == pytest.approx(wanted, abs=1e-12)
    assert wanted[0] > wanted[1] + 0.1, "this test could not tell the two directions apart"


def test_a_small_divergence_is_half_the_variance_of_the_logits_difference() -> None:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(5, 200, generator=generator, dtype=torch.float64) * 3
    shift = torch.randn(5, 200, generator=generator, dtype=torch.float64) * 1e-5
    p = reference.softmax(-1)
    variance = (p * shift.square()).sum(-1) - (p * shift).sum(-1).square()
    # The next term of the series is smaller by the size of the shift; the sum rounds at 1e-16.
    assert divergences(reference, reference + shift).tolist() == pytest.approx((variance / 2).tolist(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_dtype_are_taken_as_they_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    model, reference = (torch.randn(4, 50, generator=generator).mul(8).to(dtype) for _ in range(2))
    targets = torch.tensor([0, 7, 49, 3])
    assert divergences(reference, model).equal(divergences(reference.double(), model.double()))
    assert log_likelihoods(model, targets).equal(log_likelihoods(model.double(), targets))
    assert log_likelihoods(model, targets).dtype == torch.float64


def test_tokens_that_the_reference_excludes_count_nothing() -> None:
    never = -torch.inf
    reference = torch.tensor([[0.0, 0.0, never], [0.0, 0.0, never]])
    model = torch.tensor([[0.0, 0.0, never], [0.0, 0.0, 0.0]])
    assert divergences(reference, model).tolist() == pytest.approx([0.0, math.log(1.5)], abs=EXACT)
    assert divergences(model, reference)[1] == torch.inf


def test_rows_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    model, reference = (torch.randn(11, 30, generator=generator) for _ in range(2))
    targets = torch.randint(30, (11,), generator=generator)
    whole = log_likelihoods(model, targets), divergences(reference, model)
    monkeypatch.setattr(scores, "_NUMBERS_AT_A_TIME", 100)
    parts = log_likelihoods(model, targets), divergences(reference, model)
    for one, other in zip(whole, parts, strict=True):
        assert one.shape == (11,)
        assert torch.allclose(one, other, rtol=0, atol=EXACT)


def test_same_top() -> None:
    reference = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    assert same_top(reference, torch.tensor([[0.0, 9.0, 8.0], [0.0, 9.0, 8.0]])).tolist() == [True, False]
