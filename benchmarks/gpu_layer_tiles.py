"""Which tiles make whole layers on the Triton runner fastest, for the table of `moe_core.backends.triton.tiles`.

Run: python benchmarks/gpu_layer_tiles.py "bf16:qwen3-30b-a3b:16,64,256" --runner triton.fused_panels
(needs an NVIDIA GPU and a C compiler)

`gpu_tiles.py` times GEMMs alone. With few rows, sorting, rounding and the ends of launches are a tenth of the time, and
which tiles overlap with them best is seen in whole layers only. Candidates of the first GEMM take turns beside the
table's second one, those of the second beside the best first one, and the best of both beside each other, with and
without a second one that waits for its own rows, all as captured graphs over several inputs. Prints medians; a
candidate counts if its result is that of the table's own tiles.
Every candidate is compiled beforehand, in as many processes as there are cores.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import attrs
import torch
import triton
import typer
from gpu_tiles import TOLERANCE, compile_only, precompile, written

from moe_core import MoELayer, RawWeights
from moe_core.backends.triton import device, tiles
from moe_core.backends.triton.tiles import TilePair, TileTable
from moe_core.bound import BoundExperts
from moe_core.environment import load_environment
from moe_core.kernels.panels import ROW_BYTES
from moe_core.kernels.triton.tiles import Tile
from moe_core.manager import default_manager
from moe_core.measurements import MeasurementTable
from moe_core.payloads import TORCH_DTYPES
from moe_core.planner import make_plan
from moe_core.quant import SCHEMES
from moe_core.request import LayerRequest
from moe_core.tuning.layers import Batches, random_weights
from moe_core.tuning.shapes import SHAPES, LayerShape
from moe_core.tuning.timing import Prepared, Timing, prepare, take_turns
from moe_core.weights.expected import expected_tensors

#: Scheme, shape and numbers of tokens.
CELLS = (
    "bf16:qwen3-30b-a3b:16,64,256",
    "fp8_block128:qwen3-30b-a3b:16,64,256",
    "bf16:mixtral-8x7b:256",
)
#: Name of a scheme -> what both projections multiply.
OPERANDS = {"bf16": "half", "fp8_block128": "byte", "w8a8_int8": "byte"}
FUSED = "triton.fused"
#: Most sums that a warp keeps in registers.
_MOST_SUMS_OF_WARP = 64 * 64
#: Kilobytes that a program takes of a multiprocessor's shared memory beside its steps, and those of all programs.
_BESIDE, _SHARED = 2, 228


def candidates(operands: str, m: int, halves: int, panels: bool) -> Iterator[Tile]:
    """Tiles of `m` token rows and some weight rows: steps of some sizes, as many in flight as leave room for programs.

    `halves` is 2 where gate and up are in one tile, else 1; a multiprocessor has one to four programs.
    """
    value = 2 if operands == "half" else 1
    steps = (ROW_BYTES // value,) if panels or operands != "half" else (64, 128, 256)
    for rows, warps in ((64, 4), (128, 4), (128, 8), (256, 4), (256, 8)):
        if m * rows > _MOST_SUMS_OF_WARP * warps:
            continue
        for k in steps if m < 64 else steps[:2]:
            step = k * value * (m + rows)
            depths = {min(8, ((_SHARED // programs - _BESIDE) << 10) // step) for programs in (1, 2, 3, 4)}
            for depth in sorted(depths - {0, 1}):
                yield from _fetched(Tile(m, rows // halves, k, warps, depth), halves)


def _fetched(tile: Tile, halves: int) -> Iterator[Tile]:
    """The ways to get the weights of a tile, and the rows of a second projection."""
    if tile.m < 64:
        if tile.num_warps == 4 or tile.k == 128 or tile.n * halves == 256:
            yield attrs.evolve(tile, swap=True)
            yield attrs.evolve(tile, swap=True, tma=True)
        return
    for swap in (False, True):
        copied = attrs.evolve(tile, swap=swap, tma=True)
        yield copied
        if halves == 1:
            yield attrs.evolve(copied, tma_rows=True)
            if not swap:
                yield attrs.evolve(copied, tma_rows=True, resident=1)


def rows_per_tile(mean: float) -> tuple[int, ...]:
    """Tiles worth a try for so many rows per expert, on average."""
    return tuple(m for m in (16, 32, 64, 128) if mean <= 1.5 * m and (m == 16 or m <= 3 * mean))


# --- compiling


def compile_layers_only() -> None:
    """`compile_only` for whole layers."""
    compile_only()
    # On a GPU launches depend on each other.
    device._INTERPRETED = attrs.evolve(device._INTERPRETED, pdl=True)


def layer_request(scheme: str, shape: LayerShape, runner: str) -> LayerRequest:
    """The layer in bf16, unquantized ones in the dtype that their scheme is called."""
    dtype = scheme if scheme in TORCH_DTYPES else "bf16"
    return shape.request(quant=SCHEMES[scheme], runner_backend=runner, dtype=dtype)


def compile_layer(job: tuple[str, str, str, TilePair]) -> str:
    """Compile what a layer of this scheme, shape and runner launches with these tiles; what failed, or nothing."""
    scheme, shape, runner, pair = job
    try:
        sizes = attrs.evolve(SHAPES[shape], num_experts=SHAPES[shape].top_k)
        request = layer_request(scheme, sizes, runner)
        wanted = expected_tensors(request, request.top_k)
        # Some scales may not be zero.
        tensors = {name: torch.ones(each.shape).to(each.dtypes[0]) for name, each in wanted.items()}
        ids = torch.arange(request.top_k).repeat(2, 1)
        layer = MoELayer(request, environment=load_environment("h100"))
        with only(pair):
            layer.load_weights(RawWeights(tensors=tensors))
        hidden_states = torch.zeros(2, request.hidden_size, dtype=TORCH_DTYPES[request.dtype])
        layer(hidden_states, ids, torch.ones(2, request.top_k))
    except Exception as error:
        return f"{scheme} {_written(pair)}: {type(error).__name__}: {str(error)[-200:]}"
    return ""


@contextmanager
def only(pair: TilePair | None) -> Iterator[None]:
    """Layers that are bound inside have these tiles at any number of rows; the table's for None."""
    kept = tiles.measured
    if pair is not None:
        tiles.measured = lambda *_: {math.inf: pair}
    try:
        yield
    finally:
        tiles.measured = kept


def _written(pair: TilePair | None) -> str:
    return "the table's" if pair is None else ", ".join(map(written, pair))


# --- timing


class Race:
    """One layer with any tiles."""

    def __init__(self, scheme: str, shape: str, runner: str, log: list[dict[str, Any]]) -> None:
        self.scheme, self.shape, self.panels, self.log = scheme, shape, in_panels(runner), log
        self.request = layer_request(scheme, SHAPES[shape], runner)
        self.manager = default_manager()
        self.plan, _ = make_plan(self.manager, self.request, self.manager.probe("cuda"), MeasurementTable())
        raw = RawWeights(tensors=random_weights(self.request, "cuda"))
        self.weights = self.manager.process_weights(self.plan, raw, None)

    def run(self, tokens: int, pairs: list[TilePair], title: str, seconds: float) -> list[TilePair]:
        """The pairs whose results are right, quickest first."""
        batches = Batches.random(self.request, tokens, "cuda")
        own = self._ready(batches, None)
        want = [each.clone() for each in own.outputs]
        ready = {_written(None): own}
        named = {_written(pair): pair for pair in pairs}
        for name, pair in named.items():
            try:
                made = self._ready(batches, pair)
            except Exception as error:
                print(f"failed: {name}: {type(error).__name__}: {str(error)[-150:]}", flush=True)
                continue
            if (worst := max(map(_error, made.outputs, want))) < TOLERANCE:
                ready[name] = made
            else:
                print(f"wrong: {name}: error {worst:.1e}", flush=True)
        timings = take_turns(ready, 21, seconds)
        self._show(timings, tokens, title)
        return [named[name] for name in _ranked(timings) if name in named]

    def _ready(self, batches: Batches, pair: TilePair | None) -> Prepared:
        with only(pair):
            layer = BoundExperts(self.plan, self.weights, self.manager)
        made = prepare(batches.calls(layer), "cuda")
        torch.cuda.synchronize()
        return made

    def _show(self, timings: dict[str, Timing], tokens: int, title: str) -> None:
        print(f"== {self.scheme}, {self.shape}, {tokens} tokens: {title}")
        own = timings[_written(None)].microseconds
        for name in _ranked(timings):
            us = timings[name].microseconds
            print(f"{us:9.1f} us {100 * us / own:6.1f} %  {name}", flush=True)
            cell = {"scheme": self.scheme, "shape": self.shape, "tokens": tokens, "title": title}
            self.log.append({**cell, "microseconds": us, "smallest": timings[name].smallest, "tiles": name})


def _ranked(timings: dict[str, Timing]) -> list[str]:
    return sorted(timings, key=lambda name: timings[name].microseconds)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def in_panels(runner: str) -> bool:
    """Whether this runner's weights lie in panels."""
    return runner.endswith("_panels")


def starts(scheme: str, m: int, mean: float, panels: bool) -> TilePair:
    """The table's tiles, or the first candidates where it has others of so many rows."""
    own = TileTable(
        operands=OPERANDS[scheme],
        shared_bytes=_SHARED << 10,
        descriptors=True,
        device_name=torch.cuda.get_device_name(),
        panels=panels,
    ).choose(mean)
    if own[0].m == m:
        return own
    return next(candidates(OPERANDS[scheme], m, 2, panels)), next(candidates(OPERANDS[scheme], m, 1, panels))


def both_ways(pair: TilePair) -> list[TilePair]:
    """A pair whose second GEMM waits for the end of the first, and one where it waits for its own rows."""
    first, second = pair
    return [
        (first, attrs.evolve(second, own_rows=False)),
        (first, attrs.evolve(second, own_rows=True, tma_rows=False, resident=0)),
    ]


def search(race: Race, tokens: int, seconds: float) -> None:
    """First GEMMs, second ones, and the best of each beside each other."""
    sizes, operands = SHAPES[race.shape], OPERANDS[race.scheme]
    mean = tokens * sizes.top_k / sizes.num_experts
    finals: list[TilePair] = []
    for m in rows_per_tile(mean):
        first, second = starts(race.scheme, m, mean, race.panels)
        pairs = [(each, second) for each in candidates(operands, m, 2, race.panels)]
        firsts = race.run(tokens, pairs, f"first GEMMs of {m} rows", seconds)
        first = firsts[0][0] if firsts else first
        pairs = [(first, each) for each in candidates(operands, m, 1, race.panels)]
        found = race.run(tokens, pairs, f"second GEMMs of {m} rows", seconds)
        finals += [pair for one in firsts[:3] for other in found[:3] for pair in both_ways((one[0], other[1]))]
    race.run(tokens, [*dict.fromkeys(finals)], "best of all", 2 * seconds)


def jobs_of(cell: str, runner: str) -> Iterator[tuple[str, str, str, TilePair]]:
    """All pairs to be compiled: every candidate of either GEMM once, second ones with both ways of waiting."""
    scheme, shape, counts = cell.split(":")
    sizes = SHAPES[shape]
    wanted = {m for count in counts.split(",") for m in rows_per_tile(int(count) * sizes.top_k / sizes.num_experts)}
    for m in sorted(wanted):
        firsts, seconds = ([*candidates(OPERANDS[scheme], m, halves, in_panels(runner))] for halves in (2, 1))
        for index in range(max(len(firsts), len(seconds))):
            for pair in both_ways((firsts[index % len(firsts)], seconds[index % len(seconds)])):
                yield scheme, shape, runner, pair


def main(
    cells: Annotated[list[str] | None, typer.Argument(help="scheme:shape:tokens,tokens,...; default: all.")] = None,
    runner: Annotated[str, typer.Option(help="Whose tiles: a fused runner's, weights as stored or in panels.")] = FUSED,
    budget: Annotated[float, typer.Option(help="Seconds after which no further cell begins.")] = 270,
    seconds: Annotated[float, typer.Option(help="How long to time the candidates of one GEMM.")] = 2,
    output: Annotated[Path | None, typer.Option(help="File for all medians.")] = None,
) -> None:
    """Measure and print."""
    began = time.perf_counter()
    wanted = cells or list(CELLS)
    jobs = [*dict.fromkeys(job for cell in wanted for job in jobs_of(cell, runner))]
    precompile(jobs, compile_layer, compile_layers_only)
    print(f"{len(jobs)} pairs compiled after {time.perf_counter() - began:.0f} s", flush=True)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    log: list[dict[str, Any]] = []
    for cell in wanted:
        scheme, shape, counts = cell.split(":")
        race = Race(scheme, shape, runner, log)
        for tokens in map(int, counts.split(",")):
            if time.perf_counter() - began > budget:
                print(f"no time left for {cell}, {tokens} tokens", flush=True)
                continue
            search(race, tokens, seconds)
            if output is not None:
                output.write_text(json.dumps(log, indent=1))
        del race
        torch.cuda.empty_cache()
    print(f"done after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
