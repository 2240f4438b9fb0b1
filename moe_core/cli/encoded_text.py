"""A text in the tokens of a model's folder, known before any weight is loaded, and windows that fit models."""

from __future__ import annotations

from pathlib import Path

import attrs

from moe_core.cli.model_loading import read_text_config
from moe_core.cli.text_codec import TextCodec, load_codec
from moe_core.errors import SpecError

#: Most tokens per window unless told otherwise: logits of one window are held, and contexts may be very long.
LONGEST_DEFAULT_WINDOW = 2048


@attrs.frozen(eq=False, kw_only=True)
class EncodedText:
    """A text as one model reads it.

    Attributes:
        folder: The model's.
        codec: What made its tokens.
        ids: The tokens.
        vocab_size: Tokens that the model knows.
        context: Tokens it was made for; None where its configuration does not say.
    """

    folder: Path
    codec: TextCodec
    ids: list[int]
    vocab_size: int
    context: int | None


def encode(folder: Path, text: str) -> EncodedText:
    """The text in the tokens of the model in `folder`; errors as of `load_codec` and `read_text_config`."""
    config = read_text_config(folder)
    vocab_size = int(config.vocab_size)
    codec = load_codec(folder, vocab_size)
    context = getattr(config, "max_position_embeddings", None)
    return EncodedText(folder=folder, codec=codec, ids=codec.encode(text), vocab_size=vocab_size, context=context)


def check_same_tokens(model: EncodedText, reference: EncodedText) -> None:
    """Raise `SpecError` unless both models predict the same tokens of the text."""
    ours, theirs = model.folder, reference.folder
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


def choose_window(wanted: int | None, *texts: EncodedText) -> int:
    """Tokens per window: what is wanted, or the smallest context of the models up to a limit.

    Raises:
        SpecError: A window is wanted that some model was not made for.
    """
    contexts = [text.context for text in texts if text.context is not None]
    if wanted is None:
        return min([LONGEST_DEFAULT_WINDOW, *contexts])
    for text in texts:
        if text.context is not None and wanted > text.context:
            raise SpecError(f"a window of {wanted} tokens is longer than the context of {text.folder}: {text.context}")
    return wanted
