"""Where the commands print: results on stdout, everything else on stderr.

Rich leaves colours away where its output is no terminal, so a piped table is plain text. Its lines are as long as the
variable COLUMNS says, else as the terminal from which the command was started is wide, and long where there is none.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.text import Text

from moe_core.cli.document import DocumentAlone
from moe_core.cli.word_table import WordFields
from moe_core.errors import harmless

#: Columns of the lines where nobody watches: a table seldom needs more.
_COLUMNS = 160


def stdout() -> Console:
    """The console for results. Made per call: tests and pipes replace `sys.stdout`."""
    console = _console(sys.stdout)
    console.push_render_hook(_NoFilling())
    return console


def stderr() -> Console:
    """The console for progress and errors."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    is_told = os.environ.get("COLUMNS") or any(map(os.isatty, range(3)))
    # Some shells say that they have no columns where they do not know.
    if not is_told or console.width < 1:
        console.width = _COLUMNS
    return console


class _NoFilling(RenderHook):
    """Takes away the spaces that fill up lines: they would be copied with a text, and make logs larger."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Cut(renderable) for renderable in renderables]


class _Cut:
    """Something to print, whose lines end with their last word."""

    def __init__(self, whole: ConsoleRenderable) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in Segment.split_lines(console.render(self._whole, options)):
            while line and not line[-1].text.rstrip():
                line.pop()
            if line:
                yield from line[:-1]
                yield line[-1]._replace(text=line[-1].text.rstrip())
            yield Segment.line()


def fields(rows: Mapping[str, str]) -> WordFields:
    """Label and text, one pair per row; see `WordFields`. What would act on the terminal is escaped."""
    return WordFields({label: harmless(text) for label, text in rows.items()})


def verdict(word: str) -> Text:
    """A word coloured by what it says: `ready` and `yes` green, `failed`, `conflict` and `no` red, others yellow."""
    first = word.partition(":")[0].split(" ")[0]
    style = {"ready": "green", "yes": "green", "failed": "red", "conflict": "red", "no": "red"}.get(first, "yellow")
    text = Text(word)
    text.stylize(style, 0, len(first))
    return text


def print_json(data: dict[str, Any]) -> None:
    """One JSON document on stdout; letters that an encoding lacks are escaped as JSON does it."""
    has_all = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    DocumentAlone.write(json.dumps(data, indent=2, ensure_ascii=not has_all))


def print_error(message: str, label: str = "error") -> None:
    """A message on stderr; wrapped on a terminal only, so that logs keep one reason per line."""
    console = stderr()
    first, *rest = harmless(f"{label}: {message}").splitlines()
    for line in (first, *rest):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        pieces = _wrapped(line, console.width, indent) if console.is_terminal else [line]
        for piece in pieces or [""]:
            console.print(piece, soft_wrap=True, style={"error": "red", "warning": "yellow"}[label])


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    # An option or a name is one word, whatever its length.
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
