"""The models that `moe-core eval` runs, and what its report says about them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import attrs

from moe_core.cli.eval_view import EvaluatedModel
from moe_core.cli.model_loading import load_served
from moe_core.evaluation import LogitsFn, prompt_logits


@attrs.frozen(eq=False, kw_only=True)
class PreparedModel:
    """A model ready to run.

    Attributes:
        logits: From token ids to logits.
        described: What the report says about it.
    """

    logits: LogitsFn
    described: EvaluatedModel


def load_evaluated(
    folder: Path,
    dtype: str | None,
    device: str | None,
    a2a_backend: str | None = None,
    runner_backend: str | None = None,
) -> PreparedModel:
    """Load a model and let moe-core run its experts; arguments and errors as of `load_served`."""
    loaded = load_served(folder, dtype, device, a2a_backend, runner_backend, title=f"loading {folder}")
    network = loaded.model
    return PreparedModel(
        logits=partial(prompt_logits, network),
        described=EvaluatedModel(
            folder=str(folder),
            kind=type(network).__name__,
            dtype=str(network.dtype).removeprefix("torch."),
            device=str(network.device),
            schemes=_distinct(experts.plan.request.quant.label for experts in loaded.experts.values()),
            routes=_distinct(str(route) for experts in loaded.experts.values() for route in experts.plan.routes),
        ),
    )


def _distinct(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))
