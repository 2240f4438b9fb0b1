"""The model card of the tiny model: its README.md, written from measured figures."""

from __future__ import annotations

import platform
import textwrap
from pathlib import Path
from string import Template
from typing import NamedTuple

import torch
import transformers
from tiny_eval import Evaluation
from tiny_text import HELD_OUT_TOPICS, TextSplit
from torch import Tensor

_TEMPLATE = Path(__file__).with_name("tiny_card.md.in")
#: Characters of a line; tables have longer ones.
_WIDTH = 140


class Report(NamedTuple):
    """What one training run measured.

    `seconds` is the wall time of the training alone; `fp32` belongs to the weights before they were rounded, `stored`
    to the bf16 weights computed in fp32, `bf16` to the same computed in bf16; `ngrams` maps the order to each window's
    nats per byte, `[B]` float64.
    """

    steps: int
    seed: int
    balance_weight: float
    seconds: float
    text: TextSplit
    shared_fraction: float
    parameters: int
    fp32: Evaluation
    stored: Evaluation
    bf16: Evaluation
    ngrams: dict[int, Tensor]


def write_card(report: Report, folder: Path) -> Path:
    """Write `README.md` into `folder`, which holds the saved model, and return its path."""
    perplexities = {order: losses.mean().exp().item() for order, losses in report.ngrams.items()}
    best = min(perplexities, key=lambda order: perplexities[order])
    lead = report.ngrams[best] - report.stored.losses
    card = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        parameters=f"{report.parameters:,}",
        weight_bytes=f"{(folder / 'model.safetensors').stat().st_size:,}",
        steps=report.steps,
        seed=report.seed,
        balance_weight=report.balance_weight,
        minutes=f"{report.seconds / 60:.1f}",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        train_bytes=f"{len(report.text.train):,}",
        held_out_bytes=f"{len(report.text.held_out):,}",
        digest=report.text.digest,
        topics=", ".join(f"`{name}`" for name in HELD_OUT_TOPICS),
        shared=f"{report.shared_fraction:.1%}",
        fp32=f"{report.fp32.perplexity:.3f}",
        stored=f"{report.stored.perplexity:.3f}",
        bf16=f"{report.bf16.perplexity:.3f}",
        unigram=f"{perplexities[1]:.2f}",
        best_order=best,
        best=f"{perplexities[best]:.3f}",
        lead=f"{lead.mean():.4f}",
        lead_error=f"{lead.std() / len(lead) ** 0.5:.4f}",
        ngrams="\n".join(f"| {order} | {value:.3f} |" for order, value in perplexities.items()),
        shares="\n".join(_share_rows(report.stored)),
        smallest_share=f"{report.stored.expert_shares.min():.1%}",
    )
    path = folder / "README.md"
    path.write_text(_wrapped(card), encoding="utf-8")
    return path


def _wrapped(card: str) -> str:
    """The card with its paragraphs wrapped anew where a figure or a list made a line too long."""
    return "\n\n".join(map(_paragraph, card.split("\n\n")))


def _paragraph(block: str) -> str:
    if block.startswith("|") or max(map(len, block.split("\n"))) <= _WIDTH:
        return block
    text = textwrap.fill(" ".join(block.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)
    return text + "\n" * block.endswith("\n")


def _share_rows(evaluation: Evaluation) -> list[str]:
    layers = enumerate(evaluation.expert_shares.tolist())
    return [f"| {layer} | " + " | ".join(f"{share:.1%}" for share in shares) + " |" for layer, shares in layers]
