"""Which checks there are, and on which of a plugin's cells each of them runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from moe_core.testing.backend import Backend
from moe_core.testing.bench import Bench
from moe_core.testing.cells import Cell
from moe_core.testing.checks import declaration, dispatch, execution, numerics, ranks, routing, shares, weights


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
    CellCheck(numerics.check_value_range, by="scheme"),
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
    CellCheck(routing.check_batch_sizes),
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
