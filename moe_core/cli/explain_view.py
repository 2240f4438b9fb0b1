"""How a decision is explained on a terminal: why it fell so, what else fits in order, and what does not, folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from moe_core.cli.output import fields, verdict
from moe_core.cli.plan_view import request_line
from moe_core.cli.word_table import WordTable
from moe_core.decision import Decision
from moe_core.explanation import FROM_BEFORE, IN_FULL, dtype_text, left_out, stages, unlisted, why
from moe_core.findings import Ranked, Reason, WorkloadDecision
from moe_core.misses import Misses, short_titles

_T = TypeVar("_T")
#: Alternatives that are listed over all workloads, and for each order of many at least; `-v` lists all.
_MOST_LISTED, _FEWEST_LISTED = 10, 3


def explain_view(layers: str, decision: Decision, spelled: Callable[[str], str], *, full: bool) -> RenderableType:
    """What was considered for one group of layers.

    Args:
        layers: Title of the group: `layers 0-3`.
        decision: What was decided about it.
        spelled: Puts reasons into the words of the command line.
        full: Every spec and pair with each reason, instead of the near misses and how many others there are.
    """
    heading = f"why for {layers}" if decision.is_feasible else f"{layers}: no plan"
    rows = {"asked": "" if decision.is_feasible else request_line(decision.request)}
    titled = list(zip(short_titles(decision.workloads), decision.workloads, strict=True))
    rows |= {titles: text for text, titles in _alike((_why(decision, w), title) for title, w in titled)}
    rows["measurements"] = "\n".join(decision.measurements)
    orders = _alike(
        ((workload.ranked, unlisted(decision, workload)), title)
        for title, workload in titled
        if workload.ranked and len(workload.ranked) + len(workload.unshared) > 1
    )
    most = None if full else max(_FEWEST_LISTED, _MOST_LISTED // max(len(orders), 1))
    reports = _everything(decision, spelled) if full else _misses(decision, spelled)
    said = fields({f"  {label}": spelled(text) for label, text in rows.items()})
    return Group(
        Text(f"\n{heading}", style="bold"), said, *(_order(*order, titles, most) for order, titles in orders), *reports
    )


def _why(decision: Decision, workload: WorkloadDecision) -> str:
    # The plan says them, where there is one.
    notes = () if decision.is_feasible else (workload.fallback, *workload.notes)
    first = why(decision, workload) if workload.ranked else "nothing fits"
    return "\n".join(filter(None, (first, stages(workload), *notes)))


def _alike(said: Iterable[tuple[_T, str]], between: str = "; ") -> list[tuple[_T, str]]:
    """What is said of workloads, each thing once, with the titles of all of which it is said."""
    titles: dict[_T, list[str]] = {}
    for what, title in said:
        titles.setdefault(what, []).append(title)
    return [(what, between.join(of)) for what, of in titles.items()]


def _order(ranked: Sequence[Ranked], others: str, titles: str, most: int | None) -> RenderableType:
    """The candidates that fit; a dispatch dtype that they share is in the title, and what it is not is below."""
    dtypes = [dtype_text(entry.dtype) for entry in ranked]
    shared = len(set(dtypes)) == 1
    title = f"\nworkload {titles}: what fits, in order{f' (dispatch dtype {dtypes[0]})' if shared else ''}"
    rows = WordTable("", "COMBINATION", "SET APART FROM THE NEXT BY", *(() if shared else ("DISPATCH DTYPE",)))
    for place, (entry, dtype) in enumerate(zip(ranked[:most], dtypes, strict=False), start=1):
        because = entry.because if most is None else entry.short_because
        if 1 < place == len(ranked):
            because += f", {FROM_BEFORE}"
        rows.add_row(str(place), entry.candidate.full_name, because, *(() if shared else (dtype,)))
    left = len(ranked) - len(ranked[:most])
    more = [f"and {left} more"] if left else []
    return Group(
        Text(title, style="bold"),
        rows,
        *(Text(line, style="dim") for line in (*more, *filter(None, (others,)))),
        *_dtype_notes(ranked[:most]),
    )


def _dtype_notes(ranked: Sequence[Ranked]) -> Iterator[RenderableType]:
    """What is to say about dispatch dtypes, each thing once after the places of those about which it is said."""
    notes = ((note, str(place)) for place, entry in enumerate(ranked, start=1) for note in entry.dtype.notes)
    said = _alike(notes, ", ")
    if said:
        yield Text()
        yield fields({"dispatch dtype": "\n".join(f"{places}: {note}" for note, places in said)})


def _misses(decision: Decision, spelled: Callable[[str], str]) -> Iterator[RenderableType]:
    for heading, misses in Misses.of(decision.request, decision.workloads).parts():
        tree = Tree(Text(f"\n{heading}", style="bold"), guide_style="dim")
        for miss in misses:
            branch = tree.add(Text(miss.title))
            for reason in () if miss.is_folded else miss.reasons:
                branch.add(Text(spelled(str(reason))))
        yield tree
    yield Text(spelled(f"\nevery reason: {IN_FULL}; those against one backend: pin it"))


def _everything(decision: Decision, spelled: Callable[[str], str]) -> Iterator[RenderableType]:
    for workload, is_new in decision.sections():
        if is_new:
            title = f"\nworkload {workload.title}"
            own = ((spec.declared.full_name, spec.reasons) for spec in workload.specs)
            yield _verdicts(f"{title}: each spec alone", own, spelled)
            joined = ((pair.candidate.full_name, pair.reasons) for pair in workload.joined)
            yield _verdicts(f"{title}: pairs of those that passed", joined, spelled)
            yield from (Text(line, style="dim") for line in left_out(decision, workload))


def _verdicts(title: str, rows: Iterable[tuple[str, tuple[Reason, ...]]], spelled: Callable[[str], str]) -> Tree:
    tree = Tree(Text(title, style="bold"), guide_style="dim")
    for name, reasons in rows:
        branch = tree.add(Text.assemble(verdict("no" if reasons else "yes"), "  " if not reasons else "   ", name))
        for reason in reasons:
            branch.add(Text(spelled(str(reason))))
    if not tree.children:
        tree.add(Text("none"))
    return tree
