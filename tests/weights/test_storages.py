"""The words in which stored tensors are described."""

from __future__ import annotations

import pytest

from moe_core.errors import SpecError
from moe_core.weights.storages import StoredTensor


@pytest.mark.error_path
@pytest.mark.parametrize("fields", [{"role": "wieght"}, {"role": "weight", "packed": "colums"}], ids=str)
def test_stored_tensors_are_said_in_known_words(fields: dict[str, str]) -> None:
    with pytest.raises(SpecError, match=r"is not one of .*; did you mean"):
        StoredTensor(suffixes=("weight",), **fields)  # type: ignore[arg-type]
