"""What `moe-core verify` found: a table for people, JSON for scripts, JUnit XML for CI systems."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from xml.etree import ElementTree

import attrs
from rich.console import Group, RenderableType
from rich.text import Text

from moe_core.cli.alike import in_one, without_numbers
from moe_core.cli.output import fields
from moe_core.cli.plan_view import machine_fields
from moe_core.cli.word_table import WordTable
from moe_core.environment import Environment

if TYPE_CHECKING:
    from moe_core.testing.outcome import Result

SCHEMA = 1
_Value = TypeVar("_Value")
_STATUSES = ("passed", "failed", "not run")


@attrs.frozen
class Report:
    """The results of one backend on one machine.

    Attributes:
        name: Of the plugin.
        environment: The machine.
        results: Of all cases, in their order.
        seconds: From the start to the end, in however many processes.
    """

    name: str
    environment: Environment
    results: tuple[Result, ...]
    seconds: float

    @property
    def counts(self) -> Counter[str]:
        """Status -> number of results."""
        return _counts(self.results)

    @property
    def status(self) -> str:
        """`failed`, `not run` if no layer could be tried, else `passed`."""
        if self.counts["failed"]:
            return "failed"
        ran = any(result.status == "passed" and result.subject != self.name for result in self.results)
        return "passed" if ran else "not run"


def pair_of(result: Result) -> str:
    """What a subject begins with: the plugin, or a pair."""
    return result.subject.partition(", ")[0]


def summary_of(results: Iterable[Result]) -> str:
    """`3 passed, 0 failed, 1 not run`."""
    counts = _counts(results)
    return ", ".join(f"{counts[status]} {status}" for status in _STATUSES)


def _counts(results: Iterable[Result]) -> Counter[str]:
    return Counter(result.status for result in results)


def view(report: Report, verbose: bool) -> RenderableType:
    """The table of one backend, and its failures in a line each, or everything in full: what is alike once."""
    summary = f"{summary_of(report.results)}, {report.seconds:.0f} s"
    title = Text.assemble("\n", (report.name, "bold"), ": ", _coloured(report.status), f" ({summary})")
    rows = WordTable("", "PASSED", "FAILED", "NOT RUN", "WHY NOT")
    for results in _grouped(report.results, pair_of):
        counts = _counts(results)
        rows.add_row(pair_of(results[0]), *(str(counts[status] or "-") for status in _STATUSES), _why_not(results))
    details = _everything(report.results) if verbose else _first_failures(report.results)
    return Group(title, machine_fields(report.environment), rows, *details)


def _why_not(results: Iterable[Result]) -> str:
    """The first reason of what was not run, and for how many of these it holds; "" if all ran."""
    reasons = [_first_line(result.text) for result in results if result.status == "not run"]
    if len(reasons) < 2:
        return "".join(reasons)
    return f"{reasons[0]} ({reasons.count(reasons[0])} of {len(reasons)})"


def _first_line(text: str) -> str:
    """What a text begins with; a plugin's message may hold whole tracebacks."""
    first, *others = text.strip().splitlines() or [""]
    return f"{first} ..." if others else first


def _first_failures(results: Iterable[Result]) -> Iterator[RenderableType]:
    """The first failure of each check in a line, of those that read alike the first, with what else there is.

    Alike is what differs in numbers alone: an error has another size in every layer.
    """
    by_check = _grouped((result for result in results if result.status == "failed"), lambda result: result.check)
    for alike in _grouped(by_check, lambda of_check: without_numbers(_first_line(of_check[0].text))):
        first, *others = itertools.chain.from_iterable(alike)
        checks = [of_check[0].check for of_check in alike[1:]]
        also = f"likewise {', '.join(checks)}" if checks else ""
        note = f" (and {len(others)} more: -v)" if others else ""
        yield _detail([first], _first_line(first.text) + note, also)


def _everything(results: Iterable[Result]) -> Iterator[RenderableType]:
    """Every result; of one check, what says the same but for numbers shares a text, and the traceback of the first."""
    for alike in _grouped(results, lambda result: (result.status, result.check, without_numbers(result.text))):
        yield _detail(alike, in_one([result.text for result in alike]), alike[0].traceback)


def _detail(alike: Sequence[Result], *texts: str) -> RenderableType:
    """Results of one check, on whatever they are, and what there is to say of them."""
    lines = [*(result.subject for result in alike), *filter(None, texts)]
    return fields({f"{alike[0].status} {alike[0].check}": "\n".join(lines)})


def _grouped(values: Iterable[_Value], key: Callable[[_Value], Hashable]) -> list[list[_Value]]:
    """Values by their key, in the order in which keys are first met."""
    found: dict[Hashable, list[_Value]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return list(found.values())


def _coloured(status: str) -> Text:
    return Text(status, style={"passed": "green", "failed": "red"}.get(status, "yellow"))


def to_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Everything, as one JSON document."""
    return {
        "schema": SCHEMA,
        "backends": [
            {
                "name": report.name,
                "environment": report.environment.to_json(),
                "status": report.status,
                "counts": {status: report.counts[status] for status in _STATUSES},
                "results": [attrs.asdict(result) for result in report.results],
            }
            for report in reports
        ],
    }


def to_junit(reports: Sequence[Report]) -> bytes:
    """Everything, as a JUnit XML document with a suite for each backend."""
    root = ElementTree.Element("testsuites")
    for report in reports:
        counts = report.counts
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=report.name,
            tests=str(len(report.results)),
            failures=str(counts["failed"]),
            skipped=str(counts["not run"]),
            time=f"{sum(result.seconds for result in report.results):.3f}",
        )
        for result in report.results:
            attributes = {"classname": f"{report.name}.{result.check}", "name": result.subject}
            case = ElementTree.SubElement(suite, "testcase", attributes, time=f"{result.seconds:.3f}")
            if result.status != "passed":
                kind = "failure" if result.status == "failed" else "skipped"
                ElementTree.SubElement(case, kind, message=result.text).text = result.traceback
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document
