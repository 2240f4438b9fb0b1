"""A chart of a report: every implementation's time over the floor, against the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_core.bench import OURS
from moe_core.bench.report import Report, Row
from moe_core.errors import MoeCoreError, SpecError

_COLUMNS = 2
_PANEL = (7.0, 4.2)


def write_plot(report: Report, path: Path) -> None:
    """Write one panel for each layer and scheme that has figures.

    Args:
        report: What was measured.
        path: The file; its ending says in which format.

    Raises:
        MoeCoreError: matplotlib is not installed, or cannot write such a file.
    """
    panels = _panels(report.rows)
    figure = _figure(len(panels))
    names = dict.fromkeys(row.implementation for row in report.rows)
    # Of one kind in all panels; ours stands out.
    colours = {name: "black" if name == OURS else f"C{place}" for place, name in enumerate(names)}
    for place, ((layer, scheme), rows) in enumerate(panels.items()):
        axes = figure.add_subplot(-(-len(panels) // _COLUMNS), min(_COLUMNS, len(panels)), place + 1)
        _draw(axes, rows, colours)
        axes.set_title(f"{layer}, {scheme}")
    figure.suptitle("time of a whole layer over the floor")
    figure.text(0.5, 0.0, report.machine.caption, ha="center", va="top", fontsize=7, wrap=True)
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise MoeCoreError(f"chart {path}: cannot be written ({error})") from error


def require_format(path: Path) -> None:
    """Raise `SpecError` unless charts are written in the format of a file's ending, or as `require_matplotlib` does."""
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    # matplotlib appends its usual ending where there is none.
    if (ending := path.suffix.lower().removeprefix(".")) and ending not in known:
        raise SpecError(f"chart {path}: no format {ending!r} is known, its ending must be one of {', '.join(known)}")


def require_matplotlib() -> Any:
    """The module `matplotlib.figure`; raises `MoeCoreError` with what to install if it is missing."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MoeCoreError(
            f"charts are drawn with matplotlib, which cannot be imported here ({error}); "
            "install it: pip install 'moe-core[bench]', or draw the written JSON elsewhere: moe-core bench --read"
        ) from error
    return matplotlib.figure


def _figure(num_panels: int) -> Any:
    columns, rows = min(_COLUMNS, max(1, num_panels)), max(1, -(-num_panels // _COLUMNS))
    # Not pyplot, which would keep it and choose a window system.
    return require_matplotlib().Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), layout="constrained")


def _panels(rows: Sequence[Row]) -> Mapping[tuple[str, str], list[Row]]:
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.timing is not None:
            panels.setdefault((row.layer, row.scheme), []).append(row)
    return panels


def _draw(axes: Any, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.timing is not None:
            lines.setdefault(row.implementation, []).append((row.num_tokens, row.timing.microseconds / row.floor))
    for name, points in lines.items():
        width = 2.2 if name == OURS else 1.2
        line = {"color": colours[name], "linewidth": width, "marker": "o", "markersize": 3}
        axes.plot(*zip(*sorted(points), strict=True), label=name, **line)
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row.num_tokens for row in rows})
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.set_xlabel("tokens")
    axes.set_ylabel("times the floor")
    axes.legend(fontsize=7)
