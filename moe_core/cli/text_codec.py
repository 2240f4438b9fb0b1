"""Text to token ids and back: the model's tokenizer, or UTF-8 bytes where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from moe_core.errors import SpecError, UnsupportedModelError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


class TextCodec(Protocol):
    """Turns text into the ids that a model was trained on."""

    @property
    def name(self) -> str:
        """What it is, for people."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...


class ByteCodec:
    """A token id is the value of a UTF-8 byte."""

    name = "UTF-8 bytes"

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes; what is no UTF-8 or no byte becomes the replacement character."""
        # 0xFF occurs in no UTF-8 text, so it is replaced when decoded.
        return bytes(value if value < 256 else 0xFF for value in ids).decode("utf-8", errors="replace")


class TokenizerCodec:
    """The tokenizer that lies beside a model."""

    def __init__(self, tokenizer: Any) -> None:
        # Its class is transformers' own affair, and often the same for every model.
        self.name = f"tokenizer of {len(tokenizer)} tokens"
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the tokenizer adds."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def load_codec(folder: Path, vocab_size: int) -> TextCodec:
    """The codec of the model in `folder`.

    Raises:
        SpecError: It has no tokenizer, and its vocabulary is too small for bytes.
        UnsupportedModelError: Its tokenizer cannot be loaded.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        if vocab_size < 256:
            raise SpecError(f"model {folder}: no tokenizer files, and {vocab_size} ids are too few for bytes")
        return ByteCodec()
    from transformers import AutoTokenizer

    try:
        return TokenizerCodec(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    # The library below transformers raises nothing more special.
    except Exception as error:
        raise UnsupportedModelError(f"tokenizer in {folder} cannot be loaded: {error}") from error
