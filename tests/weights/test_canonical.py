from __future__ import annotations

import pytest
import torch

from moe_core.errors import WeightsError
from moe_core.weights.canonical import canonical_weights


def test_everything_about_rows_follows_the_rows() -> None:
    rows = torch.arange(8.0)
    stored = {
        "w13": rows[None, :, None].expand(2, 8, 3),
        "b13": rows.expand(2, 8),
        "w13_scale": rows.expand(2, 8),
        "w13_zero_point": rows[None, :, None].expand(2, 8, 2),
        "w13_global_scale": torch.tensor([[1.0, 2.0]]).expand(2, 2),
        "w13_input_scale": torch.ones(2),
    }
    swapped = canonical_weights(stored, layout="up_gate")
    for name in ("w13", "b13", "w13_scale", "w13_zero_point"):
        assert swapped[name][0].reshape(8, -1)[:, 0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert swapped["w13_global_scale"].tolist() == [[2.0, 1.0]] * 2
    sorted_rows = canonical_weights(stored, layout="interleaved")
    for name in ("w13", "b13", "w13_scale", "w13_zero_point"):
        assert sorted_rows[name][0].reshape(8, -1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert sorted_rows["w13_global_scale"].tolist() == [[1.0, 2.0]] * 2
    assert swapped["w13_input_scale"] is stored["w13_input_scale"]


@pytest.mark.parametrize("layout", ["up_gate", "interleaved"])
def test_rows_in_a_new_order_need_no_second_copy(layout: str) -> None:
    assert canonical_weights({"w13": torch.zeros(2, 8, 3)}, layout=layout)["w13"].is_contiguous()


@pytest.mark.error_path
@pytest.mark.parametrize("layout", ["up_gate", "interleaved"])
@pytest.mark.parametrize("name", ["w13_scale", "w13_zero_point"])
def test_tiles_of_rows_need_their_size(layout: str, name: str) -> None:
    # Two tiles: of the halves, or one over the end of the gate.
    with pytest.raises(WeightsError, match=r"cannot be reordered from .* use moe_core.weights.loading.cut"):
        canonical_weights({"w13": torch.zeros(2, 8, 3), name: torch.zeros(2, 2, 1)}, layout=layout)


def test_scales_alone_are_put_in_order() -> None:
    # Which tensor is missing is for the loader to say.
    rows = torch.arange(8.0)[None, :, None]
    assert canonical_weights({"w13_scale": rows}, layout="up_gate")["w13_scale"].flatten().tolist()[:4] == [4, 5, 6, 7]
