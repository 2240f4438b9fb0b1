"""What every combination that fits a layer takes on this machine, at several token counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch

from moe_core.bound import BoundExperts
from moe_core.declared import Candidate
from moe_core.environment import Environment
from moe_core.errors import MoeCoreError, ResolutionError, SpecError, counted, first_line, in_a_line, is_interrupt
from moe_core.manager import BackendManager
from moe_core.measurements import MeasurementTable, Time
from moe_core.payloads import PreparedWeights, RawWeights, Tensor
from moe_core.planner import decide, make_plan
from moe_core.ranking import by_tier
from moe_core.request import LayerRequest, Workload
from moe_core.tuning.deadline import Deadline, TimeUpError
from moe_core.tuning.layers import Batches, random_weights, release_memory
from moe_core.tuning.reference import Reference, WrongResultError
from moe_core.tuning.timing import (
    FEWEST_SAMPLES,
    CaptureError,
    Prepared,
    Timing,
    fastest_of,
    nobody,
    prepare,
    take_turns,
)

#: A combination that is so many times slower than the fastest is not measured for more tokens.
HOPELESS = 10.0
#: Samples that tell what is hopeless: one alone may have met a machine that was busy.
_FIRST_SAMPLES = 2


class DeviceLostError(MoeCoreError, RuntimeError):
    """A kernel has left the device in a state in which nothing runs any more; only a new process helps."""


@attrs.frozen(kw_only=True)
class Step:
    """All combinations at one token count.

    Attributes:
        num_tokens: T.
        timings: Full name of the candidate -> samples of one forward.
        problems: Full name of the candidate -> why it has no time, or will have none for more tokens.
        wrong: Full names of those whose results were wrong, with so many tokens or with fewer.
    """

    num_tokens: int
    timings: Mapping[str, Timing]
    problems: Mapping[str, str]
    wrong: frozenset[str] = frozenset()

    @property
    def microseconds(self) -> Mapping[str, float]:
        """Full name of the candidate -> median time of one forward."""
        return {name: timing.microseconds for name, timing in self.timings.items()}

    @property
    def times(self) -> Mapping[str, Time]:
        """What is kept of the samples, by full name of the candidate."""
        return {
            name: Time(timing.microseconds, timing.bounds if len(timing.samples) > 1 else None)
            for name, timing in self.timings.items()
        }

    @property
    def fastest(self) -> tuple[str, ...]:
        """Full name of the fastest candidate, then of those that samples do not tell apart from it: `fastest_of`."""
        return fastest_of(self.timings)


class LayerSearch:
    """The combinations of one layer over one set of random weights.

    Attributes:
        request: The layer, without pins and for any number of tokens.
        candidates: What fits, of every weight layout, in the order of their tiers.
        problems: Full name -> why a candidate could not be bound; grows as they are measured.
    """

    def __init__(
        self,
        manager: BackendManager,
        request: LayerRequest,
        environment: Environment,
        *,
        deadline: Deadline | None = None,
        told: Callable[[str], None] | None = None,
    ) -> None:
        """Resolve the layer.

        Args:
            manager: The plugins that are measured.
            request: The layer.
            environment: This machine.
            deadline: When to end; None for no end.
            told: Called with what is done next, in words, before each step of the set-up and of the measuring.

        Raises:
            ResolutionError: Nothing fits.
            SpecError: The layer needs a model's own callable.
        """
        if request.activation.kind == "module" or request.post_norm:
            raise SpecError("a layer with a model's own activation or norm cannot be measured on random weights")
        release_memory(environment.device_type)
        self._manager, self._environment = manager, environment
        self._deadline, self._told = deadline or Deadline(), told or nobody
        self.request = attrs.evolve(request, workloads=Workload())
        decision = decide(manager, self.request, environment, MeasurementTable())
        if not decision.is_feasible:
            why = "moe-core resolve --explain for the same layer says why"
            raise ResolutionError(f"no backend combination fits this layer: {decision.error}; {why}", decision)
        # The ranking keeps those of one weight layout; which layout is the best is a question, too.
        (workload,) = decision.workloads
        # What may fail for want of memory comes last.
        self.candidates = by_tier(
            (pair.candidate for pair in workload.pairs if not pair.reasons), self.request, workload.workload.phase
        )
        self.problems: dict[str, str] = {}
        self._wrong: set[str] = set()
        self._weights: dict[tuple[str, str], PreparedWeights] = {}

    @property
    def device(self) -> str:
        """Type of the device."""
        return self._environment.device_type

    @property
    def _is_cuda(self) -> bool:
        return self.device == "cuda"

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        in_time = self._deadline.watched("drawing the weights")

        def told(done: int, total: int) -> None:
            in_time(done, total)
            self._told(f"drawing {total / 1e6:.0f} MB of weights, {done / total:.0%}")

        try:
            return random_weights(self.request, self.device, told=told)
        except RuntimeError as error:
            raise MoeCoreError(f"its weights cannot be drawn: {first_line(error)}") from error

    @functools.cached_property
    def _layers(self) -> dict[str, BoundExperts]:
        layers, _ = {}, self._tensors
        for candidate in self.candidates:
            self._begin("preparing weights for ", candidate.full_name)
            try:
                layers[candidate.full_name] = self._bind(candidate)
            except BaseException as error:
                self._fail(candidate.full_name, error)
        return layers

    def steps(self, counts: Sequence[int], repeats: int = 15, seconds: float = 2.0) -> Iterator[Step]:
        """Measure one token count after the other, from few to many; weights are drawn and prepared before the first.

        A combination that fails, whose result is wrong, or that is hopelessly slow, is left out for more tokens; what
        the tiers would choose is measured to the end all the same, however slow it is.

        Args:
            counts: Token counts.
            repeats: Samples of each combination.
            seconds: About how long to take samples at one count; five of each are always taken.

        Raises:
            DeviceLostError: The device does not work any more.
            TimeUpError: A count would not be measured before the deadline; nothing of it is told.
            MoeCoreError: There is no memory for the weights, or for so many tokens.
        """
        for count in sorted(counts):
            yield self._step(count, repeats, seconds)

    def _step(self, count: int, repeats: int, seconds: float) -> Step:
        layers, where = self._layers, f"T={count}: "
        batches, reference = self._inputs(count)
        takers = {
            c.full_name for c in self.candidates if c.declared_max_tokens is None or count <= c.declared_max_tokens
        }
        ready: dict[str, Prepared] = {}
        first: dict[str, float] = {}
        for name, layer in layers.items():
            if name not in takers or name in self.problems:
                continue
            self._begin(where, name)
            try:
                ready[name] = self._prepared(layer, batches)
                samples = [ready[name].sample() for _ in range(_FIRST_SAMPLES)]
                reference.check(ready[name].outputs[0] if ready[name].outputs else layer(*batches.one(0)))
                first[name] = min(samples)
            except BaseException as error:
                ready.pop(name, None)
                self._fail(name, error, where)
        fastest = min(first.values(), default=0.0)
        # Times rank only where what the tiers would choose has one.
        usual = self.candidates[0].full_name
        slow = {n: time / fastest for n, time in first.items() if time > HOPELESS * fastest and n != usual}
        turns = {name: r for name, r in ready.items() if name not in slow}
        turn = 1e-6 * batches.num_sets * sum(first[name] for name in turns)
        self._deadline.require(f"T={count}", turn * min(repeats, FEWEST_SAMPLES))
        self._told(f"{where}samples of {counted(len(turns), 'combination')} in turns")
        limit = min(seconds, self._deadline.left)
        timings = take_turns(turns, repeats, limit, lambda name, error: self._fail(name, error, where))
        for name, ratio in slow.items():
            self.problems[name] = f"{ratio:.0f} times slower than the fastest at T={count}"
        timings |= {name: Timing((first[name],), ready[name].method) for name in slow}
        return Step(num_tokens=count, timings=timings, problems=dict(self.problems), wrong=frozenset(self._wrong))

    def _begin(self, what: str, name: str) -> None:
        """Say what comes next, unless the time is up."""
        self._deadline.require(f"{what}{name}")
        self._told(f"{what}{name}")

    def _inputs(self, count: int) -> tuple[Batches, Reference]:
        """What all are given, and what they are compared with."""
        self._begin(f"T={count}: ", "inputs and their answer")
        try:
            batches = Batches.random(self.request, count, self.device)
            in_time = self._deadline.watched(f"T={count}: the answer of its inputs")
            return batches, Reference(self.request, self._tensors, batches.one(0), in_time)
        except (RuntimeError, OverflowError) as error:
            raise MoeCoreError(
                f"the inputs of T={count} and their answer cannot be made: {first_line(error)}"
            ) from error

    def _bind(self, candidate: Candidate) -> BoundExperts:
        dispatcher = candidate.dispatcher.full_name if candidate.dispatcher else None
        pinned = attrs.evolve(self.request, a2a_backend=dispatcher, runner_backend=candidate.runner.full_name)
        plan, _ = make_plan(self._manager, pinned, self._environment, MeasurementTable())
        key = (plan.runner_plugin, plan.weight_layout)
        if key not in self._weights:
            # They may stay the very tensors: no runner writes into them.
            self._weights[key] = self._manager.process_weights(plan, RawWeights(tensors=self._tensors), None)
        return BoundExperts(plan, self._weights[key], self._manager)

    def _prepared(self, layer: BoundExperts, batches: Batches) -> Prepared:
        """Captured into a graph where that is possible; what waits for the host is timed with its waiting."""
        calls = batches.calls(layer)

        def in_time(seconds: float) -> None:
            self._deadline.require(f"T={batches.num_tokens}", seconds * _FIRST_SAMPLES)

        try:
            return prepare(calls, self.device, told=in_time)
        except CaptureError:
            return prepare(calls, self.device, capture=False, told=in_time)

    def _fail(self, name: str, error: BaseException, where: str = "") -> None:
        if is_interrupt(error) or isinstance(error, TimeUpError):
            raise error
        self.problems[name] = f"{where}{in_a_line(error)}"
        if isinstance(error, WrongResultError):
            self._wrong.add(name)
        if self._is_cuda:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as lost:
                raise DeviceLostError(f"{name}, {self.problems[name]}; the device does not answer since") from lost
