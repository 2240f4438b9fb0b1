"""What stands around the grouped GEMMs of a layer at 8192 tokens, pass by pass, as shares of the memory's bandwidth.

Run: PYTHONPATH=.:plugins/cuda_deepgemm:SITE python benchmarks/gpu_passes.py [bf16|fp8]     (SITE holds deep_gemm)

Of the passes whose shape was chosen by measurement, other shapes are timed beside the one that is used: (values of a
token, warps) for copies, (groups, warps, rows) for codes, (columns, rows) for the activation alone. Times are those of
replayed graphs of several calls. On a CPU the script runs on a tiny layer under Triton's interpreter, to be tried out.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from deepgemm_compile import DEVICE, LAYERS, ON_GPU, SCHEMES, request_of
from gpu_deepgemm import TOKENS, moved_bytes

from moe_core.activation import SWIGLU
from moe_core.kernels import ops
from moe_core.kernels.permute import max_rows
from moe_core.kernels.triton import activation, permute, quantize, rows, sort
from moe_core.specs import TokenDtype
from moe_core.tuning.ceilings import measure_ceilings
from moe_core.tuning.layers import Batches, release_memory
from moe_core.tuning.timing import measure

ALIGNMENT, CALLS = 128, 4
COPIES = ((1024, 2), (1024, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))
CODES = ((8, 1, 8), (8, 1, 4), (8, 1, 2), (8, 1, 1), (8, 2, 4), (16, 2, 8), (16, 2, 2), (32, 4, 8), (32, 4, 2))
ACTIVATIONS = ((1024, 4), (1024, 1), (2048, 8), (2048, 2), (512, 8))
_COLUMN = TokenDtype("fp8", "column_128")


@contextlib.contextmanager
def copy_shape(shape: tuple[int, int]) -> Iterator[None]:
    """Copies in another shape."""
    with mock.patch.object(permute, "_COPY_BLOCK", shape[0]), mock.patch.object(permute, "_COPY_WARPS", shape[1]):
        yield


@contextlib.contextmanager
def code_shape(shape: tuple[int, int, int]) -> Iterator[None]:
    """Codes in another shape."""
    with (
        mock.patch.object(quantize, "_program", return_value=shape[:2]),
        mock.patch.object(rows, "_MOST_ROWS", shape[2]),
    ):
        yield


@contextlib.contextmanager
def activation_shape(shape: tuple[int, int]) -> Iterator[None]:
    """The activation alone in another shape."""
    with mock.patch.object(activation, "_BLOCK", shape[0]), mock.patch.object(rows, "_MOST_ROWS", shape[1]):
        yield


def passes(sizes: tuple[int, ...], dtype: str) -> Iterator[tuple[str, Callable[[], Any], Any, tuple[Any, ...]]]:
    """Name, the call, what gives it another shape, and the shapes."""
    experts, top_k, hidden, inner = sizes
    tokens, ids, weights = Batches.random(request_of(sizes, dtype), TOKENS, DEVICE, num_sets=1).one(0)
    permutation = sort.permute(ids, experts, ALIGNMENT)
    num_rows = max_rows(TOKENS * top_k, experts, ALIGNMENT)
    groups = permutation.num_tokens_per_expert, permutation.group_ends, num_rows
    of_rows, scales = ops.row_experts(*groups), None
    yield "sort", lambda: sort.permute(ids, experts, ALIGNMENT), None, ()
    yield "experts of rows", lambda: ops.row_experts(*groups), None, ()
    if dtype == "fp8":
        yield "codes of tokens", lambda floats=tokens: ops.quantize(floats, _COLUMN), code_shape, CODES
        tokens, scales = ops.quantize(tokens, _COLUMN)
    arguments = tokens, permutation.row_map, (num_rows,), None, scales, True
    yield "copy", lambda: permute._copy_tokens(*arguments), copy_shape, COPIES
    first = torch.randn(num_rows, 2 * inner, device=DEVICE).bfloat16()
    if dtype == "fp8":
        between = lambda: ops.quantize(first, _COLUMN, activation=SWIGLU, real=of_rows)  # noqa: E731
        yield "activation", between, code_shape, CODES
    else:
        between = lambda: ops.activate(first, SWIGLU, real=of_rows)  # noqa: E731
        yield "activation", between, activation_shape, ACTIVATIONS

    last = torch.randn(num_rows, hidden, device=DEVICE).bfloat16()
    combine = lambda: ops.combine(last, permutation.row_map, weights, torch.bfloat16)  # noqa: E731
    yield "combine", combine, None, ()


def _time(call: Callable[[], Any]) -> float:
    return round(measure([call] * CALLS, DEVICE, repeats=7).microseconds, 1)


def main() -> None:
    """One line per layer and dtype."""
    bandwidth = measure_ceilings(DEVICE, ()).bytes_per_us
    for dtype in sys.argv[1:] or SCHEMES:
        for sizes in LAYERS:
            moved = moved_bytes(request_of(sizes, dtype), TOKENS)
            moved["copy"] = int(TOKENS * (1 + sizes[1]) * sizes[2] * (2 if dtype == "bf16" else 1 + 4 / 128))
            row: dict[str, Any] = {"layer": sizes, "dtype": dtype, "bandwidth": round(bandwidth / 1e6, 2)}
            for name, call, reshaped, shapes in passes(sizes, dtype):
                release_memory(DEVICE)
                row[name] = _time(call)
                if name in moved:
                    row[f"{name}, of bandwidth"] = round(moved[name] / bandwidth / row[name], 2)
                for shape in shapes:
                    with reshaped(shape):
                        row[f"{name} {shape}"] = _time(call)
            print(json.dumps(row), flush=True)
    print(torch.cuda.get_device_name() if ON_GPU else "CPU, interpreted")


if __name__ == "__main__":
    main()
