"""Means over tokens and their standard errors."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from moe_core.evaluation import estimate_mean


def test_windows_of_one_size_are_draws_of_their_means() -> None:
    windows = torch.randn(7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = estimate_mean(list(windows))
    means = windows.mean(1).tolist()
    assert found.mean == pytest.approx(statistics.mean(means), rel=1e-12)
    assert found.standard_error == pytest.approx(statistics.stdev(means) / math.sqrt(7), rel=1e-12)


def test_a_short_last_window_counts_by_its_tokens() -> None:
    windows = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0])]
    found = estimate_mean(windows)
    mean = 11 / 4
    spread = 2 / 1 * ((6 - 3 * mean) ** 2 + (5 - mean) ** 2)
    assert found.mean == pytest.approx(mean)
    assert found.standard_error == pytest.approx(math.sqrt(spread) / 4)


def test_correlated_tokens_do_not_look_like_many_draws() -> None:
    generator = torch.Generator().manual_seed(2)
    shift = torch.randn(400, 1, generator=generator, dtype=torch.float64)
    values = shift + torch.randn(400, 64, generator=generator, dtype=torch.float64)
    # Variance of a window's mean: 1 of the shift, 1/64 of the tokens. The estimate of 400 draws scatters by 4 %.
    wanted = math.sqrt((1 + 1 / 64) / 400)
    assert estimate_mean(list(values)).standard_error == pytest.approx(wanted, rel=0.15)
    assert float(values.std()) / math.sqrt(values.numel()) < wanted / 4


def test_one_window_has_no_spread() -> None:
    found = estimate_mean([torch.tensor([True, False, True, True])])
    assert found.mean == 0.75
    assert found.standard_error is None
