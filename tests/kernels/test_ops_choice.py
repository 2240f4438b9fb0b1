"""Which implementation the common door opens to."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from moe_core.kernels import ops


class _OnGpu:
    """As much of a tensor as the choice looks at."""

    is_cuda = True


@pytest.fixture
def _forget() -> None:
    ops._has_triton.cache_clear()


@pytest.mark.usefixtures("_forget")
@pytest.mark.parametrize("installed", [True, False])
def test_gpus_use_triton_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert ops._uses_triton(_OnGpu()) is installed  # type: ignore[arg-type]
    assert not ops._uses_triton(torch.zeros(1))
    ops._has_triton.cache_clear()


def test_compiled_code_is_torch() -> None:
    x, ids, weights = torch.randn(5, 8), torch.randint(-1, 3, (5, 2)), torch.rand(5, 2)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        tokens, row_map = ops.permute_masked(x, ids, 3, 10, row_weights=weights)
        contiguous, place = ops.permute_contiguous(x, ids, 3, alignment=4)
        return ops.combine(tokens.hidden_states, row_map, None, torch.float32) + ops.combine(
            contiguous.hidden_states, place, weights, torch.float32
        )

    got = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, there_and_back(x))
