"""Where the commands print: results on stdout, everything else on stderr.

Rich leaves colours away where its output is no terminal, so a piped table is plain text; its lines are long then,
unless the variable COLUMNS says how long.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_core.cli.word_table import WordFields, WordTable

#: Columns of the lines where the output is no terminal: a table seldom needs more.
_COLUMNS = 160


def stdout() -> Console:
    """The console for results. Made per call: tests and pipes replace `sys.stdout`."""
    return _console(sys.stdout)


def stderr() -> Console:
    """The console for progress and errors."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = _COLUMNS
    return console


def table(*headers: str) -> Table:
    """A borderless table whose cells wrap between words; see `WordTable`."""
    return WordTable(*headers)


def fields(rows: Mapping[str, str]) -> WordFields:
    """Label and text, one pair per row; see `WordFields`. What would act on the terminal is escaped."""
    return WordFields({label: _harmless(text) for label, text in rows.items()})


def verdict(word: str) -> Text:
    """A word coloured by what it says: `ready` and `yes` green, `failed`, `conflict` and `no` red, others yellow."""
    first = word.partition(":")[0].split(" ")[0]
    style = {"ready": "green", "yes": "green", "failed": "red", "conflict": "red", "no": "red"}.get(first, "yellow")
    text = Text(word)
    text.stylize(style, 0, len(first))
    return text


def print_json(data: dict[str, Any]) -> None:
    """One JSON document on stdout, and nothing else."""
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def print_error(message: str, label: str = "error") -> None:
    """A message on stderr; wrapped on a terminal only, so that logs keep one reason per line."""
    console = stderr()
    first, *rest = _harmless(f"{label}: {message}").splitlines()
    for line in (first, *rest):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        pieces = _wrapped(line, console.width, indent) if console.is_terminal else [line]
        for piece in pieces or [""]:
            console.print(piece, soft_wrap=True, style={"error": "red", "warning": "yellow"}[label])


def _harmless(text: str) -> str:
    """A text of several lines without control characters, which Python's escapes stand for."""
    letters = (letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
    return text if text.isprintable() else "".join(letters)


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    # An option or a name is one word, whatever its length.
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
