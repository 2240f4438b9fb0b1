"""The trained tiny model in NVFP4, end to end: the plugin on the emulated library predicts as the torch runner does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cutedsl_layers import DISPATCHERS, manager
from moe_plugin_flashinfer import emulation

from moe_core.evaluation import Comparison, LogitsFn, compare, cut_windows, prompt_logits
from moe_core.quantizer.calibration import calibrate
from moe_core.quantizer.checkpoint import quantize_checkpoint

transformers = pytest.importorskip("transformers")
load_model = pytest.importorskip("moe_core.integrations.transformers").load_model

TINY = Path(__file__).resolve().parents[3] / "examples" / "tiny_moe"
WINDOW = 256
#: Windows that are predicted, and of other text that show the quantizer how large activations are.
PREDICTED, CALIBRATED = 12, 16


@pytest.fixture(scope="module")
def content() -> bytes:
    return (TINY / "held_out.txt").read_bytes()


@pytest.fixture(scope="module")
def folder(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    eager = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    shown = torch.tensor([list(content[-CALIBRATED * WINDOW :])]).split(WINDOW, dim=1)
    target = tmp_path_factory.mktemp("quantized") / "model"
    quantize_checkpoint(TINY, target, "nvfp4", inputs=calibrate(eager, shown))
    return target


def logits(folder: Path, **pins: str) -> LogitsFn:
    model = load_model(folder, dtype="bf16", manager=manager(), **pins).model
    return partial(prompt_logits, model)


@pytest.fixture(scope="module")
def reference(folder: Path) -> LogitsFn:
    """The torch runner, asked once for each window."""
    of_model = logits(folder, runner_backend="torch")

    @cache
    def remembered(ids: tuple[int, ...]) -> torch.Tensor:
        return of_model(ids)

    def answer(ids: Sequence[int]) -> torch.Tensor:
        return remembered(tuple(ids))

    return answer


def compared(folder: Path, kernel: str, reference: LogitsFn, content: bytes) -> Comparison:
    ids = list(content[: PREDICTED * WINDOW])
    model = logits(folder, runner_backend="flashinfer_cutedsl", a2a_backend=DISPATCHERS[kernel])
    return compare(model, reference, ids, cut_windows(len(ids), WINDOW, WINDOW))


@pytest.mark.parametrize("kernel", DISPATCHERS)
def test_the_quantized_model_predicts_as_on_the_torch_runner(
    kernel: str, folder: Path, reference: LogitsFn, content: bytes
) -> None:
    found = compared(folder, kernel, reference, content)
    assert found.gain.standard_error is not None
    # Both round alike, but for bf16 in other places: what either gains on the other is chance.
    assert abs(found.gain.mean) < 4 * found.gain.standard_error
    # NVFP4 itself costs this model 5e-3 nats per token, bf16 5e-4 (docs/accuracy.md).
    assert found.divergence.mean < 2e-3
    assert found.same_top.mean > 0.97


def test_exchanged_halves_would_show(
    folder: Path, reference: LogitsFn, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = emulation.find("silu_and_mul_scaled_nvfp4_experts_quantize")

    def exchanged(a: torch.Tensor, **call: Any) -> Any:
        return right(a=a.roll(a.shape[2] // 2, 2), **call)

    exchanged.__signature__ = right.__signature__  # type: ignore[attr-defined]
    found: Callable[[str], Any] = emulation.find
    monkeypatch.setattr(emulation, "find", lambda name: exchanged if name.startswith("silu") else found(name))
    assert compared(folder, "masked", reference, content).divergence.mean > 0.1
