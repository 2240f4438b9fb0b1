"""Options that several commands share, and how words, folders and files that they are given are checked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from moe_core.errors import SpecError, UnknownNameError
from moe_core.model_config import read_config

A2aBackend = Annotated[
    str | None,
    typer.Option("--a2a-backend", metavar="NAME", help="Pin the dispatcher: a name from list-backends."),
]
RunnerBackend = Annotated[
    str | None, typer.Option("--runner-backend", metavar="NAME", help="Pin the runner: a name from list-backends.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")]


def known_word(kind: str, word: str, words: Iterable[str]) -> str:
    """`word` if it is one of `words`; raises `UnknownNameError` with did-you-mean otherwise."""
    known = tuple(words)
    if word not in known:
        raise UnknownNameError(kind, word, known)
    return word


def check_model_folder(folder: Path) -> None:
    """Raise `SpecError` unless `folder` has a `config.json` that can be read."""
    if not folder.is_dir():
        raise SpecError(f"no model at {folder}: expected a folder with a config.json and weights")
    read_config(folder)


def read_text(path: Path) -> str:
    """The content of a UTF-8 file; raises `SpecError` if it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"text {path}: not readable as UTF-8 ({error})") from error
