"""The page about the blocks: its code runs, and gives the layer that it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from moe_core.kernels import ops
from moe_core.payloads import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def _weights(experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    codes = torch.randn(experts, rows, columns).mul_(60).to(torch.float8_e4m3fn)
    return codes, torch.rand(experts, rows // 128, columns // 128) / 1000 + 1e-4


def _meaning(weights: tuple[Tensor, Tensor]) -> Tensor:
    codes, scales = weights
    return codes.double() * scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


def test_the_page_runs() -> None:
    names: dict[str, Any] = {}
    text = PAGE.read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(code, names)
    w13, w2 = _weights(4, 512, 256), _weights(4, 256, 256)
    x, weights = torch.randn(9, 256).bfloat16(), torch.rand(9, 2)
    ids = torch.randint(-1, 3, (9, 2))
    got = names["layer"](x, ids, weights, w13, w2)
    want = torch.zeros(9, 256, dtype=torch.float64)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = ids[token, slot]
        gate, up = (_meaning(w13)[expert] @ x[token].double()).chunk(2)
        down = _meaning(w2)[expert] @ (torch.nn.functional.silu(gate) * up)
        want[token] += weights[token, slot].double() * down
    error = (got.double() - want).norm() / want.norm()
    # Tokens and the activation are rounded to three fraction bits: 2**-4 at most and about a third of it on average.
    assert error < 0.05
    listed = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    public = {name for name, value in vars(ops).items() if callable(value) and value.__module__ == ops.__name__}
    assert listed == {name for name in public if not name.startswith("_")}
