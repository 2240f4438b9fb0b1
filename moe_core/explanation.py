"""Decisions and refusals as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_core.errors import counted
from moe_core.findings import BY_NAME, DtypeChoice, Findings, Ranked, Reason, WorkloadDecision
from moe_core.misses import Misses, relevant
from moe_core.request import Pins

#: How everything is had that was folded or left out.
IN_FULL = "explain(full=True)"
#: Of the last in an order, which has no next one, what sets it apart is said of the neighbour that it has.
FROM_BEFORE = "from the one before"
#: Most lines of reasons in a refusal, and how many a workload has at least.
_MOST_LISTED, _FEWEST_LISTED = 16, 3


def explanation_lines(decision: Findings, *, full: bool) -> Iterator[str]:
    """What `Decision.explain` says, line by line."""
    environment = decision.environment
    arch = f" {environment.arch}" if environment.arch else ""
    yield f"environment: {environment.device_type}{arch} ({environment.source})"
    if environment.variables:
        yield f"variables: {', '.join(f'{name}={value}' for name, value in environment.variables)}"
    for plugin in decision.plugins:
        if plugin.error:
            yield f"plugin {plugin.name}: {plugin.status}: {plugin.error}"
    for workload in decision.workloads:
        chosen = "nothing fits"
        if workload.ranked:
            first = workload.ranked[0]
            chosen = f"{first.candidate.full_name}, {dtype_text(first.dtype)}; {why(decision, workload)}"
        yield f"workload {workload.title}: {chosen}"
        yield f"  {stages(workload)}"
    yield from (f"measurements: {line}" for line in decision.measurements)
    for workload in decision.workloads:
        if workload.ranked:
            yield from _order(decision, workload)
    yield from _every_reason(decision) if full else _folded(decision)
    yield f"error: {decision.error}" if decision.error else f"weight layout: {decision.weight_layout}"


def why(decision: Findings, workload: WorkloadDecision) -> str:
    """What put the first one there: `pinned: runner torch; first of 6 that fit: tier generic`."""
    pins = decision.request.pins(workload.workload)
    words = [f"pinned: {pins}"] if pins != Pins() and not workload.fallback else []
    count, which = len(workload.ranked) + len(workload.unshared), "that fit"
    if workload.outranked_by:
        words.append(f"{workload.outranked_by} {workload.outranked_because}")
        count, which = len(workload.ranked), "that have it"
    told = (*words, *_first_of(workload, count, which), _doubt(workload), _tie(decision, workload))
    return "; ".join(filter(None, told))


def _first_of(workload: WorkloadDecision, count: int, which: str) -> Iterator[str]:
    """`first of 6 that fit: tier generic`, `preferred: torch, as are 3 of 6 that fit; first of these: tier generic`."""
    first, alike = workload.ranked[0], len(workload.alike_preferred)
    if first.preferred and count > 1:
        how_many = "alone" if alike == 1 else f"as are {alike}"
        yield f"preferred: {', '.join(first.preferred)}, {how_many} of {count} {which}"
        if alike > 1:
            yield f"first of these: {first.because}"
    elif count > 1:
        yield f"first of {count} {which}: {first.because}"
    elif not workload.outranked_by:
        yield ", ".join(dict.fromkeys(filter(None, (first.because, first.provenance))))


def _doubt(workload: WorkloadDecision) -> str:
    """Which of the order are as fast as the first for all that samples tell, by their places; "" if none is."""
    which = _places_of(workload.not_told_apart, workload)
    if not which:
        return ""
    return f"not told apart from {which}: their samples overlap, moe-core tune with more --repeats may tell"


def _tie(decision: Findings, workload: WorkloadDecision) -> str:
    """That its name alone put the first there, before which others, and how to decide otherwise; "" if not so."""
    if not workload.ranked or workload.ranked[0].because != BY_NAME:
        return ""
    which = _places_of(workload.tied_by_name, workload) or "what has another weight layout"
    # Nobody measures layers of several ranks.
    is_measured = decision.request.ep_size == 1
    how = "moe-core tune on that machine would decide by times" if is_measured else "pin or prefer the one you know"
    return f"nothing that was declared or measured tells it from {which}: {how}"


def _places_of(entries: Sequence[Ranked], workload: WorkloadDecision) -> str:
    """`that in place 2`, `those in place 2, 4`, "" of none."""
    places = [str(place) for place, entry in enumerate(workload.ranked, start=1) if entry in entries]
    return f"{'that' if len(places) == 1 else 'those'} in place {', '.join(places)}" if places else ""


def dtype_text(dtype: DtypeChoice) -> str:
    """`fp8/row_128 by pin, asked for int8`."""
    return f"{dtype.token_dtype} by {dtype.rule}{f', asked for {dtype.requested}' if dtype.requested else ''}"


def refusal(decision: Findings, alternatives: Sequence[str]) -> str:
    """What was asked, what is missing, and what would run instead, in about 25 lines at most.

    Args:
        decision: One without a plan.
        alternatives: What would run if nothing were pinned, best first.
    """
    request, environment = decision.request, decision.environment
    machine = f"{environment.device_type} {environment.arch}".strip()
    lines = [f"no backend combination fits this layer on {machine}: {decision.error}"]
    lines.append(f"  asked: {request.quant}, {request.dtype}, {request.activation}, ep {request.ep_size}")
    if not any(workload.specs for workload in decision.workloads):
        return "\n".join([*lines, "  no plugin declares any: see moe-core list-backends"])
    lines += _against(decision)
    lines += [f"  plugin {plugin.name} {plugin.status}: {plugin.error}" for plugin in decision.plugins if plugin.error]
    if any(request.pins(workload.workload) != Pins() for workload in decision.workloads):
        more = f" and {len(alternatives) - 1} more" if len(alternatives) > 1 else ""
        lines.append(f"  would run without the pins: {f'{alternatives[0]}{more}' if alternatives else 'nothing'}")
    if alternatives:
        lines.append("  change what a line names, or leave the pins out")
        lines.append("  LayerRequest(allow_fallback=True) lets another combination serve")
    return "\n".join([*lines, f"  every reason: error.decision.{IN_FULL}"])


def _against(decision: Findings) -> list[str]:
    """What is against the workloads that have nothing; workloads of which the same is to say are one."""
    found: dict[tuple[Pins, tuple[str, ...]], list[str]] = {}
    for workload in decision.workloads:
        if not workload.ranked:
            pins = decision.request.pins(workload.workload)
            misses = Misses.of(decision.request, [relevant(pins, workload)]).nearest
            lines = tuple(line for miss in misses for line in miss.lines)
            found.setdefault((pins, lines), []).append(workload.phase)
    every = []
    for (pins, lines), phases in found.items():
        shown = lines[: max(_FEWEST_LISTED, _MOST_LISTED // len(found))]
        more = [f"and {counted(len(lines) - len(shown), 'more line')}"] if len(lines) > len(shown) else []
        every += [f"  workload {', '.join(phases)}, {pins}:", *(f"    {line}" for line in (*shown, *more))]
    return every


def stages(workload: WorkloadDecision) -> str:
    """How many are left after each stage: `17 of 45 specs fit alone; of their pairs 12 of 12`."""
    joined, unjoined = workload.joined, workload.num_unjoined
    specs = f"{sum(not spec.is_refused for spec in workload.specs)} of {counted(len(workload.specs), 'spec')} fit alone"
    pairs = f"of their pairs {sum(not pair.reasons for pair in joined)} of {len(joined)}"
    return f"{specs}; {pairs}{f' ({unjoined} more differ in format)' if unjoined else ''}"


def unlisted(decision: Findings, workload: WorkloadDecision) -> str:
    """How many fit beside those in the order, and why they are not in it; "" if none does."""
    return f"and {len(workload.unshared)} more {_unshared(decision, workload)}" if workload.unshared else ""


def _unshared(decision: Findings, workload: WorkloadDecision) -> str:
    """What is said of that which fits, but is not in the order."""
    if len(decision.request.workloads) > 1 or workload.outranked_by:
        return "fit, but lack what all workloads share"
    if decision.request.deterministic:
        return "fit, but a deterministic layer keeps the first combination"
    return f"fit, but with other weight layouts than {decision.weight_layout}, which the first has"


def _order(decision: Findings, workload: WorkloadDecision) -> Iterator[str]:
    apart = f" [set apart from the next by, the last {FROM_BEFORE}]" if len(workload.ranked) > 1 else ""
    yield f"workload {workload.title}: order of those that fit{apart}"
    for place, ranked in enumerate(workload.ranked, start=1):
        yield f"  {place}. {ranked.candidate.full_name} [{ranked.because}] {dtype_text(ranked.dtype)}"
        yield from (f"     note: {note}" for note in ranked.dtype.notes)
    yield from (f"  {line}" for line in filter(None, (unlisted(decision, workload),)))
    yield from (f"  note: {note}" for note in (workload.fallback, *workload.notes) if note)


def _folded(decision: Findings) -> Iterator[str]:
    misses = Misses.of(decision.request, decision.workloads)
    for heading, group in misses.parts():
        yield heading
        yield from (f"  {line}" for miss in group for line in miss.lines)
    yield f"every reason: {IN_FULL}"


def _every_reason(decision: Findings) -> Iterator[str]:
    for workload, is_new in decision.sections():
        if not is_new:
            continue
        yield f"workload {workload.phase}: each spec alone"
        for spec in workload.specs:
            yield from _verdict(spec.declared.full_name, spec.reasons)
        yield f"workload {workload.phase}: pairs of those that passed"
        for pair in workload.joined:
            yield from _verdict(pair.candidate.full_name, pair.reasons)
        yield from (f"  {line}" for line in left_out(decision, workload))


def left_out(decision: Findings, workload: WorkloadDecision) -> Iterator[str]:
    """What neither a pair's verdict nor the order says."""
    if workload.num_unjoined:
        yield f"{workload.num_unjoined} more: their formats differ"
    if workload.unshared:
        names = ", ".join(candidate.full_name for candidate in workload.unshared)
        yield f"{_unshared(decision, workload)}: {names}"


def _verdict(name: str, reasons: tuple[Reason, ...]) -> Iterator[str]:
    yield f"  {name}: {'no' if reasons else 'yes'}"
    yield from (f"    {reason}" for reason in reasons)
