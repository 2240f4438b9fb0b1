"""`moe-core run` on tiny quantized checkpoints without tokenizer."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from moe_core.bound import BoundExperts
from tests.integrations.hf_quantized import MODULES, edit, write_qwen

FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [MODULES[0]],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model")
    write_qwen(target, FP8)
    return target


def words(folder: Path, *more: str) -> tuple[str, ...]:
    return ("run", "--model", str(folder), "--prompt", "Hello", "--device", "cpu", "--max-new-tokens", "3", *more)


def test_a_mixed_model_runs_with_a_plan_per_group_of_layers(call: Any, folder: Path, tmp_path: Path) -> None:
    sample = tmp_path / "sample.txt"
    sample.write_text("some text " * 5, encoding="utf-8")
    code, out, err = call(*words(folder, "--text", str(sample), "--runner-backend", "torch"))
    assert code == 0
    plans = out[: out.index("\ntext")]
    assert re.search(r"plan of layer 1\n.*weights fp8_block128,", plans)
    assert re.search(r"plan of layer 0\n.*weights fp32,", plans)
    assert "torch:none.standard + torch:torch.standard" in plans
    figures = " ".join(out[out.index("figures") :].split())
    assert "difference from eager not available: the experts exist in quantized form alone" in figures
    assert re.search(r"perplexity \d+\.\d+ per byte", figures)
    # Dense parts, 4 experts of 3 x 64 x 96 in each of two layers.
    assert re.search(r"Qwen3MoeForCausalLM, 0\.\d M parameters, float32 on cpu", figures)
    steps = [line.removesuffix(" ...") for line in err.splitlines()[::2]]
    assert steps == ["importing torch and transformers", "loading", "warm-up", "generating", "perplexity"]
    assert [line.partition(":")[0] for line in err.splitlines()[1::2]] == steps


def test_eager_cannot_be_compared_with(call: Any, folder: Path) -> None:
    code, _, err = call(*words(folder, "--compare-eager"))
    assert code == 2
    assert "are quantized, eager computes float ones" in err
    code, out, _ = call(*words(folder, "--no-compare-eager"))
    assert code == 0
    assert "difference" not in out


@pytest.mark.error_path
def test_a_wrong_shape_of_quantized_experts_names_them(
    call: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = BoundExperts.__call__

    def wrong(self: BoundExperts, hidden_states: Any, *routing: Any) -> Any:
        output = original(self, hidden_states, *routing)
        return output[:, 1:] if self.plan.request.quant.is_quantized else output

    monkeypatch.setattr(BoundExperts, "__call__", wrong)
    code, _, err = call(*words(folder))
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("error: <PreparedExperts any: torch:none.standard")
    assert ">: expected [5, 64] float32 on cpu as the tokens are, got [5, 63] float32 on cpu, of plugin 'torch'" in last


@pytest.mark.error_path
def test_missing_tensors_are_listed(call: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    name = f"{MODULES[1]}.3.down_proj.weight_scale_inv"
    edit(tmp_path / "model", **{name.replace(".", "__"): None})
    code, out, err = call(*words(tmp_path / "model"))
    assert (code, out) == (1, "")
    assert re.search(rf"nothing was loaded:\n  {MODULES[1]}\.3\.down_proj\.weight_scale.*: missing", err)
