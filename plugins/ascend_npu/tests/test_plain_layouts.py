"""Weights that are no whole tiles: what the command line says of them, and that they are prepared like any others."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
import torch
from ascend_layers import A3, manager

from moe_core import LayerRequest, MoELayer
from moe_core.cli import main
from moe_core.quant import BF16, W4A4_INT4, W4A8_INT8, W8A8_INT8, QuantScheme
from moe_core.testing.compare import mismatch
from moe_core.testing.stored import draw_layer
from moe_core.testing.tolerance import tolerance


@pytest.mark.parametrize(("tp_size", "share"), [(1, 192), (2, 96), (3, 64), (4, 48), (6, 32), (8, 24)])
def test_the_command_line_says_whose_place_a_plain_kernel_takes(
    tp_size: int, share: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("moe_core.cli.resolve"), "default_manager", manager)
    words = ["resolve", "--environment", "ascend-a3", "--quant-scheme", "w8a8_int8", "--intermediate-size", "192"]
    printed = []
    for more in ([], ["--explain"], ["--strict"], ["--json"]):
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--tp-size", str(tp_size), *more])
        assert not stopped.value.code
        printed.append(capsys.readouterr().out)
    why = f"needs intermediate_size multiple_of 32, found intermediate_size {share}"
    note = f"ascend_npu:ascend.w8a8_nd stands in for ascend.w8a8: {why}"
    said = [note] if share % 32 else []
    assert [note in " ".join(out.split()) for out in printed] == [bool(said)] * 4
    (group,) = json.loads(printed[-1])["groups"]
    assert group["plan"]["notes"] == said
    assert [workload["notes"] for workload in group["decision"]["workloads"]] == [said]


@pytest.mark.parametrize("scheme", [BF16, W8A8_INT8, W4A8_INT8, W4A4_INT4], ids=str)
@pytest.mark.parametrize(("width", "layout"), [(64, "nz"), (72, "nd"), (128, "nz")])
def test_on_both_sides_of_the_edge_a_reload_is_a_fresh_load(scheme: QuantScheme, width: int, layout: str) -> None:
    request = LayerRequest(num_experts=3, top_k=2, hidden_size=64, intermediate_size=width, quant=scheme)
    reloaded, fresh = (MoELayer(request, environment=A3, manager=manager()) for _ in range(2))
    assert reloaded.plan.weight_layout.endswith(f"_{layout}")
    assert len(reloaded.plan.notes) == (layout == "nd")
    for seed in (1, 2):
        reloaded.load_weights(draw_layer(request, seed).raw(reloaded.local_experts, "cpu"))
    stored = draw_layer(request, 2)
    fresh.load_weights(stored.raw(fresh.local_experts, "cpu"))
    hidden = torch.randn(5, 64).to(torch.bfloat16)
    ids, weights = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [-1, 1]]), torch.rand(5, 2)
    output = reloaded(hidden, ids, weights)
    assert torch.equal(output, fresh(hidden, ids, weights))
    limit = tolerance(request, reloaded.plan.routes[0].token_dtype)
    assert mismatch(output, stored.reference(hidden, ids, weights), limit) is None
