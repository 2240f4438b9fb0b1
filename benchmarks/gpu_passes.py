"""What stands around the grouped GEMMs of a layer at 8192 tokens, pass by pass, as shares of the memory's bandwidth.

Run: PYTHONPATH=.:plugins/cuda_deepgemm:SITE python benchmarks/gpu_passes.py [bf16|fp8] [INDEX]   (SITE holds deep_gemm)

INDEX chooses one layer. Of the passes whose shape was chosen by measurement, other shapes are timed beside the one that
is used: (values of a token, warps) for copies, (groups, warps, rows) for codes, (columns, rows) for the activation
alone, (slots and blocks at a time, experts) for the sort, whether it begins while the launch in front of it ends for
the ids; and what separate passes take that are one now. Times are those of replayed graphs of several calls. On a CPU
the script runs on a tiny layer under Triton's interpreter, to be tried out.
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
from moe_core.kernels.checks import check_ids
from moe_core.kernels.permute import max_rows
from moe_core.kernels.triton import activation, permute, quantize, rounded_rows, rows, sort
from moe_core.kernels.triton import ids as triton_ids
from moe_core.kernels.triton.launch import Launches
from moe_core.specs import TokenDtype
from moe_core.tuning.ceilings import measure_ceilings
from moe_core.tuning.layers import Batches, release_memory
from moe_core.tuning.timing import measure

ALIGNMENT, CALLS = 128, 4
COPIES = ((1024, 2), (2048, 8), (4096, 8))
#: The last two were used before, for 2048 and 4096 values.
CODES = ((8, 2, 4), (8, 4, 4), (4, 1, 4), (2, 1, 4), (1, 1, 4), (16, 2, 4), (32, 4, 4))
ACTIVATIONS = ((2048, 2), (1024, 2), (1024, 1))
SORTS = ((256, 128, 8), (128, 512, 4), (128, 1024, 8), (64, 2048, 4))
_COLUMN = TokenDtype("fp8", "column_128")


@contextlib.contextmanager
def id_shape(is_dependent: bool) -> Iterator[None]:
    """Ids checked by a launch of the other kind."""
    new = {"has_dependent_launches": lambda device: is_dependent, "_launches": Launches(triton_ids._checked_ids)}
    with mock.patch.multiple(triton_ids, **new):
        yield


@contextlib.contextmanager
def copy_shape(shape: tuple[int, int]) -> Iterator[None]:
    """Copies in another shape."""
    with mock.patch.object(permute, "_COPY_BLOCK", shape[0]), mock.patch.object(permute, "_COPY_WARPS", shape[1]):
        yield


@contextlib.contextmanager
def code_shape(shape: tuple[int, int, int]) -> Iterator[None]:
    """Codes in another shape."""
    with (
        mock.patch.object(quantize, "program_of", return_value=shape[:2]),
        mock.patch.object(rounded_rows, "program_of", return_value=shape[:2]),
        mock.patch.object(rows, "_MOST_ROWS", shape[2]),
    ):
        yield


@contextlib.contextmanager
def activation_shape(shape: tuple[int, int]) -> Iterator[None]:
    """The activation alone in another shape."""
    with mock.patch.object(activation, "_BLOCK", shape[0]), mock.patch.object(rows, "_MOST_ROWS", shape[1]):
        yield


@contextlib.contextmanager
def sort_shape(shape: tuple[int, int, int]) -> Iterator[None]:
    """The sort in another shape."""
    kernels = {"_count": sort.kernels.count_blocks, "_add_up": sort.kernels.add_up_blocks}
    kernels["_place"] = sort.kernels.place_blocks
    # Variants are kept for everything that changes elsewhere, which these constants do not.
    new: dict[str, Any] = {name: Launches(kernel) for name, kernel in kernels.items()}
    sizes = dict(zip(("_COUNT_BLOCK", "_ADDED_BLOCKS", "_ADDED_EXPERTS"), shape, strict=True))
    with mock.patch.multiple(sort, **new, **sizes):
        yield


def passes(sizes: tuple[int, ...], dtype: str) -> Iterator[tuple[str, Callable[[], Any], Any, tuple[Any, ...]]]:
    """Name, the call, what gives it another shape, and the shapes."""
    experts, top_k, hidden, inner = sizes
    tokens, ids, weights = Batches.random(request_of(sizes, dtype), TOKENS, DEVICE, num_sets=1).one(0)
    permutation = sort.permute(ids, experts, ALIGNMENT)
    row_map, num_rows = permutation.row_map, max_rows(TOKENS * top_k, experts, ALIGNMENT)
    groups = permutation.num_tokens_per_expert, permutation.group_ends, num_rows
    of_rows = ops.row_experts(*groups)
    yield "ids checked by torch", lambda: check_ids(ids, experts), None, ()
    few = ids[:1]
    yield "ids of one token", lambda: ops.checked_ids(few, experts), id_shape, (False,) if ON_GPU else ()
    yield "ids", lambda: ops.checked_ids(ids, experts), id_shape, (False,) if ON_GPU else ()
    yield "sort", lambda: sort.permute(ids, experts, ALIGNMENT), sort_shape, SORTS if dtype == "fp8" else ()
    yield "experts of rows", lambda: ops.row_experts(*groups), None, ()
    first = torch.randn(num_rows, 2 * inner, device=DEVICE).bfloat16()
    if dtype == "fp8":
        codes, scales = ops.quantize(tokens, _COLUMN)
        yield "codes of tokens", lambda: ops.quantize(tokens, _COLUMN), None, ()
        yield "copy of codes", lambda: permute._copy_tokens(codes, row_map, (num_rows,), None, scales, True), None, ()
        yield "copy of codes alone", lambda: permute._copy_tokens(codes, row_map, (num_rows,)), None, ()
        yield "copy", lambda: rounded_rows.rounded_rows(tokens, row_map, (num_rows,), _COLUMN), code_shape, CODES
        yield "activation", lambda: ops.quantize(first, _COLUMN, activation=SWIGLU, real=of_rows), code_shape, CODES
    else:
        yield "copy", lambda: permute._copy_tokens(tokens, row_map, (num_rows,)), copy_shape, COPIES
        yield "activation", lambda: ops.activate(first, SWIGLU, real=of_rows), activation_shape, ACTIVATIONS
    last = torch.randn(num_rows, hidden, device=DEVICE).bfloat16()
    yield "combine", lambda: ops.combine(last, row_map, weights, torch.bfloat16), None, ()


def _time(call: Callable[[], Any]) -> float:
    # Where memory lies makes a difference of up to 15 %: every call gets its own anew.
    release_memory(DEVICE)
    return round(measure([call] * CALLS, DEVICE, repeats=7).microseconds, 1)


def main() -> None:
    """One line per layer and dtype."""
    bandwidth = measure_ceilings(DEVICE, ()).bytes_per_us
    indices = [int(word) for word in sys.argv[1:] if word.isdecimal()] or range(len(LAYERS))
    for dtype in [dtype for dtype in SCHEMES if dtype in sys.argv] or SCHEMES:
        for sizes in (LAYERS[index] for index in indices):
            moved = moved_bytes(request_of(sizes, dtype), TOKENS)
            moved["copy"] = moved["permute"]
            row: dict[str, Any] = {"layer": sizes, "dtype": dtype, "bandwidth": round(bandwidth / 1e6, 2)}
            for name, call, reshaped, shapes in passes(sizes, dtype):
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
