"""Every token is predicted once, with the context that was promised."""

from __future__ import annotations

import pytest

from moe_core.errors import SpecError
from moe_core.evaluation import cut_windows


@pytest.mark.parametrize("num_tokens", [2, 3, 7, 8, 9, 15, 16, 17, 40])
@pytest.mark.parametrize("stride", [1, 3, 7])
def test_overlapping_windows_predict_every_token_but_the_first_once(num_tokens: int, stride: int) -> None:
    windows = cut_windows(num_tokens, 8, stride)
    targets = [token for window in windows for token in range(window.first_target, window.stop)]
    assert targets == list(range(1, num_tokens))
    assert all(window.stop - window.start <= 8 for window in windows)
    assert all(window.first_target - window.start >= 8 - stride for window in windows[1:])


def test_windows_side_by_side_do_not_predict_their_first_tokens() -> None:
    windows = cut_windows(11, 4, 4)
    assert [(window.start, window.first_target, window.stop) for window in windows] == [
        (0, 1, 4),
        (4, 5, 8),
        (8, 9, 11),
    ]


def test_a_last_window_of_one_token_predicts_nothing() -> None:
    assert len(cut_windows(9, 4, 4)) == 2
    assert [(window.first_target, window.stop) for window in cut_windows(9, 4, 3)] == [(1, 4), (4, 7), (7, 9)]


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10, 1, 1), "a window of 1 token p"),
        ((10, 4, 0), r"stride 0 is not in 1\.\.4"),
        ((10, 4, 5), r"stride 5 is not in 1\.\.4"),
        ((1, 4, 4), "the text has 1 token;"),
        ((0, 4, 4), "the text has 0 tokens"),
    ],
)
def test_sizes_that_make_no_sense(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        cut_windows(*sizes)
