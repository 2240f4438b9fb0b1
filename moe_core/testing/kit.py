"""Every check on everything that a plugin declares: a list of cases, in one order, to be run by whoever asks."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence

import attrs

from moe_core.environment import Environment
from moe_core.feasibility import machine_reasons
from moe_core.specs import Candidate, PluginSpec
from moe_core.testing.backend import Backend
from moe_core.testing.bench import Bench
from moe_core.testing.cells import Cell, cells_of
from moe_core.testing.checks import declaration, dispatch, execution, numerics, ranks, routing, shares, weights
from moe_core.testing.outcome import Case, ConformanceError, NotRun
from moe_core.testing.pairs import serves_one_rank


def _always(cell: Cell) -> bool:
    return True


def _is_gated(cell: Cell) -> bool:
    return cell.activation.gated and cell.activation.kind != "module"


def _has_parameters(cell: Cell) -> bool:
    activation = cell.activation
    return activation.alpha != 1.0 or activation.limit is not None or activation.beta != 0.0


def _has_callable(cell: Cell) -> bool:
    return cell.activation.kind == "module" or cell.feature == "post_norm"


def _has_padding(cell: Cell) -> bool:
    return cell.format in ("contiguous", "masked")


def _has_dispatcher(cell: Cell) -> bool:
    return cell.pair.dispatcher is not None


def _rounds_activations(cell: Cell) -> bool:
    return cell.quant.w13.activation_dtype != "same"


def _has_input_scales(cell: Cell) -> bool:
    schemes = (cell.quant.w13, cell.quant.w2)
    return any(scheme.activation_scaling == "static" for scheme in schemes)


def _is_deterministic(cell: Cell) -> bool:
    return all(part.spec.deterministic for part in (cell.pair.dispatcher, cell.pair.runner) if part is not None)


def _is_repeatable(cell: Cell) -> bool:
    return cell.pair.dispatcher is not None and cell.pair.dispatcher.spec.deterministic


def _is_graph_safe(cell: Cell) -> bool:
    return all(part.spec.graph_safe for part in (cell.pair.dispatcher, cell.pair.runner) if part is not None)


@attrs.frozen
class CellCheck:
    """A check of one cell.

    Attributes:
        function: The check.
        when: Cells that it is about; it runs on the first such cell of each pair.
        by: `pair`; `scheme` runs it on the first such cell of each scheme of the pair, `cell` on all of them.
        on_wire: Whether it runs on pairs that are made for a token dtype alone, too.
    """

    function: Callable[[Bench], None]
    when: Callable[[Cell], bool] = _always
    by: str = "pair"
    on_wire: bool = False

    def picks(self, cells: Sequence[Cell], schemes: str = "all") -> list[Cell]:
        """The cells to run it on.

        Args:
            cells: Those of one pair.
            schemes: What a check by scheme tries: `all`, one of each `element` type, or the `first`.
        """
        fitting = [cell for cell in cells if self.when(cell)]
        if self.by == "cell":
            return fitting
        first: dict[object, Cell] = {}
        for cell in fitting:
            key = {"all": cell.quant, "element": cell.quant.w13.weight_dtype}.get(schemes)
            first.setdefault(key if self.by == "scheme" else None, cell)
        return list(first.values())


PLUGIN_CHECKS: tuple[Callable[[Backend], None], ...] = (
    declaration.check_import,
    declaration.check_specs,
    declaration.check_signatures,
    declaration.check_foreign_plans,
)
CELL_CHECKS: tuple[CellCheck, ...] = (
    CellCheck(numerics.check_answer, by="cell", on_wire=True),
    CellCheck(numerics.check_gate_up_order, _is_gated, by="scheme"),
    CellCheck(numerics.check_activation_parameters, _has_parameters),
    CellCheck(numerics.check_router_weights),
    CellCheck(numerics.check_features, lambda cell: bool(cell.feature), by="cell"),
    CellCheck(numerics.check_activation_rounding, _rounds_activations, by="scheme"),
    CellCheck(numerics.check_activation_scales, _has_input_scales, by="scheme"),
    CellCheck(numerics.check_output_form, by="scheme"),
    CellCheck(routing.check_missing_experts, on_wire=True),
    CellCheck(routing.check_idle_experts),
    CellCheck(routing.check_one_expert),
    CellCheck(routing.check_no_tokens, by="scheme"),
    CellCheck(routing.check_repeated_ids),
    CellCheck(routing.check_row_counts, by="scheme", on_wire=True),
    CellCheck(routing.check_id_layouts),
    CellCheck(routing.check_bad_ids),
    CellCheck(weights.check_prepared_form, by="scheme"),
    CellCheck(weights.check_raw_weights, by="scheme"),
    CellCheck(weights.check_reload, by="scheme"),
    CellCheck(weights.check_rebalancing, by="scheme"),
    CellCheck(weights.check_released_memory, by="scheme"),
    CellCheck(weights.check_weight_strides, by="scheme"),
    CellCheck(weights.check_callables, _has_callable),
    CellCheck(shares.check_tensor_parallel, by="scheme"),
    CellCheck(shares.check_expert_copies),
    CellCheck(execution.check_padding, _has_padding, by="scheme", on_wire=True),
    CellCheck(execution.check_uninitialised_memory, by="scheme"),
    CellCheck(execution.check_inputs),
    CellCheck(execution.check_process_state),
    CellCheck(execution.check_odd_sizes, by="scheme", on_wire=True),
    CellCheck(execution.check_batch_invariance, _is_deterministic),
    CellCheck(execution.check_repeatability, _is_repeatable),
    CellCheck(dispatch.check_dispatched_form, _has_dispatcher, on_wire=True),
    CellCheck(dispatch.check_round_trip, _has_dispatcher, on_wire=True),
    CellCheck(dispatch.check_graph_capture, _is_graph_safe),
    CellCheck(ranks.check_replicated_ranks, lambda cell: ranks.takes_replicated_tokens(cell.pair)),
)
#: Name of every check, in the order in which they run.
CHECKS = tuple(
    function.__name__.removeprefix("check_")
    for function in (*PLUGIN_CHECKS, *(check.function for check in CELL_CHECKS), ranks.check_distributed_ranks)
)


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
        reasons = self._machine_reasons(pair)
        if reasons:
            cells = cells_of(pair, quick=is_quick)
            yield _case(numerics.check_answer, pair.full_name, _not_run(f"{reasons} ({len(cells)} cells)"))
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
        raise ConformanceError("\n".join([f"{len(failed)} of {len(results)} checks failed", *failed]))
