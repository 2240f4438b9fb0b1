"""Which tiles make the grouped GEMMs of the Triton runners fastest, for the table of `moe_core.backends.triton.tiles`.

Run: python benchmarks/gpu_tiles.py "half:mixtral-8x7b:256,2048"        (needs an NVIDIA GPU and a C compiler)

Prints, per number of tokens and rows per tile, the best tiles of both GEMMs, whose sum decides, beside those of the
table. Every candidate is compiled beforehand, in as many processes as there are cores; the kernels come from Triton's
cache afterwards. A candidate counts if its result is that of the table's own tile, which is compared with fp32 first. A
figure is the smallest time of a few launches, whose weights do not fit into the cache. Large products make a GPU slower
within seconds: at thousands of rows per expert, differences below a tenth need a second run.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any, TypeVar

import attrs
import torch
import triton
import typer

from moe_core.activation import SWIGLU
from moe_core.backends.triton.tiles import TilePair, TileTable
from moe_core.kernels.triton.gemm import GroupedGemm
from moe_core.kernels.triton.quantize import quantize_rows
from moe_core.kernels.triton.sort import SortedSlots, sort_slots
from moe_core.kernels.triton.tiles import Tile
from moe_core.kernels.triton.weights import GroupedWeight
from moe_core.tuning.shapes import SHAPES

#: Operands (as in the table), shape and numbers of tokens.
CELLS = (
    "half:mixtral-8x7b:256,2048,8192",
    "half:qwen3-30b-a3b:16,64,256,2048,8192",
    "byte:qwen3-30b-a3b:16,64,256,2048",
    "half:deepseek-v3:2048,8192",
    "byte:deepseek-v3:16,64,256",
    "byte_weight:qwen3-30b-a3b:16,64,256,512,2048",
)
#: Both results are rounded to bf16; codes are equal.
TOLERANCE = 8e-3
_BLOCK = 128
_FULL_SHARED = 227 << 10


def candidates(operands: str, second: bool) -> Iterator[Tile]:
    """Everything worth a try."""
    for tile in _cut(operands):
        # The first GEMM reads two rows of weights per output.
        tile = attrs.evolve(tile, n=tile.n if second else tile.n // 2)
        row_bytes, weight_bytes = (1 if operands == "byte" else 2), (2 if operands == "half" else 1)
        stage = tile.k * (tile.m * row_bytes + tile.n * (1 if second else 2) * weight_bytes)
        if stage * tile.num_stages > _FULL_SHARED - 1024:
            continue
        yield tile
        if tile.tma and second:
            yield attrs.evolve(tile, tma_rows=True)
        if tile.tma and second and tile.m >= 64:
            yield from (attrs.evolve(tile, tma_rows=True, resident=resident) for resident in (1, 2))


def _cut(operands: str) -> Iterator[Tile]:
    """Sizes, with as many columns as there are weight rows in a tile."""
    if operands == "byte":
        for m, stages in ((16, (3, 4, 6)), (32, (3, 4, 6)), (64, (3, 4))):
            for n in (64, 128, 256):
                for tma in (False, True):
                    swaps = (True,) if m < 64 else (False, True)
                    for swap in swaps if n >= 64 else (False,):
                        yield from (Tile(m, n, 128, 8 if n == 256 else 4, s, swap, tma) for s in stages)
        yield from (Tile(128, n, 128, 8, s, tma=True) for n in (128, 256) for s in (3, 4))
        return
    if operands == "byte_weight":
        # They are decoded on their way, so that the bulk copy engine is of no use; eight warps: see the table.
        for m in (16, 32, 64, 128):
            for n in (64, 128):
                for k, depths in ((64, (3, 4, 6)), (128, (2, 3, 4))):
                    yield from (Tile(m, n, k, 4, s, swap) for s in depths for swap in (False, True))
        yield from (Tile(m, n, 64, 8, s) for m in (64, 128) for n in (128, 256) for s in (3, 4))
        return
    for m in (16, 32):
        for n in (64, 128):
            for k, stages in ((64, (4, 6)), (128, (2, 3, 4, 6))):
                for tma in (False, True):
                    yield from (Tile(m, n, k, 4, s, True, tma) for s in stages)
    yield from (Tile(32, n, 128, 4, s) for n in (64, 128) for s in (3, 4))
    for n, warps in ((64, 4), (128, 4), (128, 8), (256, 4), (256, 8)):
        yield from (Tile(64, n, 64, warps, s, tma=True) for s in (3, 4, 5))
        if n < 256:
            yield Tile(64, n, 128, warps, 3, tma=True)
    for n, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
        yield from (Tile(128, n, 64, warps, s, tma=True) for s in (3, 4))
        if n < 256:
            yield Tile(128, n, 128, warps, 3, tma=True)
    yield from (Tile(256, n, 64, 8, s, tma=True) for n in (64, 128) for s in (3, 4))


_Job = TypeVar("_Job")


class Problem:
    """Weights, rows and routing of one cell; on `meta`, only their types, for compiling."""

    def __init__(self, operands: str, shape: str, tokens: int, device: str, multiprocessors: int = 1) -> None:
        sizes = SHAPES[shape]
        self.experts, self.top_k = sizes.num_experts, sizes.top_k
        self.hidden, self.inner = sizes.hidden_size, sizes.intermediate_size
        self.operands, self.device = operands, device
        slots = tokens * self.top_k
        self.weights = (
            self._weight(2 * self.inner, self.hidden),
            self._weight(self.hidden, self.inner),
        )
        row_group = _BLOCK if operands == "byte" else 0
        gemm = functools.partial(GroupedGemm, row_group=row_group, multiprocessors=multiprocessors)
        self.gemms = gemm(self.weights[0], activation=SWIGLU), gemm(self.weights[1])
        self.rows = [self._operand(tokens, self.hidden), self._operand(slots, self.inner)]
        self.ids = torch.empty(tokens, self.top_k, dtype=torch.int64, device=device)
        if device == "cuda":
            self.ids = torch.rand(tokens, self.experts, device=device).topk(self.top_k, dim=-1).indices
        self._slots: dict[int, SortedSlots] = {}
        self.outs = (self._out(slots, self.inner), self._out(slots, self.hidden))

    def _weight(self, rows: int, columns: int) -> GroupedWeight:
        shape = (self.experts, rows, columns)
        if self.operands == "half":
            data = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            for part in data if self.device == "cuda" else ():
                part.normal_(std=columns**-0.5)
            return GroupedWeight(data=data)
        if self.operands == "byte_weight":
            data = torch.empty(shape, dtype=torch.int8, device=self.device)
            scale = torch.empty(self.experts, rows, 1, device=self.device)
            if self.device == "cuda":
                # The root mean square of such codes is 73.6.
                data.random_(-127, 128)
                scale.uniform_(0.5, 1.5).mul_(columns**-0.5 / 73.6)
            return GroupedWeight(data=data, scale=scale, block=(1, 0))
        data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        scale = torch.empty(self.experts, rows // _BLOCK, columns // _BLOCK, device=self.device)
        if self.device == "cuda":
            for part in data:
                part.copy_(torch.randn(rows, columns, device=self.device))
            scale.uniform_(0.5, 1.5).mul_(columns**-0.5)
        return GroupedWeight(data=data, scale=scale, block=(_BLOCK, _BLOCK))

    def _operand(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.device == "cuda":
            values = torch.randn(rows, columns, device=self.device).bfloat16()
            return quantize_rows(values, torch.float8_e4m3fn, _BLOCK) if self.operands == "byte" else (values, None)
        dtype = torch.float8_e4m3fn if self.operands == "byte" else torch.bfloat16
        scale = torch.empty(rows, columns // _BLOCK, device=self.device) if self.operands == "byte" else None
        return torch.empty(rows, columns, dtype=dtype, device=self.device), scale

    def _out(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)

    def slots(self, block_m: int) -> SortedSlots:
        """The slots with tiles of so many rows."""
        if block_m not in self._slots:
            self._slots[block_m] = sort_slots(self.ids, self.experts, block_m)
        return self._slots[block_m]

    def run(self, second: bool, tile: Tile) -> torch.Tensor:
        """One launch."""
        (rows, scale), slots = self.rows[second], self.slots(tile.m)
        gather: dict[str, Any] = {} if second else {"order": slots.order, "top_k": self.top_k}
        return self.gemms[second](rows, slots.tiles, self.outs[second], tile, row_scale=scale, **gather)

    def exact(self, second: bool, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert's rows of the result, and what they should be, in fp32."""
        order = self.slots(16).order
        mine = torch.where(self.ids.flatten()[order] == expert)[0]
        codes, scale = self.rows[second]
        values = codes.float() if scale is None else codes.float() * scale.repeat_interleave(_BLOCK, 1)
        source = values[mine if second else (order[mine] // self.top_k)]
        weight, factor = self.weights[second].data[expert].float(), self.weights[second].scale
        if factor is not None:
            block = [size // blocks for size, blocks in zip(weight.shape, factor.shape[1:], strict=True)]
            weight *= factor[expert].repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        result = source @ weight.T
        if not second:
            gate, up = result.chunk(2, dim=-1)
            result = torch.nn.functional.silu(gate) * up
        return mine, result


def precompile(jobs: Sequence[_Job], compiled: Callable[[_Job], str], begin: Callable[[], None] | None = None) -> None:
    """Compile every job in worker processes that need no GPU, and print what does not.

    Args:
        jobs: What `compiled` takes, of the module's top level; it returns what failed.
        compiled: Launches the job's kernels, which compiles them.
        begin: What workers run first, `compile_only` or more.
    """
    context, workers = multiprocessing.get_context("spawn"), max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=begin or compile_only) as pool:
        for error in filter(None, pool.map(compiled, jobs, chunksize=2)):
            print("does not compile:", error, flush=True)


def compile_only() -> None:
    """Make a launch a compilation for Hopper."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime import driver, jit

    class Target:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: object = None) -> int:
            return 0

    driver.set_active(Target())
    run = jit.JITFunction.run
    jit.JITFunction.run = lambda self, *a, grid, warmup, **k: run(self, *a, grid=grid, warmup=True, **k)
    # What is compiled already would be launched.
    CompiledKernel.run = lambda self, *arguments: None


@functools.cache
def _types(operands: str, shape: str) -> Problem:
    return Problem(operands, shape, 64, "meta")


def _compile(job: tuple[str, tuple[str, ...], bool, Tile]) -> str:
    operands, shapes, second, tile = job
    try:
        for shape in shapes:
            _types(operands, shape).run(second, tile)
    except Exception as error:
        return f"{operands} {second} {tile}: {type(error).__name__}: {str(error)[-200:]}"
    return ""


def smallest_time(problem: Problem, second: bool, tile: Tile, repeats: int) -> float:
    """Microseconds of the quickest of a few launches."""
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The launch itself takes longer on the CPU than a short kernel runs.
        torch.cuda._sleep(200_000)
        start.record()
        problem.run(second, tile)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return min(times[1:])


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def sweep(problem: Problem, second: bool, own: Tile, tiles: list[Tile]) -> dict[Tile, float]:
    """Microseconds of every candidate that is right, and of the table's `own`; quickest first."""
    want = problem.run(second, own).clone()
    for expert in sorted({0, problem.experts // 2, problem.experts - 1}):
        mine, exact = problem.exact(second, expert)
        if len(mine) and not _error(want[mine], exact) < TOLERANCE:
            raise ValueError(f"the table's own {own}: expert {expert} has error {_error(want[mine], exact):.1e}")
    found = {own: smallest_time(problem, second, own, 5)}
    for tile in tiles:
        try:
            got = problem.outs[second].fill_(math.nan)
            found[tile] = min(found.get(tile, math.inf), smallest_time(problem, second, tile, 3))
        except Exception as error:
            print(f"failed: {tile}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        if not _error(got, want) < TOLERANCE:
            print(f"wrong: {found.pop(tile):.0f} us, {tile}, error {_error(got, want):.1e}", flush=True)
    return dict(sorted(found.items(), key=lambda each: each[1]))


def _plausible(tile: Tile, mean: float) -> bool:
    """Tiles of at most four times and at least a quarter of the rows of an expert."""
    return mean / 4 <= tile.m <= max(16, 4 * mean) or (tile.m >= 64 and mean >= 64)


def show(title: str, own: TilePair, found: tuple[dict[Tile, float], dict[Tile, float]]) -> None:
    """The best pair of each number of rows, the best of them first, and the table's."""
    pairs = {own}
    for m in {tile.m for tile in found[0]} & {tile.m for tile in found[1]}:
        first, second = (next(tile for tile in times if tile.m == m) for times in found)
        pairs.add((first, second))
    print(f"== {title}")
    for first, second in sorted(pairs, key=lambda pair: found[0][pair[0]] + found[1][pair[1]]):
        times = found[0][first], found[1][second]
        print(f"{sum(times):9.1f} = {times[0]:.1f} + {times[1]:.1f} us", "(the table's)" * ((first, second) == own))
        print(f"            {written(first)}, {written(second)}", flush=True)


def written(tile: Tile) -> str:
    """As it is written in the table."""
    sizes = ", ".join(str(size) for size in attrs.astuple(tile)[:5])
    rest = attrs.asdict(tile, filter=lambda field, value: field.default is not attrs.NOTHING and value != field.default)
    more = "".join(f", {name}={value}" for name, value in rest.items() if name not in ("num_warps", "num_stages"))
    return f"Tile({sizes}{more})"


def main(
    cells: Annotated[list[str] | None, typer.Argument(help="operands:shape:tokens,tokens,...; default: all.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds after which no further cell begins.")] = 270,
) -> None:
    """Measure and print."""
    began = time.perf_counter()
    torch.manual_seed(0)
    wanted = [cell.split(":") for cell in cells or CELLS]
    shapes: dict[str, tuple[str, ...]] = {}
    for operands, shape, _ in wanted:
        shapes[operands] = (*shapes.get(operands, ()), shape)
    jobs = [
        (operands, names, second, tile)
        for operands, names in shapes.items()
        for second in (False, True)
        for tile in candidates(operands, second)
    ]
    precompile(jobs, _compile)
    print(f"{len(jobs)} candidates compiled after {time.perf_counter() - began:.0f} s", flush=True)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, multiprocessors, flush=True)
    for operands, shape, counts in wanted:
        for tokens in map(int, counts.split(",")):
            if time.perf_counter() - began > budget:
                print(f"no time left for {operands} {shape} {tokens}", flush=True)
                continue
            problem = Problem(operands, shape, tokens, "cuda", multiprocessors)
            mean = tokens * problem.top_k / problem.experts
            blocks = (_BLOCK, _BLOCK) if operands == "byte" else (0, 0)
            table = TileTable(
                operands=operands,
                shared_bytes=_FULL_SHARED,
                descriptors=True,
                device_name=torch.cuda.get_device_name(),
                block_columns=blocks,
            )
            own = table.choose(mean)
            found = []
            for second in (False, True):
                tiles = [t for o, _, s, t in jobs if (o, s) == (operands, second) and _plausible(t, mean)]
                found.append(sweep(problem, second, own[second], tiles))
            show(f"{operands}, {shape}, {tokens} tokens, {mean:g} rows per expert", own, (found[0], found[1]))
            del problem
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
