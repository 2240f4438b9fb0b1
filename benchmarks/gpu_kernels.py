"""The blocks of `moe_core.kernels.ops` on an NVIDIA GPU: Triton beside torch, bit by bit, and beside the memory.

Run: python benchmarks/gpu_kernels.py        (without a GPU: only the bits, at small sizes, in Triton's interpreter)

A time is that of replayed CUDA graphs of one block, so that at a few tokens data comes from the cache, as it does after
the kernel before it in a layer. GB/s counts what must move: real rows once in and once out. Triton's calls run under
`set_sync_debug_mode("error")`.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import attrs
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from moe_core.activation import SWIGLU  # noqa: E402
from moe_core.kernels import activation, codes, combine, permute  # noqa: E402
from moe_core.kernels.triton import activation as triton_activation  # noqa: E402
from moe_core.kernels.triton import combine as triton_combine  # noqa: E402
from moe_core.kernels.triton import permute as triton_permute  # noqa: E402
from moe_core.kernels.triton import quantize as triton_quantize  # noqa: E402
from moe_core.kernels.triton import sort as triton_sort  # noqa: E402
from moe_core.specs import TokenDtype  # noqa: E402
from moe_core.tuning.ceilings import measure_ceilings  # noqa: E402
from moe_core.tuning.timing import measure  # noqa: E402

TORCH = SimpleNamespace(
    sort=permute.permute,
    contiguous=permute.permute_contiguous,
    masked=permute.permute_masked,
    row_experts=permute.row_experts,
    activate=activation.activate,
    quantize=codes.quantize,
    combine=combine.combine,
)
TRITON = SimpleNamespace(
    sort=triton_sort.permute,
    contiguous=triton_permute.permute_contiguous,
    masked=triton_permute.permute_masked,
    row_experts=triton_permute.row_experts,
    activate=triton_activation.activate_rows,
    quantize=triton_quantize.quantize,
    combine=triton_combine.combine,
)
TOP_K, ALIGNMENT = 8, 128
EXPERTS = 128 if ON_GPU else 12
#: Hidden and intermediate size.
WIDTHS = ((2048, 768), (7168, 2048)) if ON_GPU else ((256, 192),)
TOKENS = (64, 2048, 8192) if ON_GPU else (9,)
DEVICE = "cuda" if ON_GPU else "cpu"

Call = Callable[[SimpleNamespace], Any]


@attrs.frozen
class Block:
    """One block: what to call of either implementation, what must move, and how results are compared."""

    name: str
    call: Call
    num_bytes: int
    compare: Callable[[Any, Any], str]


def _equal(*pairs: tuple[torch.Tensor, torch.Tensor]) -> str:
    return "same bits" if all(torch.equal(a, b) for a, b in pairs) else "DIFFERENT"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Codes as integers: not all of torch takes small floats."""
    return tensor.view(torch.int8) if tensor.itemsize == 1 else tensor


def _near(got: torch.Tensor, want: torch.Tensor) -> str:
    """Share of values that differ, and by how many steps of their dtype at most (neighbouring floats, codes)."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.itemsize]
    left, right = (part.view(bits).long() for part in (got, want))
    if got.is_floating_point():
        # Sign and size to one ascending row of integers.
        lowest = torch.iinfo(bits).min
        left, right = (torch.where(part < 0, lowest - part, part) for part in (left, right))
    off = (left - right).abs()
    return f"{float((off > 0).double().mean()):.1e} differ, {int(off.max()) if off.numel() else 0} steps"


def blocks(hidden: int, inner: int, num_tokens: int) -> list[Block]:
    """Every block at one size."""
    ids = torch.rand(num_tokens, EXPERTS, device=DEVICE).topk(TOP_K).indices
    weights = torch.rand(num_tokens, TOP_K, device=DEVICE)
    x = torch.randn(num_tokens, hidden, device=DEVICE).bfloat16()
    fp8, scales = codes.quantize(x, TokenDtype("fp8", "row_128"))
    slots, most = ids.numel(), int(torch.bincount(ids.flatten()).max())
    block = -(-most // ALIGNMENT) * ALIGNMENT
    flat, row_map = permute.permute_contiguous(x, ids, EXPERTS, alignment=ALIGNMENT)
    blocked, masked_map = permute.permute_masked(x, ids, EXPERTS, block)
    counts, ends, num_rows = flat.num_tokens_per_expert, flat.group_ends, flat.hidden_states.shape[0]
    experts = permute.row_experts(counts, ends, num_rows)
    rows, there = row_map.flatten().long(), experts >= 0
    in_block = (torch.arange(block, device=DEVICE) < counts[:, None]).flatten()
    gate_up = torch.randn(num_rows, 2 * inner, device=DEVICE).bfloat16()
    gate_up_blocks = torch.randn(EXPERTS, block, 2 * inner, device=DEVICE).bfloat16()
    out_rows = torch.randn(num_rows, hidden, device=DEVICE).bfloat16()
    row_bytes, inner_bytes = 2 * hidden, 2 * inner

    def moved(where: torch.Tensor) -> Callable[[Any, Any], str]:
        return lambda got, want: _equal(
            (got[1], want[1]),
            *(
                (_bytes(a).flatten(0, -2)[where], _bytes(b).flatten(0, -2)[where])
                for a, b in ((getattr(got[0], n), getattr(want[0], n)) for n in ("hidden_states", "scales"))
                if a is not None
            ),
        )

    def coded(real: torch.Tensor | None, exact: bool) -> Callable[[Any, Any], str]:
        def compare(got: Any, want: Any) -> str:
            (a, s), (b, t) = got, want
            keep = slice(None) if real is None else real
            a, b = (_bytes(part).flatten(0, -2)[keep] for part in (a, b))
            s, t = (part.reshape(real.shape[0] if real is not None else len(part), -1)[keep] for part in (s, t))
            if exact:
                return _equal((a, b), (s, t))
            a, b = (part.view(got[0].dtype) for part in (a, b))
            return f"codes {_near(a, b)}; scales {_near(s, t)}"

        return compare

    found = [
        Block(
            "sort",
            lambda m: m.sort(ids, EXPERTS, ALIGNMENT),
            12 * slots,
            lambda a, b: _equal(
                *((getattr(a, n), getattr(b, n)) for n in ("row_map", "group_ends", "num_tokens_per_expert"))
            ),
        ),
        Block(
            "permute_contiguous bf16",
            lambda m: m.contiguous(x, ids, EXPERTS, alignment=ALIGNMENT),
            (num_tokens + slots) * row_bytes,
            moved(rows),
        ),
        Block(
            "permute_contiguous fp8 + column scales",
            lambda m: m.contiguous(fp8, ids, EXPERTS, alignment=ALIGNMENT, scales=scales, column_major=True),
            (num_tokens + slots) * (hidden + hidden // 32),
            moved(rows),
        ),
        Block(
            "permute_masked bf16",
            lambda m: m.masked(x, ids, EXPERTS, block),
            (num_tokens + slots) * row_bytes,
            moved(masked_map.flatten().long()),
        ),
        Block(
            "row_experts", lambda m: m.row_experts(counts, ends, num_rows), 4 * num_rows, lambda a, b: _equal((a, b))
        ),
        Block(
            "activate contiguous",
            lambda m: m.activate(gate_up, SWIGLU, real=experts),
            3 * slots * inner_bytes,
            lambda a, b: _near(a[there], b[there]),
        ),
        Block(
            "quantize tokens fp8/row_128",
            lambda m: m.quantize(x, TokenDtype("fp8", "row_128")),
            num_tokens * hidden * 3,
            coded(None, exact=True),
        ),
        Block(
            "combine",
            lambda m: m.combine(out_rows, row_map, weights, torch.bfloat16, scaling_factor=2.5),
            (num_tokens + slots) * row_bytes,
            lambda a, b: _equal((a, b)),
        ),
    ]
    for word, hidden_rows, real, mask in (
        ("fp8/column_128", gate_up, experts, there),
        ("fp8/ue8m0_128", gate_up, experts, there),
        ("int8/token", gate_up, experts, there),
        ("fp8/column_128", gate_up_blocks, blocked.masked_m, in_block),
    ):
        token_dtype, where = TokenDtype(*word.split("/")), "masked" if hidden_rows.dim() == 3 else "contiguous"
        found.append(
            Block(
                f"activate + quantize {where} {word}",
                lambda m, h=hidden_rows, t=token_dtype, r=real: m.quantize(h, t, activation=SWIGLU, real=r),
                slots * (2 * inner_bytes + inner),
                coded(mask, exact=False),
            )
        )
    return found


def microseconds(block: Block, implementation: SimpleNamespace, calls: int) -> float | None:
    """Median time per call; None without a GPU."""
    if not ON_GPU:
        return None
    return measure([lambda: block.call(implementation)] * calls, DEVICE, repeats=5).microseconds


def compare(block: Block) -> str:
    """What `block.compare` says; torch may wait for the device, Triton may not."""
    want = block.call(TORCH)
    # The first call compiles.
    got = block.call(TRITON)
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
        got = block.call(TRITON)
        torch.cuda.set_sync_debug_mode("default")
    return block.compare(got, want)


def main() -> None:
    """Compare, measure, print one table."""
    torch.manual_seed(0)
    started = time.monotonic()
    rate = measure_ceilings(DEVICE, ()).bytes_per_us if ON_GPU else 1.0
    name = torch.cuda.get_device_name() if ON_GPU else "CPU, interpreted"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, triton {version('triton')}"
    table = Table("H, I", "T", "block", "torch us", "triton us", "GB/s", "of bandwidth", "against torch")
    for hidden, inner in WIDTHS:
        for num_tokens in TOKENS:
            for block in blocks(hidden, inner, num_tokens):
                said = compare(block)
                slow, fast = microseconds(block, TORCH, 2), microseconds(block, TRITON, 10)
                row = [f"{hidden}, {inner}", str(num_tokens), block.name]
                if slow is not None and fast is not None:
                    per_us = block.num_bytes / fast
                    row += [f"{slow:.1f}", f"{fast:.1f}", f"{per_us / 1e3:.0f}", f"{per_us / rate:.2f}"]
                else:
                    row += [""] * 4
                table.add_row(*row, said)
                print(json.dumps([*row, said]), flush=True)
            if ON_GPU:
                torch.cuda.empty_cache()
    table.caption = f"{name}, {versions}; {rate / 1e6:.2f} TB/s; {time.monotonic() - started:.0f} s"
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
