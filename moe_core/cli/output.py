"""Where the commands print: results on stdout, everything else on stderr.

Rich leaves colours away and takes 80 columns when its output is no terminal, so a piped table is plain text.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


def stdout() -> Console:
    """The console for results. Made per call: tests and pipes replace `sys.stdout`."""
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """The console for progress and errors."""
    return Console(file=sys.stderr, highlight=False, markup=False, emoji=False)


def table(*headers: str) -> Table:
    """A borderless table whose cells wrap between words; longer words are cut, never lost, where there is no room."""
    result = _WordTable(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        result.add_column(header, overflow="fold")
    return result


class _WordTable(Table):
    """Each column first gets its longest word, and then what is left goes to those that still wrap.

    Rich alone narrows the widest columns alike, whatever is in them, and so breaks names, which can then be neither
    found nor copied.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give the columns their widths."""
        texts = [[str(cell) for cell in (column.header, *column.cells)] for column in self.columns]
        least = [max(map(cell_len, " ".join(cells).split()), default=0) for cells in texts]
        most = [max(map(cell_len, "\n".join(cells).splitlines()), default=0) for cells in texts]
        room = options.max_width - _GAP * (len(texts) - 1)
        for column, width in zip(self.columns, _shares(least, most, room), strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)


#: Columns between two columns of a table.
_GAP = 2


def _shares(least: list[int], most: list[int], room: int) -> list[int | None]:
    """A width for each column; those that need little more than their least get it before the others share the rest."""
    if sum(least) > room:
        return _around_the_longest(least, room)
    widths: list[int | None] = [*least]
    spare, order = room - sum(least), sorted(range(len(least)), key=lambda index: most[index] - least[index])
    for left, index in zip(range(len(order), 0, -1), order, strict=True):
        more = min(most[index] - least[index], spare // left)
        widths[index], spare = least[index] + more, spare - more
    return widths


def _around_the_longest(least: list[int], room: int) -> list[int | None]:
    """Widths that break other words, longest first, but not the longest, which is a name; all alike without room."""
    widths, longest = [*least], max(least)
    while sum(widths) > room:
        broken = max((width for width in widths if width < longest), default=0)
        if broken <= _BROKEN:
            return [None] * len(least)
        widths[widths.index(broken)] -= 1
    return [*widths]


#: Fewest columns of a column whose words are broken.
_BROKEN = 6


def fields(rows: dict[str, str]) -> Table:
    """Label and text, one pair per row, the texts wrapping in their own column; empty texts are left out."""
    result = Table.grid(padding=(0, 2))
    result.add_column(no_wrap=True, style="bold")
    result.add_column(overflow="fold")
    for label, text in rows.items():
        if text:
            result.add_row(label, text)
    return result


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
    first, *rest = f"{label}: {message}".splitlines()
    for line in (first, *rest):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        pieces = textwrap.wrap(line, console.width, subsequent_indent=indent) if console.is_terminal else [line]
        for piece in pieces or [""]:
            console.print(piece, soft_wrap=True, style={"error": "red", "warning": "yellow"}[label])


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Show a spinner on stderr while a step runs (on a terminal), and then how long it took."""
    console, start = stderr(), time.perf_counter()
    with console.status(f"{title} ..."):
        yield
    console.print(f"{title}: {time.perf_counter() - start:.1f} s", style="dim")


@contextmanager
def progress_bar(title: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr (on a terminal) for a step that can say how far it is, and then how long it took.

    Args:
        title: What is being done.
        unit: What the step counts: `bytes`, or something that is shown as it is (`windows`).

    Yields:
        What the step calls with (units done, units in all).
    """
    console, start = stderr(), time.perf_counter()
    amount = (DownloadColumn(),) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn(title), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
    console.print(f"{title}: {time.perf_counter() - start:.1f} s", style="dim")
