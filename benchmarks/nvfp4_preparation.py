"""Time and memory of preparing a layer of NVFP4 experts for FlashInfer's CuteDSL kernels.

Times are in plain copies of the layer's bytes: into new memory for a load, into memory that is there for a reload.
Memory is what is held beside source and result, every allocation counted, in experts. "Kept" is a source that stays,
whose codes may be borrowed; "given back" one whose experts are released as they are read.

Run: python benchmarks/nvfp4_preparation.py        (on the GPU if there is one; 2.5 GB of memory)
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import torch
from moe_plugin_flashinfer import plugin
from rich.console import Console
from rich.table import Table

from moe_core import LayerRequest
from moe_core.backends.torch import plugin as torch_plugin
from moe_core.environment import PRESETS
from moe_core.manager import BackendManager
from moe_core.payloads import PreparedWeights, RawWeights
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan
from moe_core.quant import NVFP4
from moe_core.testing.allocations import Allocations
from moe_core.weights.expected import expected_tensors

EXPERTS, HIDDEN, INNER = 32, 7168, 2048
REPEATS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensors = dict[str, torch.Tensor]


def planned(kernel: str) -> tuple[BackendManager, MoEPlan]:
    manager = BackendManager()
    manager.register("torch", torch_plugin)
    manager.register("flashinfer_cutedsl", plugin)
    request = LayerRequest(
        num_experts=EXPERTS,
        top_k=8,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        quant=NVFP4,
        a2a_backend="none",
        runner_backend=f"flashinfer_cutedsl.{kernel}",
    )
    return manager, make_plan(manager, request, PRESETS["b200"])[0]


def stored(request: LayerRequest, ratio: float) -> Tensors:
    """Any codes and block scales; the gate has `ratio` times the up half's global scale."""
    tensors = {}
    for name, expected in expected_tensors(request, EXPERTS).items():
        dtype = expected.dtypes[0]
        if dtype == torch.float32:
            tensors[name] = torch.full(expected.shape, 0.01, device=DEVICE)
        else:
            # Among normal numbers of e4m3, half of which is one too.
            codes = torch.randint(32, 120, expected.shape, dtype=torch.uint8, device=DEVICE)
            tensors[name] = codes.view(dtype)
    tensors["w13_global_scale"][:, 0] *= ratio
    return tensors


def seconds(work: Callable[[], object]) -> float:
    """The fastest of some calls."""
    times = []
    for _ in range(REPEATS):
        _wait()
        start = time.perf_counter()
        work()
        _wait()
        times.append(time.perf_counter() - start)
    return min(times)


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def extra_memory(prepare: Callable[[], PreparedWeights], source: Tensors, reload: bool) -> float:
    """Peak beside source and result, in experts."""
    with Allocations() as counted:
        prepared = prepare()
    given = {tensor.data_ptr() for tensor in source.values()}
    made = sum(tensor.data.nbytes for tensor in prepared.tensors.values() if tensor.data.data_ptr() not in given)
    return (counted.peak - (0 if reload else made)) / sum(tensor[0].nbytes for tensor in source.values())


def row(kernel: str, kind: str, ratio: float) -> list[str]:
    manager, plan = planned(kernel)
    tensors = stored(plan.request, ratio)
    release = None if kind == "load, source kept" else lambda expert: None
    raw = RawWeights(tensors=tensors, release=release)
    out = manager.process_weights(plan, raw, None) if kind == "reload" else None
    target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def copy() -> object:
        if out is None:
            return {name: tensor.clone() for name, tensor in tensors.items()}
        return [target[name].copy_(tensor) for name, tensor in tensors.items()]

    def prepare() -> PreparedWeights:
        return manager.process_weights(plan, raw, out)

    copied, prepared = seconds(copy), seconds(prepare)
    memory = extra_memory(prepare, tensors, reload=out is not None)
    halves = "equal" if ratio == 1 else f"{ratio:g} : 1"
    return [
        kernel,
        kind,
        halves,
        f"{copied * 1e3:.1f}",
        f"{prepared * 1e3:.1f}",
        f"{prepared / copied:.2f}",
        f"{memory:.2f}",
    ]


def main() -> None:
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else cpu
    table = Table(title=f"{EXPERTS} experts, H {HIDDEN}, I {INNER}; {card}; torch {torch.__version__}")
    for column in ("kernel", "", "halves", "copy, ms", "prepared, ms", "copies", "extra experts"):
        table.add_column(column, justify="right")
    for kernel in ("masked", "wrapper"):
        for kind in ("load, source kept", "load, given back", "reload"):
            table.add_row(*row(kernel, kind, 1.0))
    table.add_row(*row("wrapper", "reload", 2.0))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
