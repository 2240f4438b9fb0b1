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
from moe_core.kernels import activation, combine, permute, quantize  # noqa: E402
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
    quantize=quantize.quantize,
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
Compare = Callable[[Any, Any], str]


@attrs.frozen
class Block:
    """One block: what to call of either implementation, what must move, and how results are compared."""

    name: str
    call: Call
    num_bytes: int
    compare: Compare


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


def _moved(where: torch.Tensor) -> Compare:
    """Tokens, scales and row map, at the rows that exist."""

    def compare(got: Any, want: Any) -> str:
        pairs = [(getattr(got[0], name), getattr(want[0], name)) for name in ("hidden_states", "scales")]
        rows = ([_bytes(part).flatten(0, -2)[where] for part in pair] for pair in pairs if pair[0] is not None)
        return _equal((got[1], want[1]), *((left, right) for left, right in rows))

    return compare


def _coded(real: torch.Tensor | None, exact: bool) -> Compare:
    """Codes and scales, at the rows that exist."""

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


class Sizes:
    """Random tokens of one size, and every block on them."""

    def __init__(self, hidden: int, inner: int, num_tokens: int) -> None:
        self.hidden, self.inner, self.num_tokens = hidden, inner, num_tokens
        self.ids = torch.rand(num_tokens, EXPERTS, device=DEVICE).topk(TOP_K).indices
        self.weights = torch.rand(num_tokens, TOP_K, device=DEVICE)
        self.x = torch.randn(num_tokens, hidden, device=DEVICE).bfloat16()
        self.slots, most = self.ids.numel(), int(torch.bincount(self.ids.flatten()).max())
        self.block = -(-most // ALIGNMENT) * ALIGNMENT
        flat, self.row_map = permute.permute_contiguous(self.x, self.ids, EXPERTS, alignment=ALIGNMENT)
        self.counts, self.ends = flat.num_tokens_per_expert, flat.group_ends
        self.num_rows = flat.hidden_states.shape[0]
        self.experts = permute.row_experts(self.counts, self.ends, self.num_rows)

    def blocks(self) -> list[Block]:
        """All of them."""
        return [*self._permutations(), *self._rows(), *self._rounded()]

    def _permutations(self) -> list[Block]:
        ids, x, block = self.ids, self.x, self.block
        fp8, scales = quantize.quantize(x, TokenDtype("fp8", "row_128"))
        masked_map, _ = permute.masked_row_map(ids, EXPERTS, block)
        rows, names = self.row_map.flatten().long(), ("row_map", "group_ends", "num_tokens_per_expert")
        copies = self.num_tokens + self.slots
        return [
            Block(
                "sort",
                lambda m: m.sort(ids, EXPERTS, ALIGNMENT),
                12 * self.slots,
                lambda a, b: _equal(*((getattr(a, name), getattr(b, name)) for name in names)),
            ),
            Block(
                "permute_contiguous bf16",
                lambda m: m.contiguous(x, ids, EXPERTS, alignment=ALIGNMENT),
                copies * 2 * self.hidden,
                _moved(rows),
            ),
            Block(
                "permute_contiguous fp8 + column scales",
                lambda m: m.contiguous(fp8, ids, EXPERTS, alignment=ALIGNMENT, scales=scales, column_major=True),
                copies * (self.hidden + self.hidden // 32),
                _moved(rows),
            ),
            Block(
                "permute_masked bf16",
                lambda m: m.masked(x, ids, EXPERTS, block),
                copies * 2 * self.hidden,
                _moved(masked_map.flatten().long()),
            ),
            Block(
                "row_experts",
                lambda m: m.row_experts(self.counts, self.ends, self.num_rows),
                4 * self.num_rows,
                lambda a, b: _equal((a, b)),
            ),
        ]

    def _rows(self) -> list[Block]:
        gate_up = torch.randn(self.num_rows, 2 * self.inner, device=DEVICE).bfloat16()
        out_rows = torch.randn(self.num_rows, self.hidden, device=DEVICE).bfloat16()
        there = self.experts >= 0
        return [
            Block(
                "activate contiguous",
                lambda m: m.activate(gate_up, SWIGLU, real=self.experts),
                3 * self.slots * 2 * self.inner,
                lambda a, b: _near(a[there], b[there]),
            ),
            Block(
                "combine",
                lambda m: m.combine(out_rows, self.row_map, self.weights, torch.bfloat16, scaling_factor=2.5),
                (self.num_tokens + self.slots) * 2 * self.hidden,
                lambda a, b: _equal((a, b)),
            ),
        ]

    def _rounded(self) -> list[Block]:
        row_128 = TokenDtype("fp8", "row_128")
        tokens = Block(
            "quantize tokens fp8/row_128",
            lambda m: m.quantize(self.x, row_128),
            self.num_tokens * self.hidden * 3,
            _coded(None, exact=True),
        )
        flat = torch.randn(self.num_rows, 2 * self.inner, device=DEVICE).bfloat16()
        blocks = torch.randn(EXPERTS, self.block, 2 * self.inner, device=DEVICE).bfloat16()
        in_block = (torch.arange(self.block, device=DEVICE) < self.counts[:, None]).flatten()
        contiguous = (flat, self.experts, self.experts >= 0)
        return [
            tokens,
            *(self._activated(word, *contiguous) for word in ("fp8/column_128", "fp8/ue8m0_128", "int8/token")),
            self._activated("fp8/column_128", blocks, self.counts, in_block),
        ]

    def _activated(self, word: str, hidden: torch.Tensor, real: torch.Tensor, there: torch.Tensor) -> Block:
        dtype, where = TokenDtype(*word.split("/")), "masked" if hidden.dim() == 3 else "contiguous"
        return Block(
            f"activate + quantize {where} {word}",
            lambda m: m.quantize(hidden, dtype, activation=SWIGLU, real=real),
            self.slots * (4 * self.inner + self.inner),
            _coded(there, exact=False),
        )


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
            for block in Sizes(hidden, inner, num_tokens).blocks():
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
