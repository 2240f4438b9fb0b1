"""Memory that the preparation of a layer for Ascend holds beside its source and its result, on emulated operators.

Every allocation is counted; what a vendor's operator needs inside itself is not. "Given back" is a source whose experts
are released as they are read, as the loaders of models do; "kept" is one that stays. A reload has the memory of its
result from the beginning.

Run: python benchmarks/ascend_preparation.py        (no accelerator needed; 5 GB of memory)
"""

from __future__ import annotations

import platform

import attrs
import torch
from moe_plugin_ascend import plugin
from moe_plugin_ascend.emulation import install
from rich.console import Console
from rich.table import Table

from moe_core import LayerRequest
from moe_core.environment import PRESETS
from moe_core.manager import BackendManager
from moe_core.payloads import PreparedWeights, RawWeights
from moe_core.planner import make_plan
from moe_core.quant import BF16, W4A4_INT4, W4A8_INT8, W8A8_INT8, QuantScheme
from moe_core.testing.allocations import Allocations
from moe_core.weights.expected import expected_tensors

EXPERTS, HIDDEN, INNER = 16, 7168, 2048


@attrs.frozen
class Extra:
    """Memory beside source and result, in experts: of a first load and of a reload, source given back and kept."""

    expert_mib: float
    given_back: float
    kept: float
    reload_given_back: float
    reload_kept: float

    @classmethod
    def of(cls, scheme: QuantScheme) -> Extra:
        """Measure one scheme."""
        manager = BackendManager()
        manager.register("ascend_npu", plugin)
        request = LayerRequest(
            num_experts=EXPERTS, top_k=8, hidden_size=HIDDEN, intermediate_size=INNER, quant=scheme, a2a_backend="none"
        )
        plan, _ = make_plan(manager, request, PRESETS["ascend-a3"])
        expected = expected_tensors(request, EXPERTS)
        tensors = {name: torch.zeros(tensor.shape, dtype=tensor.dtypes[0]) for name, tensor in expected.items()}
        expert = sum(tensor[0].nbytes for tensor in tensors.values())

        def prepared(gives_back: bool, out: PreparedWeights | None) -> tuple[PreparedWeights, float]:
            counted = Allocations()

            def release(_: int) -> None:
                counted.given_back += expert

            raw = RawWeights(tensors=tensors, release=release if gives_back else None)
            with counted:
                done = manager.process_weights(plan, raw, out)
            made = 0 if out is not None else sum(tensor.data.nbytes for tensor in done.tensors.values())
            return done, max(0, counted.peak - made) / expert

        out, kept = prepared(False, None)
        return cls(
            expert / 2**20,
            prepared(True, None)[1],
            kept,
            *(prepared(gives_back, out)[1] for gives_back in (True, False)),
        )


def main() -> None:
    table = Table(
        title=f"{EXPERTS} experts, H {HIDDEN}, I {INNER}; {install()}; torch {torch.__version__}, {platform.machine()}"
    )
    for column in ("scheme", "one expert, MiB", "given back", "kept", "reload, given back", "reload, kept"):
        table.add_column(column, justify="right")
    for scheme in (BF16, W8A8_INT8, W4A8_INT8, W4A4_INT4):
        expert_mib, *experts = attrs.astuple(Extra.of(scheme))
        table.add_row(str(scheme), f"{expert_mib:.1f}", *(f"{extra:.2f}" for extra in experts))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
