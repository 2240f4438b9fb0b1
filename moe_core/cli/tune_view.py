"""What `moe-core tune` shows: a table that fills on a terminal, a line per token count elsewhere, and the result."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from moe_core.cli.output import fields, print_error, stderr, stdout
from moe_core.cli.plan_view import machine_fields
from moe_core.cli.progress import duration
from moe_core.cli.tune_notes import changes, left_out, surer, taken
from moe_core.cli.word_table import WordTable
from moe_core.decision import Decision
from moe_core.environment import Environment
from moe_core.errors import counted
from moe_core.ranking import WORTH_A_RANGE

if TYPE_CHECKING:
    from moe_core.tuning.search import Step

#: Least seconds between two lines about what is done, and how often a second the live table is drawn, which takes some
#: of the time that is measured on a CPU.
_PACE, _REFRESH = 2.0, 2
#: What the last columns of the table are.
_LEGEND = {
    "SPREAD": "of the fastest: distance of its samples' quartiles over their median",
    "FASTEST": "by the median, and those that samples do not tell apart from it",
    "PLAN": "what plans take with these times: what tiers choose, or what they take for fewer tokens, unless another "
    f"is {WORTH_A_RANGE:.0%} faster and told apart from it",
}


class TuneView:
    """Shows one layer after the other; the table of a finished layer goes to stdout."""

    def __init__(
        self, machine: Environment, num_layers: int, counts: Sequence[int], seconds: float, limit: float
    ) -> None:
        """Prepare the bar.

        Args:
            machine: What is measured.
            num_layers: How many layers will be.
            counts: Token counts of each.
            seconds: About how long samples are taken at one count.
            limit: Seconds after which the command stops, infinity for no limit.
        """
        self._counts, self._limit = counts, limit
        self._sampling = seconds * len(counts) * num_layers
        self._console = stderr()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("token counts"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task("measuring", total=num_layers * len(counts))
        self._title, self._names, self._doing = "", [""], ""
        self._keeps_weights = False
        self._steps: list[Step] = []
        self._decision: Decision | None = None
        self._start = self._said = time.monotonic()
        self._machine, self._num_layers = machine, num_layers
        self._live = Live(get_renderable=self._view, console=self._console, transient=True, refresh_per_second=_REFRESH)

    def __enter__(self) -> Self:
        """Say what will be done, and show the table from now on."""
        stdout().print(machine_fields(self._machine))
        layers, counts = counted(self._num_layers, "layer"), counted(len(self._counts), "token count")
        work = f"{layers} at {counts}: about {duration(self._sampling)} of samples"
        limit = "" if self._limit == math.inf else f"; ends after {duration(self._limit)}, set-up included"
        self._console.print(f"{work}, set-up, compilation and slow kernels on top{limit}", soft_wrap=True)
        if threads := self._machine.thread_words:
            told = (
                f"times will count for programs that compute with {threads}, as this one; OMP_NUM_THREADS says how many"
            )
            self._console.print(told, soft_wrap=True)
        self._console.print("Ctrl-C keeps what was measured")
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the live table away; what an interrupted layer has stays."""
        self._live.stop()
        if error is not None and self._steps:
            self._print()

    def begin(self, title: str, keeps_weights: bool) -> None:
        """A layer begins; its plans are those of a model that keeps its weights, or of a layer that takes them over."""
        self._title, self._names, self._steps, self._doing = title, [], [], ""
        self._keeps_weights = keeps_weights
        self._start = time.monotonic()
        if not self._console.is_terminal:
            self._say(title)

    def candidates(self, names: Sequence[str]) -> None:
        """The combinations that will be measured."""
        self._names = list(names)

    def tell(self, doing: str) -> None:
        """What is done next: below the table on a terminal; elsewhere a line, if none has come for some seconds."""
        self._doing = doing
        if not self._console.is_terminal and time.monotonic() - self._said > _PACE:
            self._say(f"  {doing} ...")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)
        self._said = time.monotonic()

    def add(self, step: Step, decision: Decision) -> None:
        """One token count is done, and this is what follows for plans from all that are."""
        self._steps.append(step)
        self._decision = decision
        self._progress.update(self._task, advance=1)
        if not self._console.is_terminal:
            self._say(f"  T={step.num_tokens}: {_found(step)}")

    def skip(self, reason: str) -> None:
        """The layer cannot be measured, or no further."""
        print_error(reason, label="warning")
        self.finish()

    def stop(self, reason: str) -> None:
        """The layer's share of the time is used up."""
        self._console.print(f"{self._title}: {reason}", soft_wrap=True)

    def finish(self) -> None:
        """The layer is done: its table, and why some combinations are not in all of it."""
        missing = len(self._counts) - len(self._steps)
        self._progress.update(self._task, advance=missing)
        if self._steps:
            self._print()
        self._steps = []

    def _print(self) -> None:
        console = stdout()
        console.print(self._table(f"\n{self._title}: us per forward, {time.monotonic() - self._start:.0f}s"))
        console.print(fields({**self._notes(), **_LEGEND}))
        problems = self._steps[-1].problems
        if problems:
            console.print(fields({self._number(name): text + self._follows(name) for name, text in problems.items()}))

    def _notes(self) -> dict[str, str]:
        if self._decision is None:
            return {}
        steps = [step for step in self._steps if step.timings]
        found = {
            "changes": changes(steps, self._decision, self._number),
            "to be surer": surer(steps, self._decision, self._number),
            "left out": left_out(steps, self._decision, self._number, self._keeps_weights),
        }
        return {label: "\n".join(lines) for label, lines in found.items()}

    def _follows(self, name: str) -> str:
        """What a problem means for plans."""
        kept = "; none of its times is kept" if name in self._steps[-1].wrong else ""
        # The first by tier: beside it alone do times rank.
        chosen = "; plans choose it by its tier all the same, unless they exclude it" if name == self._names[0] else ""
        return kept + chosen

    def _view(self) -> RenderableType:
        table = self._table(self._title) if self._steps else Text(self._title)
        return Group(table, Text(self._doing, style="dim"), self._progress)

    def _table(self, title: str) -> RenderableType:
        """Token counts down, combinations by number across, and their names below."""
        numbers = list(map(self._number, self._names))
        rows = WordTable("T", *numbers, "SPREAD", "FASTEST", "PLAN")
        for column in rows.columns:
            column.justify = "right"
        for step in self._steps:
            best = min(step.microseconds.values(), default=0.0)
            cells = (self._cell(step.microseconds.get(name), best) for name in self._names)
            fastest = ", ".join(map(self._number, step.fastest))
            rows.add_row(str(step.num_tokens), *cells, _spread(step), fastest, self._planned(step.num_tokens))
        return Group(Text(title, style="bold"), rows, fields(dict(zip(numbers, self._names, strict=True))))

    def _number(self, name: str) -> str:
        """What stands for a name in the table."""
        return str(self._names.index(name) + 1)

    def _planned(self, num_tokens: int) -> str:
        name = taken(self._decision, num_tokens) if self._decision else ""
        return self._number(name) if name in self._names else "-"

    def _cell(self, microseconds: float | None, best: float) -> Text:
        if microseconds is None:
            return Text("-", style="dim")
        return Text(_shown(microseconds), style="bold green" if microseconds == best else "")


def _found(step: Step) -> str:
    """The fastest at one token count and how sure that is, in a line."""
    if not step.timings:
        return "nothing runs"
    best, *others = step.fastest
    time = _shown(step.microseconds[best])
    close = f", not told apart from {len(others)} of them" if others else ""
    return f"{best}, {time} us (spread {_spread(step)}), is the fastest of {len(step.timings)}{close}"


def _spread(step: Step) -> str:
    """Spread of the fastest as a percentage, `-` where a single sample has none."""
    timing = step.timings[step.fastest[0]] if step.timings else None
    return f"{timing.spread:.0%}" if timing and len(timing.samples) > 1 else "-"


def _shown(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 1000 else f"{microseconds:.4g}"
