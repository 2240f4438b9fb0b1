"""`moe-core eval`: how well a model predicts a text, and how far it is from another model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_core.cli.eval_view import Report, report_json, report_view
from moe_core.cli.options import (
    A2aBackend,
    AsJson,
    ComputedDtype,
    Device,
    ModelFolder,
    RunnerBackend,
    Verbose,
    check_model_folder,
    check_names,
    known_word,
    read_text,
)
from moe_core.cli.output import print_json, stdout
from moe_core.cli.progress import progress_bar, stage
from moe_core.vocabulary import FLOAT_DTYPES

if TYPE_CHECKING:
    from moe_core.cli.eval_models import PreparedModel
    from moe_core.evaluation import Comparison, Prediction, Progress, Window


def evaluate(
    model: ModelFolder,
    text: Annotated[Path, typer.Option(metavar="FILE", help="UTF-8 text to predict.")],
    against: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Compare with this model, for example the unquantized one.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Tokens per window.", show_default="the model's context, at most 2048"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens from window to window.", show_default="the window: side by side"),
    ] = None,
    dtype: ComputedDtype = None,
    device: Device = None,
    a2a_backend: A2aBackend = None,
    runner_backend: RunnerBackend = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Measure how well a model predicts a text.

    Reports its perplexity and, against a second model, the divergence per token. Experts of both models run through
    moe-core; pins are for the first one. With --dtype fp32 differences below the rounding of bf16 show, too.
    """
    if dtype is not None:
        known_word("dtype", dtype, FLOAT_DTYPES)
    for folder in (model,) if against is None else (model, against):
        check_model_folder(folder)
    check_names(a2a_backend, runner_backend)
    sample = read_text(text)
    with stage("importing torch and transformers"):
        from moe_core.cli import encoded_text, model_loading
        from moe_core.cli.eval_models import load_evaluated
        from moe_core.evaluation import cut_windows

        model_loading.require_transformers()
    encoded = encoded_text.encode(model, sample)
    texts = [encoded] if against is None else [encoded, encoded_text.encode(against, sample)]
    for other in texts[1:]:
        encoded_text.check_same_tokens(encoded, other)
    window = encoded_text.choose_window(window, *texts)
    stride = window if stride is None else stride
    windows = cut_windows(len(encoded.ids), window, stride)
    tested = load_evaluated(model, dtype, device, a2a_backend, runner_backend)
    reference = None if against is None else load_evaluated(against, dtype, device)
    with progress_bar("evaluating", "windows") as progress:
        prediction, comparison = _measure(tested, reference, encoded.ids, windows, progress)
    report = Report(
        model=tested.described,
        reference=None if reference is None else reference.described,
        prediction=prediction,
        comparison=comparison,
        text=str(text),
        num_bytes=len(sample.encode("utf-8")),
        num_tokens=len(encoded.ids),
        window=window,
        stride=stride,
    )
    if as_json:
        print_json(report_json(report))
    else:
        stdout().print(report_view(report))


def _measure(
    tested: PreparedModel,
    reference: PreparedModel | None,
    ids: list[int],
    windows: tuple[Window, ...],
    progress: Progress,
) -> tuple[Prediction, Comparison | None]:
    from moe_core import evaluation

    if reference is None:
        return evaluation.evaluate(tested.logits, ids, windows, progress=progress), None
    comparison = evaluation.compare(tested.logits, reference.logits, ids, windows, progress=progress)
    return comparison.model, comparison
