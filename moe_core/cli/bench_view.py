"""What `moe-core bench` found, as tables: one for each layer and scheme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from moe_core.bench import OURS
from moe_core.cli.output import fields, table

if TYPE_CHECKING:
    from moe_core.bench.report import Report, Row


def report_view(report: Report) -> RenderableType:
    """The tables, and the caption that they share."""
    parts: list[RenderableType] = []
    for (layer, scheme), rows in groupby(report.rows, key=lambda row: (row.layer, row.scheme)):
        parts += [Text(f"\n{layer}, {scheme}", style="bold"), *_table(list(rows))]
    return Group(*parts, Text(), fields({"measured on": report.machine.caption, "how": _how(report)}))


def _how(report: Report) -> str:
    return (
        "median time of a whole layer, from tokens and ids to tokens, over several inputs and routings; spread is the "
        "distance of the quartiles over the median; captured calls are replays of a graph, others are timed by the "
        f"{report.machine.clock} clock; the floor is reading the active experts once, or multiplying"
    )


def _table(rows: Sequence[Row]) -> Iterable[RenderableType]:
    with_issue = any(row.issue_microseconds is not None for row in rows)
    with_memory = any(row.held_bytes is not None for row in rows)
    more = [*["HOST us"] * with_issue, *["HELD MB", "/ ROWS"] * with_memory]
    result = table("T", "IMPLEMENTATION", "us", "SPREAD", "/ FLOOR", "/ OURS", "ERROR", "BY", *more)
    timed = {row.implementation for row in rows if row.timing is not None}
    for num_tokens, of_count in groupby(rows, key=lambda row: row.num_tokens):
        alike = list(of_count)
        ours = next((row.timing.microseconds for row in alike if row.timing and row.implementation == OURS), None)
        result.add_row(str(num_tokens), "floor", _micro(alike[0].floor), *[""] * (5 + len(more)))
        for row in alike:
            # What never ran is in the notes alone.
            if row.implementation in timed:
                result.add_row("", row.implementation, *_figures(row, ours), *_more(row, with_issue, with_memory))
    yield result
    runs = {f"{row.implementation}: {row.runs}": None for row in rows if row.runs}
    yield fields({"ran": "\n".join(runs), "notes": "\n".join(_notes(rows))})


def _notes(rows: Sequence[Row]) -> Iterable[str]:
    """Every problem and note once, with those that it is about: at which T, unless at all of them."""
    about: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        text = row.problem or row.note
        if text:
            about.setdefault(text, {}).setdefault(row.implementation, []).append(row.num_tokens)
    counts = len({row.num_tokens for row in rows})
    for text, of in about.items():
        names = [
            name if len(found) == counts else f"{name} (T = {', '.join(map(str, found))})" for name, found in of.items()
        ]
        yield f"{', '.join(names)}: {text}"


def _figures(row: Row, ours: float | None) -> list[str]:
    if row.timing is None:
        return ["-", "", "", "", "", "-"]
    time = row.timing.microseconds
    return [
        _micro(time),
        f"{row.timing.spread * 100:.0f} %",
        f"{time / row.floor:.2f}",
        "" if ours is None else f"{time / ours:.2f}",
        "" if row.error is None else f"{row.error:.0e}",
        row.timing.method,
    ]


def _more(row: Row, with_issue: bool, with_memory: bool) -> list[str]:
    issue = "" if row.issue_microseconds is None else f"{row.issue_microseconds:.1f}"
    held, share = "", ""
    if row.held_bytes is not None:
        held = f"{row.held_bytes / 1e6:.2f}"
        share = f"{row.held_bytes / row.activation_bytes:.2f}" if row.activation_bytes else ""
    return [*[issue] * with_issue, *[held, share] * with_memory]


def _micro(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"
