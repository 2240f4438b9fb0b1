"""The comparison itself: which layers, how many tokens, who; and one row for each, whatever happens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from moe_core.bench.contenders import Bound, Combination, Contender, PeerContender
from moe_core.bench.memory import activation_bytes, free_bytes, held_bytes
from moe_core.bench.peers import Peer
from moe_core.bench.report import NOT_RUN, Machine, Report, Row
from moe_core.environment import Environment
from moe_core.errors import MoeCoreError, UnknownNameError, counted, in_a_line, is_interrupt
from moe_core.payloads import Tensor
from moe_core.request import LayerRequest
from moe_core.tuning.ceilings import Ceilings, measure_ceilings, operands_of
from moe_core.tuning.layers import Batches, bytes_per_expert, layer_floor, random_weights, release_memory
from moe_core.tuning.reference import Reference
from moe_core.tuning.timing import CaptureError, Prepared, Timing, issue_microseconds, nobody, prepare, take_turns

#: Share of the free memory that a peer's copies may take; the rest is for rows and for torch's allocator.
_USABLE = 0.8


@attrs.frozen(kw_only=True)
class Sweep:
    """What to compare.

    Attributes:
        layers: (name of the sizes, request) pairs; requests bring no pins.
        tokens: Numbers of tokens.
        combinations: Ours.
        peers: Those of others.
        environment: This machine, probed for the device that is to be used.
        repeats: Samples of each figure.
        seconds: Time after which no more samples are taken, at least `timing.FEWEST_SAMPLES` each.
        clock: For what is not captured.
        with_issue_time: Whether to time the host at one token.
        with_memory: Whether to see what a forward holds.
        told: Called with what is done next, in words, before each step and each sample.
    """

    layers: tuple[tuple[str, LayerRequest], ...]
    tokens: tuple[int, ...]
    combinations: tuple[Combination, ...]
    peers: tuple[Peer, ...]
    environment: Environment
    repeats: int = 15
    seconds: float | None = None
    clock: str = "wall"
    with_issue_time: bool = False
    with_memory: bool = False
    told: Callable[[str], None] = nobody

    @property
    def device(self) -> str:
        """Type of the device."""
        return self.environment.device_type

    @property
    def num_rows(self) -> int:
        """How many rows there will be, those of what does not run included."""
        return len(self.layers) * len(set(self.tokens)) * (len(self.combinations) + len(self.peers))


@attrs.frozen(eq=False, kw_only=True)
class _Case:
    """One layer with weights, or why it has none."""

    name: str
    request: LayerRequest
    weights: Mapping[str, Tensor]
    problem: str = ""


@attrs.frozen(eq=False, kw_only=True)
class _Entry:
    """A contender on the way to its figure: its row so far, and what is timed unless there is a problem."""

    row: Row
    ready: Prepared | None = None


@attrs.define
class _Collected:
    """The rows so far, which are shown as they come."""

    sweep: Sweep
    machine: Machine
    shown: Callable[[Report, Sequence[Row]], None]
    rows: list[Row] = attrs.field(factory=list)

    def add(self, rows: Sequence[Row]) -> None:
        """Rows that stay as they are."""
        self.rows += rows
        self.shown(self.report(), rows)

    def update(self, rows: Sequence[Row]) -> None:
        """Rows whose samples are not all taken."""
        self.shown(self.report(rows), ())

    def report(self, unfinished: Sequence[Row] = ()) -> Report:
        return Report(self.machine, tuple(sorted((*self.rows, *unfinished), key=_order(self.sweep))))


def run(sweep: Sweep, shown: Callable[[Report, Sequence[Row]], None]) -> Report:
    """Measure everything.

    Args:
        sweep: What to compare.
        shown: Called with the report so far, and with the rows in it that were finished since the last call. After each
            round of samples there are none: those that are being timed are in the report with a note that says so.

    Raises:
        UnknownNameError: A combination names nothing; other errors become rows.
    """
    sweep.told("the rates of this machine")
    operands = [operands_of(request) for _, request in sweep.layers]
    ceilings = measure_ceilings(sweep.device, operands, sweep.clock)
    release_memory(sweep.device)
    machine = Machine.here(
        sweep.environment, ceilings, sweep.clock, tuple(dict.fromkeys(peer.module for peer in sweep.peers))
    )
    collected = _Collected(sweep, machine, shown)
    for layers in _together(sweep):
        cases = [_drawn(name, request, sweep) for name, request in layers]
        # From the largest on: what tunes itself at its first call does so there, as in a prefill.
        for num_tokens in sorted(set(sweep.tokens), reverse=True):
            _compare(sweep, cases, num_tokens, ceilings, collected)
        del cases
        release_memory(sweep.device)
    return collected.report()


def _order(sweep: Sweep) -> Callable[[Row], tuple[int, int]]:
    places = {(name, request.quant.label): place for place, (name, request) in enumerate(sweep.layers)}
    return lambda row: (places[row.layer, row.scheme], row.num_tokens)


def _together(sweep: Sweep) -> Iterator[list[tuple[str, LayerRequest]]]:
    """Layers that take turns: on a CPU all schemes of a layer, as its load changes; else one at a time."""
    if sweep.device != "cpu":
        yield from ([layer] for layer in sweep.layers)
        return
    names = dict.fromkeys(name for name, _ in sweep.layers)
    yield from ([layer for layer in sweep.layers if layer[0] == name] for name in names)


def _drawn(name: str, request: LayerRequest, sweep: Sweep) -> _Case:
    sweep.told(f"weights of {name}, {request.quant.label}")
    try:
        weights = random_weights(request, sweep.device)
    except (MoeCoreError, RuntimeError) as error:
        return _Case(name=name, request=request, weights={}, problem=f"no weights: {in_a_line(error)}")
    return _Case(name=name, request=request, weights=weights)


def _compare(sweep: Sweep, cases: Sequence[_Case], num_tokens: int, ceilings: Ceilings, collected: _Collected) -> None:
    """All rows of one number of tokens."""
    turn: list[_Entry] = []
    for case in cases:
        try:
            batches, reference, floor = _inputs(sweep, case, num_tokens, ceilings)
        except (MoeCoreError, RuntimeError, OverflowError) as error:
            collected.add(_not_run(sweep, case, num_tokens, in_a_line(error)))
            continue
        ran: dict[str, str] = {}
        for contender in _contenders(sweep):
            blank = Row(
                layer=case.name,
                scheme=case.request.quant.label,
                num_tokens=num_tokens,
                implementation=contender.name,
                runs="",
                floor=floor,
            )
            turn.append(_entry(sweep, case, contender, batches, reference, blank, ran))
            if sweep.device != "cpu":
                # Graphs keep their memory: one at a time.
                collected.add(_timed(sweep, turn, collected))
                turn = []
                release_memory(sweep.device)
    collected.add(_timed(sweep, turn, collected))


def _inputs(sweep: Sweep, case: _Case, num_tokens: int, ceilings: Ceilings) -> tuple[Batches, Reference, float]:
    """What all contenders are given and compared with, and the floor."""
    if case.problem:
        raise MoeCoreError(case.problem)
    sweep.told(f"{_where(case, num_tokens)}: inputs, and the layer in fp32")
    batches = Batches.random(case.request, num_tokens, sweep.device)
    reference = Reference(case.request, case.weights, batches.one(0))
    return batches, reference, layer_floor(case.request, batches, bytes_per_expert(case.weights), ceilings)


def _not_run(sweep: Sweep, case: _Case, num_tokens: int, problem: str) -> list[Row]:
    """A row for each that would have run, had there been memory for its inputs."""
    label = case.request.quant.label
    return [
        Row(
            layer=case.name,
            scheme=label,
            num_tokens=num_tokens,
            implementation=contender.name,
            runs="",
            floor=0.0,
            problem=f"{NOT_RUN}{problem}",
        )
        for contender in _contenders(sweep)
    ]


def _contenders(sweep: Sweep) -> Iterator[Contender]:
    yield from sweep.combinations
    for peer in sweep.peers:
        free = free_bytes(sweep.device)
        yield PeerContender(peer, None if free is None else int(_USABLE * free))


def _entry(
    sweep: Sweep,
    case: _Case,
    contender: Contender,
    batches: Batches,
    reference: Reference,
    row: Row,
    ran: dict[str, str],
) -> _Entry:
    """Bind, compare and prepare; whatever goes wrong becomes the row's problem.

    `ran` collects our combinations, by what they run as, with the first name of each: one that is given under a second
    name is not timed again, as its two figures would be read as a difference.
    """
    refusal = contender.refusal(case.request, batches.num_tokens, sweep.device)
    if refusal:
        return _Entry(row=attrs.evolve(row, problem=f"{NOT_RUN}{refusal}"))
    where = f"{_where(case, row.num_tokens)}: {row.implementation}"
    sweep.told(where)
    try:
        bound = contender.bind(case.request, case.weights, batches, sweep.device)
        row = attrs.evolve(row, runs=bound.runs, note=bound.note)
        if isinstance(contender, Combination) and ran.setdefault(bound.runs, contender.name) != contender.name:
            return _Entry(row=attrs.evolve(row, note=f"the same as {ran[bound.runs]}, not timed again"))
        row = _checked(sweep, case, bound, reference, row)
        entry = _prepared(sweep, bound, reference, row)
        return entry if entry.ready is None else attrs.evolve(entry, ready=_telling(sweep, entry.ready, where))
    except UnknownNameError:
        # A slip of the pen, and not something that cannot run.
        raise
    except BaseException as error:
        return _Entry(row=attrs.evolve(row, problem=_problem(error)))


def _where(case: _Case, num_tokens: int) -> str:
    return f"{case.name}, {case.request.quant.label}, T = {num_tokens}"


def _telling(sweep: Sweep, ready: Prepared, where: str) -> Prepared:
    """The same, which tells of each sample before it is taken, outside of its clock, and of those before."""
    taken: list[float] = []

    def sample() -> float:
        so_far = f", {statistics.median(taken):.4g} us so far" if taken else ""
        sweep.told(f"{where}, sample {len(taken) + 1} of {sweep.repeats}{so_far}")
        taken.append(ready.sample())
        return taken[-1]

    return attrs.evolve(ready, sample=sample)


def _problem(error: BaseException) -> str:
    """What a row says: code of others may raise anything but the user's interrupt, `SystemExit` too."""
    if is_interrupt(error):
        raise error
    return in_a_line(error)


def _checked(sweep: Sweep, case: _Case, bound: Bound, reference: Reference, row: Row) -> Row:
    """The row with the error of a first call, and with what is asked for beside the time."""
    call = bound.batches.calls(bound.layer)[0]
    row = attrs.evolve(row, error=reference.check(call()))
    if sweep.with_memory:
        row = attrs.evolve(
            row,
            held_bytes=held_bytes(call, sweep.device),
            activation_bytes=activation_bytes(case.request, row.num_tokens),
        )
    if sweep.with_issue_time and row.num_tokens == 1:
        row = attrs.evolve(row, issue_microseconds=issue_microseconds(call, sweep.device))
    return row


def _prepared(sweep: Sweep, bound: Bound, reference: Reference, row: Row) -> _Entry:
    """Captured where it can be, and then compared once more; else to be timed with a clock, and the note says why."""
    calls = bound.batches.calls(bound.layer)
    reason = bound.not_captured
    if not reason:
        try:
            ready = prepare(calls, sweep.device, clock=sweep.clock)
        except CaptureError as error:
            reason = str(error)
        else:
            if ready.outputs:
                ready.sample()
                row = attrs.evolve(row, error=reference.check(ready.outputs[0]))
            return _Entry(row=row, ready=ready)
    if sweep.device != "cpu":
        reason = reason.removeprefix("not captured: ")
        row = attrs.evolve(row, note="; ".join(filter(None, (f"not captured: {reason}", row.note))))
    return _Entry(row=row, ready=prepare(calls, sweep.device, capture=False, clock=sweep.clock))


def _timed(sweep: Sweep, entries: Sequence[_Entry], collected: _Collected) -> list[Row]:
    """The rows of several that take turns, in their order; one that fails in a turn has none any more."""
    ready = {str(place): entry.ready for place, entry in enumerate(entries) if entry.ready is not None}
    problems: dict[str, str] = {}

    def rows(timings: Mapping[str, Timing]) -> list[Row]:
        return [
            attrs.evolve(entry.row, timing=timings.get(place), problem=problems.get(place, entry.row.problem))
            for place, entry in ((str(index), entry) for index, entry in enumerate(entries))
        ]

    def so_far(timings: Mapping[str, Timing]) -> None:
        collected.update([_unfinished(row, sweep.repeats) for row in rows(timings)])

    def failed(place: str, error: BaseException) -> None:
        problems[place] = _problem(error)

    return rows(take_turns(ready, sweep.repeats, sweep.seconds, failed, so_far))


def _unfinished(row: Row, repeats: int) -> Row:
    """The row of an implementation that is being timed, with a note of how far that is."""
    if row.timing is None:
        return row
    taken = f"{len(row.timing.samples)} of {counted(repeats, 'sample')}"
    return attrs.evolve(row, note="; ".join(filter(None, (taken, row.note))))
