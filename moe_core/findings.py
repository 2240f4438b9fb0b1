"""What the resolver found: why a combination was chosen and every other was not, as values.

Two readable stages per workload: each spec alone with all its reasons, then pairs of those that passed. Pair
reasons appear only there, so that whoever fixes the listed reasons and resolves again ends feasible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import attrs

from moe_core.declared import Candidate, DeclaredSpec
from moe_core.environment import Environment
from moe_core.errors import counted
from moe_core.request import LayerRequest, Workload
from moe_core.specs import TokenDtype
from moe_core.vocabulary import REASON_CODES, one_of


@attrs.frozen
class Reason:
    """One "no".

    Attributes:
        code: One of `REASON_CODES`.
        needs: What would have been needed.
        found: What was there instead.
        hint: What to do, or what of it makes the difference; "" if there is nothing to say.
        field: The size that a limit is about, "" for every other reason.
    """

    code: str = attrs.field(validator=one_of(*REASON_CODES))
    needs: str
    found: str
    hint: str = ""
    field: str = ""

    def __str__(self) -> str:
        """`arch: needs sm100, sm103, found sm90; hint`."""
        return f"{self.code}: needs {self.needs}, found {self.found}{'; ' + self.hint if self.hint else ''}"


@attrs.frozen(kw_only=True)
class PluginReport:
    """One plugin as the manager sees it: `ready`, `failed` or `conflict`, with its error in the latter cases."""

    name: str
    status: str
    distribution: str = ""
    version: str = ""
    error: str = ""


@attrs.frozen
class SpecReport:
    """One declared spec alone against request and environment.

    Attributes:
        declared: The spec.
        is_refused: Whether anything is against it.
    """

    declared: DeclaredSpec
    is_refused: bool
    # Like the spec a value: the same reasons are found whenever it is asked, in another process too.
    _find_reasons: Callable[[], Iterable[Reason]]

    @functools.cached_property
    def reasons(self) -> tuple[Reason, ...]:
        """All that is against it, found when it is first asked for."""
        return tuple(self._find_reasons())

    def __eq__(self, other: object) -> bool:
        """Whether the same is against the same spec, however it is found."""
        if not isinstance(other, SpecReport):
            return NotImplemented
        return (self.declared, self.reasons) == (other.declared, other.reasons)

    def __hash__(self) -> int:
        """As equality goes."""
        return hash((self.declared, self.reasons))

    def __repr__(self) -> str:
        """With the reasons."""
        return f"SpecReport(declared={self.declared!r}, reasons={self.reasons!r})"


@attrs.frozen(kw_only=True)
class PairReport:
    """One pair of specs that both passed alone (or a fused runner), with the dtypes it can carry."""

    candidate: Candidate
    reasons: tuple[Reason, ...] = ()
    token_dtypes: tuple[TokenDtype, ...] = ()


@attrs.frozen(kw_only=True)
class DtypeChoice:
    """The dispatch dtype of a pair, and the rule that decided.

    Attributes:
        token_dtype: The result.
        rule: `pin`, `variable` (the deprecated one), `input-global-scale`, `runner` or `hook:<plugin>`.
        requested: What was asked for where a documented adjustment replaced it, else None.
        notes: Preferences that were skipped, adjustments, an ignored variable.
    """

    token_dtype: TokenDtype
    rule: str
    requested: str | None = None
    notes: tuple[str, ...] = ()


#: What sets a candidate apart if nothing that is declared or measured does.
BY_NAME = "tie broken by name"


class Place(NamedTuple):
    """What a candidate is sorted by where no time counts, in this order; a time comes right after `preference`."""

    preference: tuple[int, ...]
    tier: int
    permutes_alone: bool
    waits: bool
    permutes_few: bool
    is_pair: bool
    name: str


@attrs.frozen(kw_only=True)
class Ranked:
    """A feasible candidate in its place.

    Attributes:
        candidate: Which.
        because: What sets it apart from the next one, of the last from the one before; see `ranking`.
        dtype: Its dispatch dtype.
        preferred: Which names of the request's `prefer` it has, and whether by its dispatcher alone: what is equal in
            that is ranked by the rest.
        microseconds: Its time, None if none counted.
        provenance: Which measurement that is, "" if none counted.
        bounds: Microseconds between which its median surely lies, None if no time counted or they are not known.
        place: What it is sorted by but for its time; follows from candidate and request.
    """

    candidate: Candidate
    because: str
    dtype: DtypeChoice
    preferred: tuple[str, ...] = ()
    microseconds: float | None = None
    provenance: str = ""
    bounds: tuple[float, float] | None = None
    place: Place = attrs.field(repr=False, eq=False)

    @property
    def short_because(self) -> str:
        """`because` without where a time comes from."""
        return self.because.replace(self.provenance, self.provenance.partition(" (")[0])

    @property
    def is_by_time(self) -> bool:
        """Whether its measured time put it in its place."""
        return bool(self.provenance) and self.because.startswith(self.provenance)

    def is_told_from(self, other: Ranked) -> bool:
        """Whether the samples of the two tell which is faster; what is not known of them speaks against nothing."""
        if self.bounds is None or other.bounds is None:
            return True
        return max(self.bounds[0], other.bounds[0]) > min(self.bounds[1], other.bounds[1])


@attrs.frozen(kw_only=True)
class WorkloadDecision:
    """Everything about one workload, or about one range of its token counts.

    Attributes:
        workload: Which; of a range, with its largest token count.
        min_tokens: Fewest tokens it is about; fewer have a decision of their own.
        specs: Every declared spec alone.
        pairs: Pairs of those that passed.
        ranked: What can run, best first; empty if nothing fits.
        unshared: What fits too, but lacks what all workloads must share; a note says what that is.
        outranked_by: The shared trait for which the first by rank had to give way, "" if it did not.
        outranked_because: What speaks for that trait, "" likewise.
        fallback: Which pins were dropped and why, "" if none was.
        notes: What else narrowed the choice, and for what the first candidate stands in.
    """

    workload: Workload
    specs: tuple[SpecReport, ...]
    pairs: tuple[PairReport, ...]
    ranked: tuple[Ranked, ...] = ()
    unshared: tuple[Candidate, ...] = ()
    outranked_by: str = ""
    outranked_because: str = ""
    fallback: str = ""
    notes: tuple[str, ...] = ()
    min_tokens: int = 1

    @property
    def phase(self) -> str:
        """The workload's."""
        return self.workload.phase

    @property
    def title(self) -> str:
        """`any`, `decode, up to 128 tokens`, `any, from 91 to 512 tokens, graph capture`."""
        limit = self.workload.max_tokens
        tokens = f"from {self.min_tokens} to {limit} tokens" if limit else f"from {self.min_tokens} tokens"
        if self.min_tokens == 1:
            tokens = f"up to {counted(limit, 'token')}" if limit else ""
        graph = "graph capture" if self.workload.graph_capture else ""
        return ", ".join(filter(None, (self.phase, tokens, graph)))

    @property
    def not_told_apart(self) -> tuple[Ranked, ...]:
        """Those that stand beside the first and are as fast for all that samples tell: their bounds overlap."""
        if not self.ranked or not self.ranked[0].is_by_time:
            return ()
        first, *others = self.alike_preferred
        return tuple(entry for entry in others if not first.is_told_from(entry))

    @property
    def tied_by_name(self) -> tuple[Ranked, ...]:
        """Those that the first precedes by its name alone: nothing was measured or declared that tells them apart."""
        if not self.ranked or self.ranked[0].because != BY_NAME:
            return ()
        first, *others = self.ranked
        return tuple(e for e in others if (e.place[:-1], e.microseconds) == (first.place[:-1], first.microseconds))

    @property
    def alike_preferred(self) -> tuple[Ranked, ...]:
        """Those that the request's `prefer` means as much as the first: all of them without it."""
        return tuple(entry for entry in self.ranked if entry.preferred == self.ranked[0].preferred)

    @property
    def joined(self) -> tuple[PairReport, ...]:
        """The pairs that speak one format; the others are a cross product that explains nothing."""
        return tuple(pair for pair in self.pairs if pair.candidate.has_one_format)

    @property
    def num_unjoined(self) -> int:
        """How many pairs `joined` leaves out."""
        return len(self.pairs) - len(self.joined)


@attrs.frozen(kw_only=True)
class Findings:
    """Everything about one layer; `Decision` is this with its texts.

    Attributes:
        request: What was asked.
        environment: For which machine.
        plugins: What discovery found, failed plugins included.
        workloads: One decision per workload; several where measurements or the request split it by token counts.
        weight_layout: The layout shared by the first-ranked candidates of all workloads, None if not feasible.
        measurements: Which measured times there were, and what they say about this layer.
        reasons: Why workloads that have candidates each do not go together.
        error: Why no plan can be made, "" if one can.
    """

    request: LayerRequest
    environment: Environment
    plugins: tuple[PluginReport, ...] = ()
    workloads: tuple[WorkloadDecision, ...] = ()
    weight_layout: str | None = None
    measurements: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    error: str = ""

    @property
    def is_feasible(self) -> bool:
        """Whether every workload has a candidate and all share a weight layout."""
        return not self.error

    def sections(self) -> Iterator[tuple[WorkloadDecision, bool]]:
        """The decisions, and whether the reports of each are other than those of the one before: ranges share them."""
        before: WorkloadDecision | None = None
        for workload in self.workloads:
            is_range = before is not None and before.phase == workload.phase
            yield workload, not (is_range and before is not None and before.pairs == workload.pairs)
            before = workload

    def reasons_of(self, full_name: str) -> tuple[Reason, ...]:
        """All reasons against one spec or pair (by full name), over all workloads, without repetition."""
        found: dict[Reason, None] = {}
        for workload in self.workloads:
            for spec in workload.specs:
                if spec.declared.full_name == full_name:
                    found.update(dict.fromkeys(spec.reasons))
            for pair in workload.pairs:
                if pair.candidate.full_name == full_name:
                    found.update(dict.fromkeys(pair.reasons))
        return tuple(found)
