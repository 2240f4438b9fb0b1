"""What `moe-core bench` found, as tables: one for each layer and scheme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from moe_core.bench import OURS
from moe_core.cli.output import fields
from moe_core.cli.word_table import WordTable

if TYPE_CHECKING:
    from moe_core.bench.report import Report, Row


_HOW = (
    "median time of a whole layer, from tokens and ids to tokens, over several inputs and routings; the floor is "
    "reading the active experts once, or multiplying"
)
#: Columns of figures that are there where they were asked for, and what they are.
_EXTRAS = {
    "HOST us": "the host's time for one call outside a graph",
    "HELD MB": "the most memory that a forward holds beside weights and inputs",
    "/ROWS": "that over the rows between the products: 2I + I + H values for each routed row",
}
#: What problems begin with -> their word in a table; whatever else an implementation raises has failed.
_WORDS = {"not run: ": "not run", "wrong result: ": "wrong"}


def report_view(report: Report) -> RenderableType:
    """The tables, and the caption that they share."""
    parts: list[RenderableType] = []
    fastest = report.fastest()
    for (layer, scheme), rows in groupby(report.rows, key=lambda row: (row.layer, row.scheme)):
        parts += [Text(f"\n{layer}, {scheme}", style="bold"), *_table(fastest, list(rows))]
    caption = {"measured on": report.machine.caption, "how": _HOW, **_legend(report)}
    return Group(*parts, Text(), fields(caption))


def row_line(row: Row) -> str:
    """One figure in a line, as it comes."""
    what = row.problem if row.timing is None else f"{_micro(row.timing.microseconds)} us"
    return f"{row.layer}, {row.scheme}, T = {row.num_tokens}: {row.implementation} {what}"


def _legend(report: Report) -> dict[str, str]:
    """What the columns are that the tables have."""
    extras = _extras(report.rows)
    return {
        "T": "tokens of one forward",
        "SPREAD": "distance of the quartiles over the median",
        "FASTEST": "yes: by the median; maybe: samples do not tell it apart from that one",
        "/FLOOR": "the time over the floor's",
        "/OURS": "the time over that of moe-core as it chooses",
        "ERROR": "of the result's norm, relative to the layer in fp32",
        "BY": f"graph: replays of a captured graph; {report.machine.clock}: calls, timed by that clock",
        **{header: text for header, text in _EXTRAS.items() if header in extras},
    }


def _extras(rows: Sequence[Row]) -> list[str]:
    """Headers of the figures that were asked for beside the time."""
    with_issue = any(row.issue_microseconds is not None for row in rows)
    with_memory = any(row.held_bytes is not None for row in rows)
    host, *memory = _EXTRAS
    return [*[host] * with_issue, *memory * with_memory]


def _table(fastest: Mapping[tuple[str, str, int], Sequence[str]], rows: Sequence[Row]) -> Iterable[RenderableType]:
    extras = _extras(rows)
    result = WordTable("T", "IMPLEMENTATION", "us", "SPREAD", "FASTEST", "/FLOOR", "/OURS", "ERROR", "BY", *extras)
    timed = {row.implementation for row in rows if row.timing is not None}
    for num_tokens, of_count in groupby(rows, key=lambda row: row.num_tokens):
        alike = list(of_count)
        ours = next((row.timing.microseconds for row in alike if row.timing and row.implementation == OURS), None)
        result.add_row(str(num_tokens), "floor", _micro(alike[0].floor), *[""] * (6 + len(extras)))
        for row in alike:
            # What nobody tried, at any number of tokens, is in the notes alone.
            if row.implementation in timed or row.went_wrong:
                result.add_row("", row.implementation, *_figures(row, ours, fastest[row.place]), *_more(row, extras))
    yield result
    yield fields({"ran": "\n".join(_ran(rows)), "notes": "\n".join(_notes(rows))})


def _ran(rows: Sequence[Row]) -> Iterable[str]:
    """`name: what ran`; where that depends on the number of tokens, `name: T <= 64: this; T = 128: that`."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.implementation, []).append(row)
    for name, of_name in by_name.items():
        groups = ((runs, [row.num_tokens for row in alike]) for runs, alike in groupby(of_name, lambda row: row.runs))
        found = [(runs, counts) for runs, counts in groups if runs]
        if len({runs for runs, _ in found}) == 1:
            yield f"{name}: {found[0][0]}"
        elif found:
            first = of_name[0].num_tokens
            yield f"{name}: {'; '.join(f'{_range(counts, first)}: {runs}' for runs, counts in found)}"


def _range(counts: Sequence[int], first: int) -> str:
    """`T = 8`, `T = 8 to 64`, or `T <= 64` for a range that begins with the first number of all."""
    if len(counts) == 1:
        return f"T = {counts[0]}"
    return f"T <= {counts[-1]}" if counts[0] == first else f"T = {counts[0]} to {counts[-1]}"


def _notes(rows: Sequence[Row]) -> Iterable[str]:
    """Every problem and note once, with those that it is about, in the table's order: at which T, unless at all."""
    about: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        text = row.problem or row.note
        if text:
            about.setdefault(text, {}).setdefault(row.implementation, []).append(row.num_tokens)
    counts = len({row.num_tokens for row in rows})
    order = list(dict.fromkeys(row.implementation for row in rows))
    for text, of in sorted(about.items(), key=lambda item: min(map(order.index, item[1]))):
        names = [
            name if len(found) == counts else f"{name} (T = {', '.join(map(str, found))})" for name, found in of.items()
        ]
        yield f"{', '.join(names)}: {text}"


def _figures(row: Row, ours: float | None, fastest: Sequence[str]) -> list[str]:
    if row.timing is None:
        return [_word(row), "", "", "", "", "", ""]
    time = row.timing.microseconds
    return [
        _micro(time),
        f"{row.timing.spread * 100:.0f}%",
        "" if row.implementation not in fastest else "yes" if row.implementation == fastest[0] else "maybe",
        f"{time / row.floor:.2f}",
        "" if ours is None else f"{time / ours:.2f}",
        "" if row.error is None else f"{row.error:.0e}",
        row.timing.method,
    ]


def _word(row: Row) -> str:
    """What stands in the place of a time; the notes say why."""
    if not row.problem:
        return "-"
    return next((word for begins, word in _WORDS.items() if row.problem.startswith(begins)), "failed")


def _more(row: Row, extras: Sequence[str]) -> list[str]:
    issue = "" if row.issue_microseconds is None else f"{row.issue_microseconds:.1f}"
    held, share = "", ""
    if row.held_bytes is not None:
        held = f"{row.held_bytes / 1e6:.2f}"
        share = f"{row.held_bytes / row.activation_bytes:.2f}" if row.activation_bytes else ""
    return [text for header, text in zip(_EXTRAS, (issue, held, share), strict=True) if header in extras]


def _micro(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"
