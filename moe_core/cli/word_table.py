"""Tables and labelled texts that break no word: a name or a number in pieces could be neither found nor copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

#: Columns of the terminal between two columns of a table, and before what goes on in a further line.
_GAP, _INDENT = 2, 4
#: Largest share of a line that labels take beside their texts.
_LABEL_SHARE = 0.4


class WordTable(Table):
    """A borderless table whose cells wrap between words.

    Each column first gets its longest word, and then what is left goes to those that still wrap. Where not even the
    longest words fit side by side, each row takes several lines, and so does the header: columns go on in a further
    line, as words do. Only a word that is longer than a whole line is cut, and never lost.
    """

    def __init__(self, *headers: str) -> None:
        """Columns by their headers."""
        super().__init__(box=None, pad_edge=False, padding=(0, _GAP // 2), header_style="bold")
        for header in headers:
            self.add_column(header, overflow="fold")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give the columns their places and widths."""
        texts = [[str(cell) for cell in (column.header, *column.cells)] for column in self.columns]
        least = [max(map(cell_len, " ".join(cells).split()), default=0) for cells in texts]
        most = [max(map(cell_len, "\n".join(cells).splitlines()), default=0) for cells in texts]
        lines = _lines(least, options.max_width)
        for place, line in enumerate(lines):
            room = options.max_width - (_INDENT if place else 0) - _GAP * (len(line) - 1)
            widths = _shares([least[index] for index in line], [most[index] for index in line], room)
            for index, width in zip(line, widths, strict=True):
                self.columns[index].width = width
        if len(lines) == 1:
            yield from super().__rich_console__(console, options)
        else:
            yield from self._rows(lines)

    def _rows(self, lines: Sequence[Sequence[int]]) -> Iterator[RenderableType]:
        """The header and every row, each in several lines."""
        rows = zip(*((column.header, *column.cells) for column in self.columns), strict=True)
        for number, cells in enumerate(rows):
            for place, line in enumerate(lines):
                # What every row begins with stays, empty or not.
                if place == 0 or any(str(cells[index]) for index in line):
                    style = "" if number else str(self.header_style)
                    columns = [self.columns[index] for index in line]
                    yield _line(columns, [cells[index] for index in line], style, is_further=place > 0)


class WordFields:
    """Labels and texts, a pair per row, the texts in a column of their own; empty texts are left out.

    A text stands below its label where the label would take more than its share of a line, or where a word of the text
    would not fit beside it.
    """

    def __init__(self, rows: Mapping[str, str]) -> None:
        """Texts by their labels."""
        self._rows = {label: text for label, text in rows.items() if text}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give the texts their places."""
        widths = {label: cell_len(label) for label in self._rows}
        most = int(_LABEL_SHARE * options.max_width)
        shared = max((width for width in widths.values() if width <= most), default=_INDENT - _GAP)
        for label, text in self._rows.items():
            longest = max(map(cell_len, text.split()), default=0)
            fits = longest <= options.max_width - shared - _GAP
            if widths[label] > shared or not fits:
                yield Text(label, style="bold")
                yield _field("", text, shared if fits else _INDENT - _GAP)
            else:
                yield _field(label, text, shared)


def _bare_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, _GAP // 2), show_header=False)


def _field(label: str, text: str, width: int) -> Table:
    """A text beside its label, or below it if that is empty; `width` is the label's."""
    result = _bare_table()
    result.add_column(width=width, no_wrap=True, style="bold")
    result.add_column(overflow="fold")
    result.add_row(label, text)
    return result


def _line(columns: Sequence[Column], cells: Sequence[RenderableType], style: str, *, is_further: bool) -> Table:
    """One line of one row, its columns below those of other rows."""
    result = _bare_table()
    if is_further:
        result.add_column(width=_INDENT - _GAP)
    for column in columns:
        result.add_column(width=column.width, justify=column.justify, overflow="fold", style=style)
    result.add_row(*[""] * is_further, *cells)
    return result


def _lines(least: Sequence[int], room: int) -> list[list[int]]:
    """The columns of each line, from the least width of each; all in one where they fit, else as many as do."""
    lines: list[list[int]] = [[]]
    used = 0
    for index, width in enumerate(least):
        gap = _GAP if lines[-1] else 0
        if lines[-1] and used + gap + width > room:
            lines.append([])
            used, gap = _INDENT, 0
        lines[-1].append(index)
        used += gap + width
    return lines


def _shares(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """A width for each column; those that need little more than their least get it before the others share the rest.

    A single column is no wider than there is room.
    """
    widths = [min(width, room) for width in least]
    spare, order = max(room - sum(widths), 0), sorted(range(len(least)), key=lambda index: most[index] - least[index])
    for left, index in zip(range(len(order), 0, -1), order, strict=True):
        more = min(most[index] - least[index], spare // left)
        widths[index], spare = widths[index] + more, spare - more
    return widths
