"""A byte tokenizer in the Hugging Face format: token id = byte value, so programs without a tokenizer agree with it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_byte_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of the 256-byte vocabulary into `folder`."""
    vocabulary = {character: byte for byte, character in enumerate(_printable_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(folder)


def _printable_bytes() -> list[str]:
    """The character by which the byte-level format writes each byte: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
