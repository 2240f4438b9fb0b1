"""Every check on everything that a plugin declares: a list of cases, in one order, to be run by whoever asks."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence

from moe_core.declared import Candidate
from moe_core.environment import Environment
from moe_core.errors import counted
from moe_core.feasibility import machine_reasons
from moe_core.specs import PluginSpec
from moe_core.testing.backend import Backend
from moe_core.testing.bench import Bench
from moe_core.testing.catalogue import CELL_CHECKS, PLUGIN_CHECKS, CellCheck
from moe_core.testing.cells import Cell, cells_of
from moe_core.testing.checks import numerics, ranks
from moe_core.testing.outcome import Case, ConformanceError, NotRun
from moe_core.testing.pairs import serves_one_rank


class Kit:
    """The conformance kit for one plugin.

    Example:
        >>> from moe_core.testing import Kit
        >>> kit = Kit("moe_core.backends.torch.plugin", device="cpu")
        >>> case = next(case for case in kit.cases() if case.check == "signatures")
        >>> case.run().status
        'passed'

    Attributes:
        backend: The plugin and the machine.
        quick: Whether less is tried; see the constructor.
    """

    def __init__(
        self,
        plugin: str | types.ModuleType,
        *,
        environment: Environment | None = None,
        device: str | None = None,
        companions: Sequence[str] = (),
        quick: bool = False,
    ) -> None:
        """Load the plugin; arguments and errors as `Backend`.

        With `quick`, scheme, activation and layer dtype vary one at a time (`cells.cells_of`), and all checks but that
        of the answer try one scheme of each element type, on the first pair only.
        """
        self.backend = Backend(plugin, environment=environment, device=device, companions=companions)
        self.quick = quick

    def cases(self) -> list[Case]:
        """Every check on everything that is declared; equal in every process."""
        return list(self._cases())

    def _cases(self) -> Iterator[Case]:
        for check in PLUGIN_CHECKS:
            yield _case(check, self.backend.name, functools.partial(check, self.backend))
        has_run_here = False
        for pair in self.backend.pairs:
            schemes = ("first" if has_run_here else "element") if self.quick else "all"
            yield from self._pair_cases(pair, schemes, CELL_CHECKS)
            has_run_here |= serves_one_rank(pair) and not self._machine_reasons(pair)
        tried = {part for pair in self.backend.pairs for part in (pair.dispatcher, pair.runner)}
        for pair in self.backend.wire_pairs:
            is_first = not {pair.dispatcher, pair.runner} & tried
            checks = CELL_CHECKS if is_first else tuple(check for check in CELL_CHECKS if check.on_wire)
            yield from self._pair_cases(pair, "element" if is_first else "first", checks)
            tried |= {pair.dispatcher, pair.runner}
        for name, tokens in self.backend.unknown_tokens.items():
            reason = f"the kit has no form of tokens in {', '.join(map(str, tokens))}, nor does another part share it"
            yield _case(numerics.check_answer, name, _not_run(reason))

    def _pair_cases(self, pair: Candidate, schemes: str, checks: Sequence[CellCheck]) -> Iterator[Case]:
        is_quick = self.quick or len(checks) < len(CELL_CHECKS)
        reasons = self._machine_reasons(pair) or ranks.why_untried(pair)
        if reasons:
            cells = cells_of(pair, quick=is_quick)
            yield _case(numerics.check_answer, pair.full_name, _not_run(f"{reasons} ({counted(len(cells), 'cell')})"))
            return
        if serves_one_rank(pair):
            yield from self._cell_cases(cells_of(pair, quick=is_quick), schemes, checks)
        if ranks.takes_distributed_tokens(pair):
            function = ranks.check_distributed_ranks
            yield _case(function, pair.full_name, functools.partial(function, self.backend, pair))

    def _cell_cases(self, cells: Sequence[Cell], schemes: str, checks: Sequence[CellCheck]) -> Iterator[Case]:
        """The cases of one pair. Benches are shared: most checks use the same layer."""
        bench = functools.lru_cache(maxsize=8)(functools.partial(Bench, self.backend))
        for check in checks:
            for cell in check.picks(cells, schemes):
                yield _case(check.function, str(cell), functools.partial(_on_bench, check.function, bench, cell))

    def _machine_reasons(self, pair: Candidate) -> str:
        """What stands against this pair on this machine, whatever the layer."""
        found = {}
        for part in (pair.dispatcher, pair.runner):
            if part is not None:
                plugin: PluginSpec = self.backend.manager.require(part.plugin)
                reasons = machine_reasons(part.spec, plugin.requirements, self.backend.environment)
                found.update(dict.fromkeys(map(str, reasons)))
        return "; ".join(found)


def _case(function: Callable[..., None], subject: str, call: Callable[[], None]) -> Case:
    return Case(check=function.__name__.removeprefix("check_"), subject=subject, function=call)


def _on_bench(check: Callable[[Bench], None], bench: Callable[[Cell], Bench], cell: Cell) -> None:
    check(bench(cell))


def _not_run(reason: str) -> Callable[[], None]:
    def call() -> None:
        raise NotRun(reason)

    return call


def run_checks(plugin: str | types.ModuleType, **options: object) -> None:
    """Run the kit and raise one `ConformanceError` that lists every failure; for callers without a test runner.

    Args:
        plugin: The plugin module, or its import name.
        **options: As `Kit`.
    """
    results = [case.run() for case in Kit(plugin, **options).cases()]  # type: ignore[arg-type]
    failed = [f"{result.check}[{result.subject}]: {result.text}" for result in results if result.status == "failed"]
    if failed:
        raise ConformanceError("\n".join([f"{len(failed)} of {counted(len(results), 'check')} failed", *failed]))
