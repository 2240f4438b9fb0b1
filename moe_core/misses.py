"""What cannot take part and why, grouped so that each reason is said once: the data behind folded explanations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import attrs

from moe_core.declared import Candidate, DeclaredRunner, DeclaredSpec, answers_to, belongs_to
from moe_core.errors import counted
from moe_core.findings import Reason, WorkloadDecision
from moe_core.request import LayerRequest, Pins

_Subject = TypeVar("_Subject")
#: Reason -> the titles of the workloads in which it holds.
_Titles: TypeAlias = dict[Reason, list[str]]
_Against: TypeAlias = dict[_Subject, _Titles]
#: Plugin, name, and what is against it.
_Row: TypeAlias = tuple[str, str, _Titles]
#: Reasons that end every other question: nobody changes the device for a layer.
_MACHINE = ("device", "arch")
#: What follows from the model, so that other layers may use the spec and this one never does.
_MODEL = ("scheme", "activation", "dtype", "bias", "weighting", "post-norm")
#: Of the sizes that limits speak about, those that no split over ranks changes.
_MODEL_SIZES = ("hidden_size", "num_experts", "top_k")


def compact(names: Iterable[str]) -> str:
    """`deepep.normal, .low_latency, deep_gemm.masked`: a family is named where it begins."""
    words, before = [], ""
    for name in names:
        family, dot, variant = name.partition(".")
        words.append(f".{variant}" if dot and family == before else name)
        before = family
    return ", ".join(words)


@attrs.frozen(kw_only=True)
class Miss:
    """Reasons, and everything against which all of them hold.

    Attributes:
        plugin: Whose specs, "" for pairs.
        names: Short names of specs, or full names of pairs.
        reasons: The reasons; what nobody can change first.
        phases: The workloads in which they hold, empty for all.
        is_folded: Whether the reason is the one that decides and the number of names says enough.
    """

    plugin: str
    names: tuple[str, ...]
    reasons: tuple[Reason, ...]
    phases: tuple[str, ...] = ()
    is_folded: bool = False

    @property
    def title(self) -> str:
        """`cuda_deepgemm:deepep.normal, .low_latency`, `ascend_npu: 16 variants need npu, found cuda`."""
        first, *more = self.names
        if self.plugin:
            names = f"{self.plugin}:{compact(self.names)}"
        else:
            names = f"{first} and {counted(len(more), 'more pair')}" if more else first
        if self.is_folded:
            needs, found = self.reasons[0].needs, self.reasons[0].found
            who = f"{self.plugin}: {len(self.names)} variants need" if more else f"{names} needs"
            return f"{who} {needs}, found {found}"
        return f"{', '.join(self.phases)}: {names}" if self.phases else names

    @property
    def texts(self) -> list[str]:
        """Each reason in a text of its own."""
        return [self.title] if self.is_folded else [f"{self.title}: {reason}" for reason in self.reasons]

    @property
    def lines(self) -> list[str]:
        """The reason after the title, or each of several reasons in a line below it."""
        return self.texts if len(self.texts) == 1 else [f"{self.title}:", *(f"  {reason}" for reason in self.reasons)]


@attrs.frozen(kw_only=True)
class Misses:
    """Everything that is not feasible, by what would have to change.

    Attributes:
        named: Specs that the request names (a pin, `prefer`), whatever is against them.
        near: What whoever asks can change: packages, pins, phases, limits, ...
        pairs: Pairs of specs that passed alone.
        model: Specs for other models, with the reasons that say so.
        machine: Specs for other devices, with that reason alone, folded.
    """

    named: tuple[Miss, ...]
    near: tuple[Miss, ...]
    pairs: tuple[Miss, ...]
    model: tuple[Miss, ...]
    machine: tuple[Miss, ...]

    @classmethod
    def of(cls, request: LayerRequest, workloads: Iterable[WorkloadDecision]) -> Misses:
        """The misses of one layer; workloads whose reports are the same count once."""
        sections = _titled(workloads)
        specs: _Against[DeclaredSpec] = {}
        pairs: _Against[Candidate] = {}
        for title, section in sections.items():
            for spec in section.specs:
                _add(specs, spec.declared, spec.reasons, title)
            # Where nothing speaks one format, that is what to say.
            for pair in section.joined or section.pairs:
                _add(pairs, pair.candidate, map(_whatever_it_is, pair.reasons), title)
        named = _named(request, sections.values())
        kinds: dict[str, list[_Row]] = {"named": [], "near": [], "model": [], "machine": []}
        for declared, against in specs.items():
            kind, decisive = ("named", against) if declared in named else _kind(against)
            kinds[kind].append((declared.plugin, declared.spec.short_name, decisive))
        rows: list[_Row] = [("", candidate.full_name, against) for candidate, against in pairs.items()]
        grouped = {kind: _grouped(of_kind, len(sections)) for kind, of_kind in kinds.items()}
        grouped["machine"] = tuple(attrs.evolve(miss, is_folded=True) for miss in grouped["machine"])
        return cls(pairs=_grouped(rows, len(sections)), **grouped)

    def parts(self) -> Iterator[tuple[str, tuple[Miss, ...]]]:
        """What there is, with a heading, nearest first."""
        parts = {
            "what you named: each spec alone": self.named,
            "near misses: each spec alone": self.near,
            "near misses: pairs of those that passed": self.pairs,
            "for other layers": self.model,
            "for other devices": self.machine,
        }
        yield from ((heading, misses) for heading, misses in parts.items() if misses)

    @property
    def nearest(self) -> tuple[Miss, ...]:
        """All of them, what is next to feasible first."""
        return (*self.pairs, *self.named, *self.near, *self.model, *self.machine)


def relevant(pins: Pins, decision: WorkloadDecision) -> WorkloadDecision:
    """The reports that say why a workload has nothing.

    Those of what the pins name; of everything of a kind that is not pinned only where that is fine.
    """
    rejected = [spec for spec in decision.specs if spec.is_refused]
    # What passed stays: it tells that the name means something here.
    named = [spec for spec in decision.specs if _is_pinned(pins, spec.declared)]
    free = [spec for spec in rejected if _pin_of(pins, spec.declared) is None]
    specs = tuple(named if any(spec.is_refused for spec in named) else free)
    pinned = tuple(pair for pair in decision.pairs if all(reason.code != "pin" for reason in pair.reasons))
    joined = tuple(pair for pair in pinned if all(reason.code != "format" for reason in pair.reasons))
    # Half of what was pinned may be a fused runner, which goes with nothing.
    alone = tuple(
        pair for pair in decision.pairs if not pair.candidate.dispatcher and _is_pinned(pins, pair.candidate.runner)
    )
    return attrs.evolve(decision, specs=specs, pairs=joined or pinned or alone or (() if specs else decision.pairs))


def _titled(workloads: Iterable[WorkloadDecision]) -> dict[str, WorkloadDecision]:
    """Workloads that differ in their reports, by phase where that tells them apart; ranges of one share theirs."""
    distinct: list[WorkloadDecision] = []
    for workload in workloads:
        if all((workload.specs, workload.pairs) != (other.specs, other.pairs) for other in distinct):
            distinct.append(workload)
    return dict(zip(short_titles(distinct), distinct, strict=True))


def short_titles(workloads: Sequence[WorkloadDecision]) -> list[str]:
    """The phase where it tells a workload from the others, else its title."""
    phases = [workload.phase for workload in workloads]
    return [w.phase if phases.count(w.phase) == 1 else w.title for w in workloads]


def _add(into: _Against[_Subject], subject: _Subject, reasons: Iterable[Reason], title: str) -> None:
    for reason in reasons:
        into.setdefault(subject, {}).setdefault(reason, []).append(title)


def _whatever_it_is(reason: Reason) -> Reason:
    """That something else was pinned is one reason against all others."""
    return attrs.evolve(reason, found="others") if reason.code == "pin" else reason


def _kind(against: _Titles) -> tuple[str, _Titles]:
    """The field of `Misses`, and the reasons because of which it is that one."""
    for code in _MACHINE:
        decisive = {reason: titles for reason, titles in against.items() if reason.code == code}
        if decisive:
            return "machine", decisive
    of_model = {reason: titles for reason, titles in against.items() if _is_of_model(reason)}
    return ("model", of_model) if of_model else ("near", against)


def _is_of_machine(reason: Reason) -> bool:
    return reason.code in _MACHINE


def _is_of_model(reason: Reason) -> bool:
    return reason.code in _MODEL or reason.field in _MODEL_SIZES


def _named(request: LayerRequest, sections: Collection[WorkloadDecision]) -> set[DeclaredSpec]:
    """What a name means on this machine; on other machines only where it means nothing here."""
    reports = [spec for section in sections for spec in section.specs]
    pins = {request.pins(section.workload) for section in sections}
    words = [partial(_is_pinned, Pins(a2a=pin.a2a)) for pin in pins if pin.a2a]
    words += [partial(_is_pinned, Pins(runner=pin.runner)) for pin in pins if pin.runner]
    words += [partial(belongs_to, name) for name in request.prefer]
    named: set[DeclaredSpec] = set()
    for means in words:
        meant = [report for report in reports if means(report.declared)]
        here = [report for report in meant if not any(map(_is_of_machine, report.reasons))]
        named.update(report.declared for report in here or meant)
    return named


def _is_pinned(pins: Pins, declared: DeclaredSpec) -> bool:
    pin = _pin_of(pins, declared)
    return (pin is not None and answers_to(pin, declared)) or _is_fused_of(pins, declared)


def _pin_of(pins: Pins, declared: DeclaredSpec) -> str | None:
    return pins.runner if isinstance(declared, DeclaredRunner) else pins.a2a


def _is_fused_of(pins: Pins, declared: DeclaredSpec) -> bool:
    return isinstance(declared, DeclaredRunner) and pins.a2a is not None and declared.spec.a2a == pins.a2a


def _grouped(rows: Iterable[_Row], num_sections: int) -> tuple[Miss, ...]:
    """Each reason once per plugin, and reasons against the same names together."""
    names: dict[tuple[str, Reason, tuple[str, ...]], list[str]] = {}
    for plugin, name, against in rows:
        for reason, titles in against.items():
            phases = () if len(titles) == num_sections else tuple(titles)
            names.setdefault((plugin, reason, phases), []).append(name)
    reasons: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[Reason]] = {}
    for (plugin, reason, phases), found in names.items():
        reasons.setdefault((plugin, tuple(found), phases), []).append(reason)
    ordered = {key: tuple(sorted(same, key=_is_of_machine, reverse=True)) for key, same in reasons.items()}
    return tuple(
        Miss(plugin=plugin, names=found, reasons=same, phases=phases)
        for (plugin, found, phases), same in ordered.items()
    )
