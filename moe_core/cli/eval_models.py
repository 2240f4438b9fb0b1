"""The models that `moe-core eval` runs: loaded, prepared, and checked to speak about the same tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import attrs

from moe_core.cli.eval_view import EvaluatedModel
from moe_core.cli.model_loading import load_model, load_quantized, prepare_experts
from moe_core.cli.output import progress_bar, stage
from moe_core.cli.text_codec import load_codec
from moe_core.errors import SpecError
from moe_core.evaluation import LogitsFn, prompt_logits
from moe_core.integrations.transformers import LoadedModel
from moe_core.model_config import quantization_of, read_config

#: Most tokens per window unless told otherwise: logits of one window are held, and contexts may be very long.
LONGEST_DEFAULT_WINDOW = 2048


@attrs.frozen(eq=False, kw_only=True)
class PreparedModel:
    """A model ready to run, and the text in its tokens.

    Attributes:
        logits: From token ids to logits.
        ids: The text.
        vocab_size: Tokens it knows.
        context: Tokens it was made for; None where its configuration does not say.
        described: What the report says about it.
    """

    logits: LogitsFn
    ids: list[int]
    vocab_size: int
    context: int | None
    described: EvaluatedModel


def load_evaluated(
    folder: Path,
    text: str,
    dtype: str | None,
    device: str | None,
    a2a_backend: str | None = None,
    runner_backend: str | None = None,
) -> PreparedModel:
    """Load a model, let moe-core run its experts, and encode the text; arguments and errors as in `model_loading`."""
    loaded = _load(folder, dtype, device, a2a_backend, runner_backend)
    network, config = loaded.model, loaded.model.config.get_text_config()
    codec = load_codec(folder, int(config.vocab_size))
    return PreparedModel(
        logits=partial(prompt_logits, network),
        ids=codec.encode(text),
        vocab_size=int(config.vocab_size),
        context=getattr(config, "max_position_embeddings", None),
        described=EvaluatedModel(
            folder=str(folder),
            kind=type(network).__name__,
            dtype=str(network.dtype).removeprefix("torch."),
            device=str(network.device),
            schemes=_distinct(experts.plan.request.quant.label for experts in loaded.experts.values()),
            routes=_distinct(str(route) for experts in loaded.experts.values() for route in experts.plan.routes),
        ),
    )


def _load(
    folder: Path, dtype: str | None, device: str | None, a2a_backend: str | None, runner_backend: str | None
) -> LoadedModel:
    title = f"loading {folder}"
    if quantization_of(read_config(folder)) is not None:
        with progress_bar(title) as progress:
            return load_quantized(folder, dtype, device, a2a_backend, runner_backend, progress)
    with stage(title):
        network = load_model(folder, dtype, device)
        return LoadedModel(model=network, experts=prepare_experts(network, a2a_backend, runner_backend))


def check_same_tokens(model: PreparedModel, reference: PreparedModel) -> None:
    """Raise `SpecError` unless both models predict the same tokens of the text."""
    ours, theirs = model.described.folder, reference.described.folder
    if model.vocab_size != reference.vocab_size:
        raise SpecError(
            f"{ours} has a vocabulary of {model.vocab_size} tokens, {theirs} of {reference.vocab_size}; "
            "models can be compared over the same tokens only"
        )
    if model.ids != reference.ids:
        raise SpecError(
            f"the tokenizers of {ours} and {theirs} cut the text into different tokens ({len(model.ids)} and "
            f"{len(reference.ids)}); models can be compared over the same tokens only"
        )


def choose_window(wanted: int | None, *models: PreparedModel) -> int:
    """Tokens per window: what is wanted, or the smallest context of the models up to a limit.

    Raises:
        SpecError: A window is wanted that some model was not made for.
    """
    contexts = [model.context for model in models if model.context is not None]
    if wanted is None:
        return min([LONGEST_DEFAULT_WINDOW, *contexts])
    for model in models:
        if model.context is not None and wanted > model.context:
            raise SpecError(
                f"a window of {wanted} tokens is longer than the context of {model.described.folder}: {model.context}"
            )
    return wanted


def _distinct(words: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))
