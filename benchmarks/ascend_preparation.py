"""Memory that the preparation of a layer for Ascend holds beside its source and its result, on emulated operators.

Every allocation is counted; what a vendor's operator needs inside itself is not. "Given back" is a source whose experts
are released as they are read, as the loaders of models do; "kept" is one that stays.

Run: python benchmarks/ascend_preparation.py        (no accelerator needed; 3 GB of memory)
"""

from __future__ import annotations

import platform

import torch
from moe_plugin_ascend import plugin
from moe_plugin_ascend.emulation import install
from moe_plugin_ascend.emulation.memory import Allocations
from rich.console import Console
from rich.table import Table

from moe_core import LayerRequest
from moe_core.environment import PRESETS
from moe_core.manager import BackendManager
from moe_core.payloads import RawWeights
from moe_core.planner import make_plan
from moe_core.quant import BF16, W4A4_INT4, W4A8_INT8, W8A8_INT8, QuantScheme
from moe_core.weights.expected import expected_tensors

EXPERTS, HIDDEN, INNER = 16, 7168, 2048


def measure(scheme: QuantScheme, gives_back: bool) -> tuple[float, float]:
    """Size of an expert in MiB, and the memory beside source and result, in experts."""
    manager = BackendManager()
    manager.register("ascend_npu", plugin)
    request = LayerRequest(
        num_experts=EXPERTS, top_k=8, hidden_size=HIDDEN, intermediate_size=INNER, quant=scheme, a2a_backend="none"
    )
    plan, _ = make_plan(manager, request, PRESETS["ascend-a3"])
    expected = expected_tensors(request, EXPERTS)
    tensors = {name: torch.zeros(tensor.shape, dtype=tensor.dtypes[0]) for name, tensor in expected.items()}
    expert = sum(tensor[0].nbytes for tensor in tensors.values())
    counted = Allocations()

    def release(_: int) -> None:
        counted.given_back += expert

    raw = RawWeights(tensors=tensors, release=release if gives_back else None)
    with counted:
        prepared = manager.process_weights(plan, raw, None)
    kept = sum(tensor.data.nbytes for tensor in prepared.tensors.values())
    return expert / 2**20, max(0, counted.peak - kept) / expert


def main() -> None:
    table = Table(
        title=f"{EXPERTS} experts, H {HIDDEN}, I {INNER}; {install()}; torch {torch.__version__}, {platform.machine()}"
    )
    for column in ("scheme", "one expert, MiB", "extra, source given back", "extra, source kept"):
        table.add_column(column, justify="right")
    for scheme in (BF16, W8A8_INT8, W4A8_INT8, W4A4_INT4):
        size, given_back = measure(scheme, gives_back=True)
        table.add_row(str(scheme), f"{size:.1f}", f"{given_back:.2f}", f"{measure(scheme, gives_back=False)[1]:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
