"""Input checks name the fault; they do not break a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_core.errors import InputError
from moe_core.kernels import checks
from moe_core.kernels.checks import check_ids, check_tokens, checked_slots, named_once


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_valid_ids_pass(dtype: torch.dtype) -> None:
    check_ids(torch.tensor([[0, 5], [-1, 3]], dtype=dtype), 6)
    check_ids(torch.empty(0, 2, dtype=dtype), 6)


@pytest.mark.parametrize("bad", [6, 1_000_000, -2])
def test_an_id_out_of_range_is_named_with_the_bound(bad: int) -> None:
    with pytest.raises(InputError, match=rf"{bad} .*num_experts is 6"):
        check_ids(torch.tensor([[0, bad]]), 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_ids_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="int32 or int64"):
        check_ids(torch.zeros(1, 2, dtype=dtype), 6)


def test_compiled_range_check_has_no_break_and_still_fires() -> None:
    def double(ids: torch.Tensor) -> torch.Tensor:
        check_ids(ids, 6)
        return ids * 2

    compiled = torch.compile(double, fullgraph=True)
    assert compiled(torch.tensor([[1, -1]])).tolist() == [[2, -2]]
    with pytest.raises(RuntimeError, match=r"-1\.\.5"):
        compiled(torch.tensor([[1, 6]]))


def test_what_can_be_checked_by_an_error_is_left_as_it_is() -> None:
    ids, weights = torch.tensor([[0, -1]]), torch.ones(1, 2)
    assert all(map(torch.equal, checked_slots(ids, weights, 2), (ids, weights)))
    with pytest.raises(InputError, match="2 is out of range"):
        checked_slots(ids + 2, weights, 2)


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(torch.int32, torch.bfloat16), (torch.int64, torch.float32)])
def test_where_no_error_can_be_raised_a_token_becomes_nan(
    dtype: torch.dtype, weight_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "ASSERTING", ())
    given = torch.tensor([[0, 4], [5, 1], [2, -2], [-1, 3], [-1, -1], [-1, 7]], dtype=dtype)
    ids, weights = checked_slots(given, torch.ones(6, 2, dtype=weight_dtype), 5)
    assert (ids.dtype, weights.dtype) == (dtype, weight_dtype)
    # The last one would have no expert left to bring its NaN.
    assert ids.tolist() == [[0, 4], [-1, 1], [2, -1], [-1, 3], [-1, -1], [0, -1]]
    assert weights.isnan().tolist() == [[word] * 2 for word in (False, True, True, False, False, True)]
    with pytest.raises(InputError, match="int32 or int64"):
        checked_slots(given.float(), weights, 5)


def test_a_token_that_repeats_an_id_becomes_nan() -> None:
    given = torch.tensor([[0, 1, 2], [3, 3, 1], [-1, -1, 2], [4, 0, 4], [2, 2, 2]])
    ids, weights = named_once(given, torch.ones(5, 3))
    assert ids.tolist() == [[0, 1, 2], [3, -1, 1], [-1, -1, 2], [4, 0, -1], [2, -1, -1]]
    assert weights.isnan().tolist() == [[word] * 3 for word in (False, True, False, True, True)]


def _arguments(**changes: Any) -> dict[str, Any]:
    given = {
        "hidden_states": torch.zeros(3, 8),
        "topk_ids": torch.zeros(3, 2).long(),
        "topk_weights": torch.zeros(3, 2),
    }
    expected = {"hidden_size": 8, "top_k": 2, "dtype": torch.float32, "device": torch.device("cpu")}
    return given | expected | changes


def test_matching_tokens_pass() -> None:
    check_tokens(**_arguments())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": torch.zeros(3, 7)}, r"hidden_states: expected shape \[T, 8\], got \[3, 7\]"),
        ({"hidden_states": torch.zeros(3, 8).half()}, "hidden_states: expected torch.float32"),
        ({"topk_ids": torch.zeros(4, 2).long()}, r"topk_ids: expected shape \[3, 2\]"),
        ({"topk_ids": torch.tensor(1)}, "topk_ids: expected shape"),
        ({"topk_ids": torch.zeros(3, 3).long()}, r"topk_ids: expected shape \[3, 2\], got \[3, 3\]"),
        ({"topk_ids": torch.zeros(3, 2, 1).long()}, "topk_ids: expected shape"),
        ({"topk_weights": torch.zeros(3, 1)}, "topk_weights: expected shape"),
        ({"topk_weights": torch.zeros(3, 2).long()}, "topk_weights: expected a floating dtype"),
        ({"topk_ids": torch.zeros(3, 2, device="meta").long()}, "topk_ids: expected device cpu"),
        ({"topk_weights": torch.zeros(3, 2, device="meta")}, "topk_weights: expected device cpu of hidden_states"),
        ({"device": torch.device("meta")}, "hidden_states: expected device meta of the weights, got cpu"),
    ],
)
def test_each_fault_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_tokens(**_arguments(**changes))
