"""The functions of `benchmarks/accuracy.py` on a tiny random model; the figures of the trained one are in the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accuracy
import accuracy_routing
import pytest
import torch
from accuracy import Text
from accuracy_models import CONTROLS, OracleExperts, fake_quantize, oracle, use_oracle
from accuracy_routing import measure_routing
from tiny_models import tiny_qwen

from moe_core.evaluation import Window, compare, cut_windows
from moe_core.quantizer.words import WRITABLE

BOTH = [(scheme, ecosystem) for scheme, ecosystems in WRITABLE.items() for ecosystem in ecosystems]
#: Bits per weight of every scheme on experts of 256 x 192: codes and scales, a few numbers per row, group or tile.
BITS = {
    "fp8_block128": (8, 8.1),
    "w8a8_int8": (8, 8.5),
    "w4a8_int8": (4, 8),
    "w4a4_int4": (8, 8.5),
    "nvfp4": (4.5, 4.6),
    "mxfp4_w4a16": (4.25, 4.26),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts matter: their weights are large, and differ in size from channel to channel."""
    model = tiny_qwen(hidden_size=256, moe_intermediate_size=192, head_dim=32, initializer_range=0.05)
    for layer in model.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            weight.data.mul_(torch.rand(weight.shape[-1]) * 3)
    target = tmp_path_factory.mktemp("model")
    model.bfloat16().save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def content() -> bytes:
    return bytes(torch.randint(256, (400,), generator=torch.Generator().manual_seed(1)).tolist())


@pytest.fixture(scope="module")
def text(content: bytes) -> Text:
    return Text(ids=list(content), windows=cut_windows(len(content), 100, 100))


@pytest.fixture(scope="module")
def inputs(folder: Path, content: bytes) -> Any:
    return accuracy.calibrated(folder, content)


def _fp32(folder: Path) -> Any:
    return accuracy._eager(folder, torch.float32)


def test_oracle_experts_of_no_scheme_are_eager_ones(folder: Path, text: Text) -> None:
    model = _fp32(folder)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        layer.mlp.experts = OracleExperts(oracle.quantize_layer(experts.gate_up_proj, experts.down_proj))
    found = compare(accuracy._logits(model), accuracy._logits(_fp32(folder)), text.ids, text.windows)
    # fp32 against float64 sums: logits of order one differ by 1e-6, and the divergence is half the square.
    assert found.largest_divergence < 1e-10


@pytest.mark.parametrize(("scheme", "ecosystem"), BOTH)
def test_a_scheme_costs_far_more_than_what_runs_it(
    folder: Path, text: Text, inputs: Any, tmp_path: Path, scheme: str, ecosystem: str
) -> None:
    reference = accuracy._remembered(_fp32(folder))
    row = accuracy.measure_scheme(folder, scheme, ecosystem, inputs, reference, text, tmp_path)
    smallest, largest = BITS[scheme]
    assert smallest <= row.bits <= largest
    assert 1e-7 < row.fp32.divergence.mean < 0.2
    # The runner differs by fp32 rounding, and where that moves an activation over a tie of its code.
    assert row.runner.divergence.mean < row.fp32.divergence.mean / 10
    assert row.bf16.divergence.mean > 0
    assert accuracy.ecosystem_lines([row, row], text).startswith(f"{scheme}, KL({ecosystem} || {ecosystem}): 0.0e+00")
    cells = accuracy.scheme_table([row]).splitlines()
    assert len({line.count("|") for line in cells}) == 1
    assert cells[2].startswith(f"| {scheme}, {ecosystem} | {row.bits:.2f} | ")


def test_the_oracle_rounds_activations_too(folder: Path, text: Text) -> None:
    model, weights_only = _fp32(folder), _fp32(folder)
    use_oracle(model, "fp8_block128", "transformers", {0: (1.0, 1.0), 1: (1.0, 1.0)})
    fake_quantize(weights_only, CONTROLS["fp8 in tiles"])
    found = compare(accuracy._logits(model), accuracy._logits(weights_only), text.ids, text.windows)
    assert found.divergence.mean > 1e-7


def test_controls(folder: Path, text: Text) -> None:
    rows = list(accuracy.measure_controls(folder, text))
    found = {name: comparison.divergence.mean for name, comparison, _ in rows}
    assert found["none, computed in bf16"] > 0
    assert found["int8, groups of 32"] < found["int4, groups of 32"] < found["int2, groups of 32"]
    assert found["fp8 in tiles, **scales one tile off**"] > 3 * found["fp8 in tiles"]
    assert found["NVFP4, **scales one group off**"] > 3 * found["NVFP4"]
    for name, comparison, routing in rows:
        total = found[name] * comparison.model.num_tokens
        elsewhere = routing.share * comparison.model.num_tokens
        others = routing.others * (comparison.model.num_tokens - elsewhere)
        # Both go over the same logits, bf16 ones in another order.
        assert others == pytest.approx(total * (1 - routing.divergence_share), rel=1e-3)
        assert 0 <= routing.share < 1
    cells = accuracy.control_table(rows).splitlines()
    assert len(cells) == len(rows) + 2
    assert len({line.count("|") for line in cells}) == 1


def test_tokens_that_are_routed_elsewhere(folder: Path, text: Text) -> None:
    model, reference = _fp32(folder), _fp32(folder)
    assert measure_routing(model, reference, text.ids, text.windows[:1]).share == 0
    # Experts in another order in the last layer: every token goes to others, and nothing else has changed.
    layer = model.model.layers[-1].mlp
    layer.gate.weight.data = layer.gate.weight.data.roll(1, 0)
    found = measure_routing(model, reference, text.ids, text.windows[:1])
    assert found.share == 1
    assert found.divergence_share == 1


def test_routes_and_divergences_are_of_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two made-up models that differ in what they say about and do with the token at position 5."""

    def run(model: str, piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, chosen = torch.zeros(piece.shape[1], 4), torch.zeros(piece.shape[1], 1, 2)
        logits[5, 0] = chosen[5] = float(model == "changed")
        return logits, chosen

    monkeypatch.setattr(accuracy_routing, "_run", run)
    for window in (Window(start=0, stop=8, first_target=1), Window(start=0, stop=8, first_target=6)):
        found = measure_routing("changed", "reference", list(range(8)), (window,))
        assert found.share == pytest.approx(1 / (window.stop - window.first_target))
        assert (found.divergence_share, found.others) == (1, 0)
