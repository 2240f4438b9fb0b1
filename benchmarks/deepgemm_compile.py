"""The layers of `gpu_deepgemm.py`, and the compilation of what they need by processes side by side."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import attrs
import torch
from moe_plugin_deepgemm import plugin
from moe_plugin_deepgemm.experts import _RECIPES, DeepGemmExperts, Projection, by_end, by_row
from moe_plugin_deepgemm.library import grouped_gemm
from moe_plugin_deepgemm.runner_specs import ROW_ALIGNMENT

from moe_core.activation import SWIGLU
from moe_core.backends.torch import plugin as torch_plugin
from moe_core.backends.triton import plugin as triton_plugin
from moe_core.environment import PRESETS
from moe_core.kernels.permute import max_rows
from moe_core.layer import MoELayer
from moe_core.manager import BackendManager
from moe_core.payloads import ContiguousTokens, RawWeights, Tensor
from moe_core.quant import BF16, FP8_BLOCK128, LayerQuant
from moe_core.request import LayerRequest, Workload
from moe_core.specs import TokenDtype
from moe_core.tuning.layers import Batches

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
#: E, K, H, I.
LAYERS: tuple[tuple[int, ...], ...] = (
    (128, 8, 2048, 768),
    (256, 8, 7168, 2048),
    (8, 2, 4096, 14336),
    (512, 10, 4096, 1024),
)
#: Token counts: of the two GEMMs alone, and the last of whole layers.
COUNTS = (1024, 2048, 4096, 8192)
if not ON_GPU:
    LAYERS = ((4, 2, 128, 128),)
    COUNTS = (32, 64)
SCHEMES = {"bf16": BF16, "fp8": FP8_BLOCK128}


def expecting(tokens: ContiguousTokens, of_rows: Tensor) -> dict[str, Any]:
    """By ends, with the number of rows that a group is expected to have."""
    spare = ROW_ALIGNMENT // 2
    expected = max(1, of_rows.shape[0] // tokens.group_ends.shape[0] - spare)
    return {**by_end(tokens, of_rows), "expected_m_for_psum_layout": expected}


#: How the library can be told which rows are whose.
FORMS = {"by end": by_end, "by row": by_row, "by end, expecting": expecting}
#: What processes at work may hold together, and seconds after which they are stopped.
GIGABYTES, MOST_SECONDS = 76.0, 120.0


def manager() -> BackendManager:
    """The plugin and the built-in ones, installed or not."""
    found = BackendManager()
    for name, module in (("torch", torch_plugin), ("triton", triton_plugin), ("cuda_deepgemm", plugin)):
        found.register(name, module)
    return found


def request_of(sizes: tuple[int, ...], dtype: str) -> LayerRequest:
    """The layer without pins."""
    experts, top_k, hidden, inner = sizes
    return LayerRequest(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=inner,
        dtype="bf16",
        quant=LayerQuant.of(SCHEMES[dtype]),
    )


def layer_of(
    request: LayerRequest, weights: dict[str, Tensor], num_tokens: int, runner: str, dispatcher: str = ""
) -> MoELayer:
    """One combination, bound."""
    plugins = manager()
    machine = plugins.probe() if ON_GPU else PRESETS["h100"]
    a2a = dispatcher or ("none.contiguous" if "contiguous" in runner else "none")
    workload = Workload(max_tokens=num_tokens, graph_capture=True)
    pinned = attrs.evolve(request, a2a_backend=a2a, runner_backend=runner, workloads=workload)
    layer = MoELayer(pinned, environment=machine, manager=plugins)
    layer.load_weights(RawWeights(tensors=dict(weights), handed_over=True))
    return layer


def _unwritten(sizes: tuple[int, ...], dtype: str, names: Sequence[str] = ("w13", "w2")) -> dict[str, Tensor]:
    """Weights of any values: what is compiled depends on their sizes alone."""
    experts, _, hidden, inner = sizes
    found = {}
    for name in names:
        rows, columns = (2 * inner, hidden) if name == "w13" else (hidden, inner)
        codes = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
        found[name] = torch.empty(experts, rows, columns, dtype=codes, device=DEVICE)
        if dtype == "fp8":
            found[f"{name}_scale"] = torch.ones(experts, rows // 128, columns // 128, device=DEVICE)
    return found


def compile_layer(index: int, dtype: str, what: str) -> None:
    """Meet every size of one layer that will be timed.

    What is met is the kernels of one library: `deep_gemm`, the same at the last size only (`deep_gemm_last`), `triton`.
    """
    start, sizes = time.monotonic(), LAYERS[index]
    counts = COUNTS if what == "deep_gemm" else COUNTS[-1:]
    done = (_compile_triton if what == "triton" else _compile_deep_gemm)(sizes, dtype, counts)
    print(f"{done} kernels and sizes in {time.monotonic() - start:.0f} s")


def _compile_deep_gemm(sizes: tuple[int, ...], dtype: str, counts: Sequence[int]) -> int:
    codes = TokenDtype("fp8", "column_128") if dtype == "fp8" else None
    gemm, done = grouped_gemm(dtype, "contiguous"), 0
    rows = [ROW_ALIGNMENT, *(max_rows(count * sizes[1], sizes[0], ROW_ALIGNMENT) for count in counts)]
    for name in ("w13", "w2"):
        # One projection at a time, since the memory is shared with other processes.
        weights = _unwritten(sizes, dtype, (name,))
        operand: Any = weights[name] if codes is None else (weights[name], weights[f"{name}_scale"])
        projection = Projection(gemm, operand, {} if codes is None else {"recipe": _RECIPES["column_128"]})
        experts = DeepGemmExperts(
            format="contiguous",
            w13=projection,
            w2=projection,
            codes=codes,
            activation=SWIGLU,
            module=None,
            post_norm=None,
            device=weights[name].device,
            tell_groups=by_end,
        )
        for form, tell_groups in FORMS.items():
            told = attrs.evolve(experts, tell_groups=tell_groups)
            try:
                for number in dict.fromkeys(rows):
                    told.compile(number)
                    done += 1
            except (RuntimeError, TypeError) as error:
                print(f"{form} is not taken: {str(error).splitlines()[0]}")
        del experts, projection, operand, weights
    return done


def _compile_triton(sizes: tuple[int, ...], dtype: str, counts: Sequence[int]) -> int:
    request, weights = request_of(sizes, dtype), _unwritten(sizes, dtype)
    runners = (("none", "triton.fused"),) if ON_GPU else ()
    layers = [layer_of(request, weights, max(counts), runner, a2a) for a2a, runner in runners]
    for count in counts:
        arguments = Batches.random(request, count, DEVICE, num_sets=1).one(0)
        for layer in layers:
            layer(*arguments)
    return len(layers) * len(counts)


@attrs.frozen
class Work:
    """A process of this benchmark.

    Attributes:
        arguments: Of `gpu_deepgemm.py`.
        gigabytes: What it needs of the GPU's memory.
    """

    arguments: tuple[str, ...]
    gigabytes: float

    @classmethod
    def compiling(cls, dtypes: Sequence[str], library: str) -> list[Work]:
        """Everything that is to be compiled, with what of DeepGEMM; what takes longest or least memory first."""
        found = []
        for index, sizes in enumerate(LAYERS):
            experts, top_k, hidden, inner = sizes
            rows = max_rows(max(COUNTS) * top_k, experts, ROW_ALIGNMENT)
            passes = 2 * rows * (2 * hidden + 3 * inner) / 1e9 + 1
            for dtype in dtypes:
                layer = experts * 3 * hidden * inner * (1 if dtype == "fp8" else 2) / 1e9
                found.append(cls(("compile", str(index), dtype, "triton"), layer + passes))
                found.append(cls(("compile", str(index), dtype, library), layer * 2 / 3 + passes))
        return sorted(found, key=lambda work: ("triton" in work.arguments, work.gigabytes))

    @staticmethod
    def run_all(works: Sequence[Work]) -> None:
        """Run all side by side, as many as fit into the memory; print what each says when it ends."""
        start, waiting, running = time.monotonic(), list(works), dict[Work, subprocess.Popen[str]]()
        while waiting or running:
            held = sum(work.gigabytes for work in running)
            for work in list(waiting):
                if held + work.gigabytes <= GIGABYTES or not running:
                    held += work.gigabytes
                    waiting.remove(work)
                    running[work] = work._start()
            time.sleep(0.2)
            passed = time.monotonic() - start
            for work, process in list(running.items()):
                if process.poll() is None and passed > MOST_SECONDS:
                    process.kill()
                if process.poll() is not None:
                    del running[work]
                    left = f"{len(waiting) + len(running)} left"
                    print(f"[{passed:4.0f} s, {left}] {' '.join(work.arguments)}: {_said(process)}", flush=True)

    def _start(self) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("gpu_deepgemm.py")
        # What the times need comes before what the kit needs.
        nice = ["nice", "-n", "10"] if "kit" in self.arguments else []
        command = [*nice, sys.executable, str(script), *self.arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _said(process: subprocess.Popen[str]) -> str:
    output: IO[str] = process.stdout  # type: ignore[assignment]
    return f"exit {process.returncode}, {output.read()[-2000:].strip()}"
