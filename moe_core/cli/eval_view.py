"""What `moe-core eval` found, as a table for people and as a document for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_core.cli.output import fields
from moe_core.cli.word_table import WordTable
from moe_core.errors import counted

if TYPE_CHECKING:
    from moe_core.evaluation import Comparison, Estimate, Prediction

#: Number of the JSON document's form.
SCHEMA = 1


@attrs.frozen(kw_only=True)
class EvaluatedModel:
    """One model of a report: its folder, class, dtype and device, its experts' schemes, and what runs them."""

    folder: str
    kind: str
    dtype: str
    device: str
    schemes: tuple[str, ...]
    routes: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Report:
    """One evaluation.

    Attributes:
        model: The model that was evaluated.
        reference: What it was compared with, or None.
        prediction: How well `model` predicts the text.
        comparison: None without a reference.
        text: Name of the text file.
        num_bytes: Its length.
        num_tokens: Its length in tokens of the models.
        window: Tokens per window.
        stride: Tokens from window to window.
    """

    model: EvaluatedModel
    reference: EvaluatedModel | None
    prediction: Prediction
    comparison: Comparison | None
    text: str
    num_bytes: int
    num_tokens: int
    window: int
    stride: int

    @property
    def bytes_per_token(self) -> float:
        """Of the whole text; perplexity per byte takes the predicted tokens to be as long as all."""
        return self.num_bytes / self.num_tokens


def report_json(report: Report) -> dict[str, Any]:
    """The document; `null` stands for a reference that there is not, or for a standard error of one window."""
    comparison = report.comparison
    return {
        "schema": SCHEMA,
        "text": {"file": report.text, "bytes": report.num_bytes, "tokens": report.num_tokens},
        "windows": {
            "tokens": report.window,
            "stride": report.stride,
            "count": report.prediction.num_windows,
            "predicted_tokens": report.prediction.num_tokens,
        },
        "model": _model_json(report.model, report.prediction, report.bytes_per_token),
        "against": None
        if report.reference is None or comparison is None
        else _model_json(report.reference, comparison.reference, report.bytes_per_token),
        "comparison": None if comparison is None else _comparison_json(comparison),
    }


def _model_json(model: EvaluatedModel, prediction: Prediction, bytes_per_token: float) -> dict[str, Any]:
    return {
        **attrs.asdict(model),
        "log_likelihood": attrs.asdict(prediction.log_likelihood),
        "perplexity_per_token": attrs.asdict(prediction.perplexity()),
        "perplexity_per_byte": attrs.asdict(prediction.perplexity(bytes_per_token)),
    }


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "kl_divergence": {
            **attrs.asdict(comparison.divergence),
            "median": comparison.median_divergence,
            "largest": comparison.largest_divergence,
        },
        "top1_agreement": attrs.asdict(comparison.same_top),
        "log_likelihood_difference": attrs.asdict(comparison.gain),
    }


def report_view(report: Report) -> RenderableType:
    """The tables; a standard error stands in brackets."""
    predicted = report.prediction
    sizes = f"{counted(report.num_bytes, 'byte')}, {counted(report.num_tokens, 'token')}"
    about = fields(
        {
            "text": f"{report.text}: {sizes}, {predicted.num_tokens} predicted "
            f" in {counted(predicted.num_windows, 'window')} of {report.window}, stride {report.stride}",
            "model": _model_line(report.model),
            "against": "" if report.reference is None else _model_line(report.reference),
            "in brackets": "" if predicted.num_windows < 2 else "standard error, from the spread between windows",
        }
    )
    parts: list[RenderableType] = [about, Text(), _predictions(report)]
    if report.comparison is not None:
        parts += [Text(), _differences(report.comparison)]
    return Group(*parts)


def _model_line(model: EvaluatedModel) -> str:
    return (
        f"{model.folder}: {model.kind}, {model.dtype} on {model.device}, experts {', '.join(model.schemes)} by "
        f"{'; '.join(model.routes)}"
    )


def _predictions(report: Report) -> Table:
    rows = {"model": report.prediction}
    if report.comparison is not None:
        rows["against"] = report.comparison.reference
    result = WordTable("", "perplexity per token", "perplexity per byte", "log-likelihood per token")
    for name, prediction in rows.items():
        per_byte = prediction.perplexity(report.bytes_per_token)
        cells = (_number(prediction.perplexity()), _number(per_byte), _number(prediction.log_likelihood))
        result.add_row(name, *cells)
    return result


def _differences(comparison: Comparison) -> RenderableType:
    divergence = comparison.divergence
    top = comparison.same_top
    error = "" if top.standard_error is None else f" ({100 * top.standard_error:.2f})"
    return fields(
        {
            "KL(against || model)": f"{_small(divergence)} nats per token; median "
            f"{comparison.median_divergence:.1e}, largest {comparison.largest_divergence:.1e}",
            "same top token": f"{100 * top.mean:.2f}{error} % of the tokens",
            "log-likelihood difference": f"{_small(comparison.gain)} nats per token, model less against",
        }
    )


def _number(value: Estimate) -> str:
    return f"{value.mean:.4f}" + ("" if value.standard_error is None else f" ({value.standard_error:.4f})")


def _small(value: Estimate) -> str:
    return f"{value.mean:.2e}" + ("" if value.standard_error is None else f" ({value.standard_error:.1e})")
