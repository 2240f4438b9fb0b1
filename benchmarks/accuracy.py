"""What each quantization scheme costs a trained model, beside controls that say how to read the figures.

Run: python benchmarks/accuracy.py        (no accelerator needed; some minutes)

Prints the tables of `docs/accuracy.md`. The tiny model is quantized by the project's own quantizer under every scheme
that it writes, loaded again, and compared over held-out text with the unquantized model. Everything that is not a
scheme is computed in fp32, also the unquantized parts: bf16 moves a model by more than a good scheme does.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache, partial
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import attrs
import torch
import typer
from accuracy_models import CONTROLS, ROOT, fake_quantize, use_oracle
from accuracy_routing import Routing, measure_routing
from tiny_text import split_text
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from moe_core.evaluation import Comparison, Estimate, LogitsFn, Window, compare, cut_windows, prompt_logits
from moe_core.integrations.transformers import load_model
from moe_core.quantizer.calibration import calibrate
from moe_core.quantizer.checkpoint import quantize_checkpoint
from moe_core.quantizer.input_amax import ModelInputs
from moe_core.quantizer.words import WRITABLE

WINDOW = 256
#: Windows of training text that show the quantizer how large activations are.
CALIBRATION_WINDOWS = 64


@attrs.frozen(kw_only=True)
class Text:
    """The held-out text as token ids, cut into windows."""

    ids: list[int]
    windows: tuple[Window, ...]

    @classmethod
    def of(cls, content: bytes) -> Text:
        """A text of a byte-level model."""
        return cls(ids=list(content), windows=cut_windows(len(content), WINDOW, WINDOW))


@attrs.frozen(kw_only=True)
class SchemeRow:
    """One scheme of one ecosystem.

    Attributes:
        scheme: Its name.
        ecosystem: Whose layout of it.
        bits: Stored bits per expert weight, scales included.
        fp32: Against the unquantized model, all else in fp32.
        bf16: The same with the quantized model in bf16, as it is usually run.
        runner: What runs it, less the scheme: divergence of moe-core's fp32 result from that of a float64 oracle.
        logits: The quantized model, all else in fp32.
    """

    scheme: str
    ecosystem: str
    bits: float
    fp32: Comparison
    bf16: Comparison
    runner: Comparison
    logits: LogitsFn


def measure_scheme(
    folder: Path, scheme: str, ecosystem: str, inputs: ModelInputs, reference: LogitsFn, text: Text, scratch: Path
) -> SchemeRow:
    """Quantize, load and run one scheme.

    Args:
        folder: The unquantized model.
        scheme: Name of a scheme.
        ecosystem: Whose layout of it.
        inputs: What a calibration measured, for static scales.
        reference: The unquantized model in fp32.
        text: What both are run over.
        scratch: Folder for the quantized model.
    """
    out = scratch / f"{scheme}-{ecosystem}"
    written = quantize_checkpoint(
        folder, out, scheme, ecosystem=ecosystem, inputs=inputs if scheme == "nvfp4" else None
    )
    fp32 = _remembered(load_model(out, dtype="fp32").model)
    oracle = _eager(folder, torch.float32)
    use_oracle(oracle, scheme, ecosystem, {layer: (max(i.first), max(i.second)) for layer, i in inputs.layers.items()})
    return SchemeRow(
        scheme=scheme,
        ecosystem=ecosystem,
        # Sources of bf16: two bytes per weight.
        bits=16 * written.expert_bytes_after / written.expert_bytes_before,
        fp32=compare(fp32, reference, text.ids, text.windows),
        bf16=compare(_logits(load_model(out, dtype="bf16").model), reference, text.ids, text.windows),
        runner=compare(fp32, _logits(oracle), text.ids, text.windows),
        logits=fp32,
    )


def measure_controls(folder: Path, text: Text) -> Iterator[tuple[str, Comparison, Routing]]:
    """Weight-only schemes and faulty readers of them, by fake-quantized fp32 weights; and no scheme, but bf16."""
    reference = _eager(folder, torch.float32)
    logits = _remembered(reference)
    for name, model in _controls(folder):
        comparison = compare(_logits(model), logits, text.ids, text.windows)
        yield name, comparison, measure_routing(model, reference, text.ids, text.windows)


def _controls(folder: Path) -> Iterator[tuple[str, Any]]:
    yield "none, computed in bf16", _eager(folder, torch.bfloat16)
    for name, quantized in CONTROLS.items():
        model = _eager(folder, torch.float32)
        fake_quantize(model, quantized)
        yield name, model


def calibrated(folder: Path, content: bytes) -> ModelInputs:
    """Largest inputs of the experts over the first windows of a text."""
    ids = torch.tensor([list(content[: CALIBRATION_WINDOWS * WINDOW])])
    return calibrate(_eager(folder, torch.float32), ids.split(WINDOW, dim=1))


def scheme_table(rows: list[SchemeRow]) -> str:
    """Markdown."""
    head = ("scheme", "bits", *_COMPARED, "KL, computed in bf16", "KL, runner from float64")
    return _markdown(head, map(_scheme_cells, rows))


def ecosystem_lines(rows: list[SchemeRow], text: Text) -> str:
    """How far the layouts of one scheme are from each other: a sentence per pair."""
    pairs = [(one, other) for one, other in combinations(rows, 2) if one.scheme == other.scheme]
    return "\n".join(
        f"{one.scheme}, KL({one.ecosystem} || {other.ecosystem}): "
        f"{_small(compare(other.logits, one.logits, text.ids, text.windows).divergence)}"
        for one, other in pairs
    )


def control_table(rows: list[tuple[str, Comparison, Routing]]) -> str:
    """Markdown."""
    head = ("weights only", *_COMPARED, "routed elsewhere", "their share of KL", "KL of the others")
    return _markdown(head, ((name, *_compared(comparison), *_routed(routing)) for name, comparison, routing in rows))


def _routed(routing: Routing) -> tuple[str, ...]:
    return f"{100 * routing.share:.2f} %", f"{100 * routing.divergence_share:.0f} %", f"{routing.others:.1e}"


def _scheme_cells(row: SchemeRow) -> tuple[str, ...]:
    return (
        f"{row.scheme}, {row.ecosystem}",
        f"{row.bits:.2f}",
        *_compared(row.fp32),
        _small(row.bf16.divergence),
        _small(row.runner.divergence),
    )


_COMPARED = ("perplexity", "log-likelihood difference", "KL", "median KL", "same top token")


def _compared(comparison: Comparison) -> tuple[str, ...]:
    return (
        f"{comparison.model.perplexity().mean:.3f}",
        _small(comparison.gain),
        _small(comparison.divergence),
        f"{comparison.median_divergence:.1e}",
        f"{100 * comparison.same_top.mean:.2f} %",
    )


def _small(value: Estimate) -> str:
    return f"{value.mean:.1e}" + ("" if value.standard_error is None else f" ± {value.standard_error:.0e}")


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---", *["--:"] * (len(head) - 1)), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _eager(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def _logits(model: Any) -> LogitsFn:
    return partial(prompt_logits, model)


def _remembered(model: Any) -> LogitsFn:
    """A model's logits, computed once per window."""
    remembered = cache(lambda ids: prompt_logits(model, ids))
    return lambda ids: remembered(tuple(ids))


def main(
    model: Annotated[Path, typer.Option(help="Unquantized byte-level model.")] = ROOT / "examples" / "tiny_moe",
    threads: Annotated[int, typer.Option(help="Of torch; on a busy machine more are slower by far.")] = 1,
) -> None:
    """Print both tables and what they were made with."""
    torch.set_num_threads(threads)
    disable_progress_bar()
    text = Text.of((model / "held_out.txt").read_bytes())
    controls = list(measure_controls(model, text))
    reference = _remembered(_eager(model, torch.float32))
    inputs = calibrated(model, split_text().train)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [
            measure_scheme(model, scheme, ecosystem, inputs, reference, text, Path(scratch))
            for scheme, ecosystems in WRITABLE.items()
            for ecosystem in ecosystems
        ]
    unquantized = controls[0][1].reference
    print(f"unquantized, fp32: perplexity {unquantized.perplexity().mean:.3f} over {unquantized.num_tokens} tokens\n")
    print(scheme_table(rows), ecosystem_lines(rows, text), control_table(controls), sep="\n\n")
    print(f"\nPython {platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}")


if __name__ == "__main__":
    typer.run(main)
