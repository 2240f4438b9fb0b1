"""The English text of the tiny model: what ships inside CPython, split into training and held-out text."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

# Every tenth topic in alphabetical order, from the sixth on. Written out, so that a Python release that adds a
# topic does not move the split.
HELD_OUT_TOPICS = (
    "attribute-access",
    "booleans",
    "customization",
    "for",
    "integers",
    "power",
    "subscriptions",
    "unary",
)
_PARAGRAPH_BREAK = re.compile(r"\n\s*\n")


class TextSplit(NamedTuple):
    """Training and held-out text, both UTF-8 bytes, and the licence text that covers them."""

    train: bytes
    held_out: bytes
    licence: str

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of both texts: tells whether two runs saw the same text."""
        return hashlib.sha256(self.train + b"\0" + self.held_out).hexdigest()[:16]


def split_text() -> TextSplit:
    """Split the topics of this interpreter: whole topics held out, the rest and the licence for training.

    Topics quote one another, so a paragraph that also stands in a held-out topic is dropped from the training text;
    paragraphs are compared without regard to white space, because a quotation may be indented. In each of the two
    texts a paragraph stands once.

    Raises:
        KeyError: a held-out topic is missing in this Python.
        FileNotFoundError: this Python installation has no licence file.
    """
    licence = _licence_text()
    held_out = {squeeze(p): p for name in HELD_OUT_TOPICS for p in paragraphs(topics[name])}
    sources = [topics[name] for name in sorted(topics) if name not in HELD_OUT_TOPICS] + [licence]
    train = {squeeze(p): p for source in sources for p in paragraphs(source) if squeeze(p) not in held_out}
    return TextSplit(_join(train.values()), _join(held_out.values()), licence)


def paragraphs(text: str) -> list[str]:
    """Parts of `text` between blank lines, without the empty ones."""
    return [p.strip("\n") for p in _PARAGRAPH_BREAK.split(text) if p.strip()]


def squeeze(text: str) -> str:
    """`text` with every run of white space made one space."""
    return " ".join(text.split())


def shared_fraction(train: bytes, held_out: bytes, width: int = 48) -> float:
    """Fraction of the held-out characters in a run of `width` characters that also stands in the training text.

    Stricter than the paragraph rule: it also finds sentences and code lines that occur in both, white space aside.
    """
    seen_text, text = squeeze(train.decode()), squeeze(held_out.decode())
    seen = {seen_text[i : i + width] for i in range(len(seen_text) - width + 1)}
    covered = bytearray(len(text))
    for i in range(len(text) - width + 1):
        if text[i : i + width] in seen:
            covered[i : i + width] = b"\1" * width
    return sum(covered) / len(text)


def _join(parts: Iterable[str]) -> bytes:
    return "\n\n".join(parts).encode() + b"\n"


def _licence_text() -> str:
    # The places in which `license()` of the interactive prompt looks, too: Windows keeps it one folder up.
    stdlib = Path(sysconfig.get_path("stdlib"))
    places = [folder / name for folder in (stdlib, stdlib.parent) for name in ("LICENSE.txt", "LICENSE")]
    for place in places:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    looked = ", ".join(map(str, places))
    raise FileNotFoundError(
        f"no licence text in this Python installation: looked for {looked}; it is part of the training text, "
        "so use a Python that has it (any build from python.org, or one by pyenv or uv)"
    )
