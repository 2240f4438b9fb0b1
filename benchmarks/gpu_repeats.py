"""Whether a layer of the Triton runners is the same bits call after call: at once, captured, and beside other work.

Run: python benchmarks/gpu_repeats.py bf16 fp8_block128     (needs an NVIDIA GPU and a C compiler; default: all schemes)

Launches of a layer overlap, some wait for rows of each other instead of for a whole launch, and compilers have computed
wrongly now and then. One right result proves little there. For each scheme and runner, every entry of the table of
tiles gets two numbers of tokens, about the fewest and the most that it is for, and one token is tried too. The
result of one input is compared with the layer in fp32, and of every input all further ones with the first, bit by bit:
calls that nothing waits between, and replays of a graph into poisoned outputs, both over the inputs in turns and every
other round beside copies and products on a second stream. Ends with 1 if any differs, fails or had no time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import attrs
import torch
import triton
import typer
from gpu_layer_tiles import compile_layer, compile_layers_only, in_panels, layer_request
from gpu_tiles import precompile

from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.backends.triton import tiles
from moe_core.backends.triton.tiles import TilePair
from moe_core.backends.triton.weights import operands_of
from moe_core.errors import ResolutionError
from moe_core.payloads import Tensor
from moe_core.quant import SCHEMES, WHOLE
from moe_core.tuning.layers import Batches, random_weights
from moe_core.tuning.reference import Reference
from moe_core.tuning.shapes import SHAPES, LayerShape
from moe_core.tuning.timing import prepare

RUNNERS = ("triton.fused", "triton.fused_panels")


@attrs.frozen
class Subject:
    """A scheme on a runner, and the tiles that its layers get by their rows per expert."""

    scheme: str
    runner: str
    pairs: dict[float, TilePair]

    def token_counts(self, shape: LayerShape) -> list[int]:
        """One token and two, the most that each entry is for and one more; the last has no end."""
        *bounds, _ = self.pairs
        bounds.append(1.5 * bounds[-1])
        most = [math.floor(rows * shape.num_experts / shape.top_k) for rows in bounds]
        return sorted({1, 2, *most, *(count + 1 for count in most[:-1])} - {0})


def subjects(schemes: list[str], runners: list[str], shape: LayerShape, device_name: str) -> Iterator[Subject]:
    """Those of these schemes that these runners compute."""
    for scheme in schemes:
        for runner in runners:
            request = layer_request(scheme, shape, runner)
            try:
                MoELayer(request, device="cuda")
            except ResolutionError:
                continue
            yield Subject(scheme, runner, tiles.measured(_operands(request), device_name, in_panels(runner)))


def _operands(request: LayerRequest) -> str:
    """As the runner finds them when it has the weights: the shapes here are whole steps of planes."""
    w13, w2 = request.local_quant.w13, request.local_quant.w2
    in_planes = ("int4", (1, 128)), ("int4", (1, WHOLE))
    if all((each.weight_dtype, each.weight_block) in in_planes for each in (w13, w2)):
        return "planes"
    return operands_of(w13, w2)


class OtherWork:
    """Copies and products on a second stream, which take multiprocessors and bandwidth from the layer."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._matrix = torch.randn(2048, 2048, device="cuda").bfloat16()
        self._product = torch.empty_like(self._matrix)
        self._source = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        self._copy = torch.empty_like(self._source)

    def begin(self, times: int) -> None:
        """Queue some."""
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                torch.mm(self._matrix, self._matrix, out=self._product)
                self._copy.copy_(self._source)


class Repeats:
    """One layer's results of several inputs, again and again."""

    def __init__(self, layer: MoELayer, batches: Batches, other: OtherWork) -> None:
        self._calls, self._other = batches.calls(layer), other
        self.want: list[Tensor] = [call().clone() for call in self._calls]
        self._differing = torch.zeros((), dtype=torch.int64, device="cuda")

    def eager(self, rounds: int) -> int:
        """Calls whose result was another one; nothing waits between them."""
        for index in range(rounds):
            if index % 2:
                self._other.begin(2)
            for call, want in zip(self._calls, self.want, strict=True):
                self._compare(call(), want)
        return self._found()

    def captured(self, rounds: int) -> int:
        """The same of replays, each into outputs that hold NaN."""
        graph = prepare(self._calls, "cuda")
        for index in range(rounds):
            for output in graph.outputs:
                output.fill_(math.nan)
            if index % 2:
                self._other.begin(2)
            graph.sample()
            for output, want in zip(graph.outputs, self.want, strict=True):
                self._compare(output, want)
        return self._found()

    def _compare(self, output: Tensor, want: Tensor) -> None:
        # On the device: the host's waiting would be a gap between calls.
        self._differing += (output.view(torch.int16) != want.view(torch.int16)).any()

    def _found(self) -> int:
        found = int(self._differing)
        self._differing.zero_()
        return found


def look_at(
    subject: Subject, shape: LayerShape, counts: list[int], calls: int, other: OtherWork
) -> Iterator[dict[str, Any]]:
    """One row for each number of tokens."""
    request = layer_request(subject.scheme, shape, subject.runner)
    weights = random_weights(request, "cuda")
    layer = MoELayer(request, device="cuda")
    layer.load_weights(RawWeights(tensors=weights))
    for tokens in counts:
        batches = Batches.random(request, tokens, "cuda", num_sets=4)
        repeats = Repeats(layer, batches, other)
        rounds = math.ceil(calls / batches.num_sets)
        yield {
            "scheme": subject.scheme,
            "runner": subject.runner,
            "tokens": tokens,
            "calls": rounds * batches.num_sets,
            "error": Reference(request, weights, batches.one(0)).check(repeats.want[0]),
            "eager": repeats.eager(rounds),
            "captured": repeats.captured(rounds),
        }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['scheme']:>20} {row['runner']:<20} {row['tokens']:5} tokens: error {row['error']:.1e}, of "
        f"{row['calls']} calls differ {row['eager']} eager, {row['captured']} captured"
    )


def main(
    schemes: Annotated[list[str] | None, typer.Argument(help="Names of schemes; default: all that Triton has.")] = None,
    runner: Annotated[list[str] | None, typer.Option(help="Fused runners; default: both.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens; default: those of the table's entries.")] = None,
    shape: Annotated[str, typer.Option(help="A name in moe_core.tuning.shapes.")] = "qwen3-30b-a3b",
    calls: Annotated[int, typer.Option(help="Eager calls of a layer, and as many captured ones.")] = 200,
    budget: Annotated[float, typer.Option(help="Seconds after which no further layer begins.")] = 540,
    output: Annotated[Path | None, typer.Option(help="File for all rows.")] = None,
) -> None:
    """Repeat, compare and print."""
    began, device_name, sizes = time.perf_counter(), torch.cuda.get_device_name(), SHAPES[shape]
    print(device_name, torch.__version__, triton.__version__, flush=True)
    wanted = [*subjects(schemes or [*SCHEMES], runner or [*RUNNERS], sizes, device_name)]
    jobs = {(each.scheme, shape, each.runner, pair): None for each in wanted for pair in each.pairs.values()}
    precompile([*jobs], compile_layer, compile_layers_only)
    print(f"{len(jobs)} pairs of tiles compiled after {time.perf_counter() - began:.0f} s", flush=True)
    other, log, failed = OtherWork(), [], 0
    for subject in wanted:
        if time.perf_counter() - began > budget:
            failed += 1
            print(f"no time left for {subject.scheme}, {subject.runner}", flush=True)
            continue
        try:
            for row in look_at(subject, sizes, tokens or subject.token_counts(sizes), calls, other):
                log.append(row)
                print(_line(row), flush=True)
        except Exception as error:
            failed += 1
            print(f"failed: {subject.scheme}, {subject.runner}: {type(error).__name__}: {error}", flush=True)
        torch.cuda.empty_cache()
    if output is not None:
        output.write_text(json.dumps({"device": device_name, "shape": shape, "rows": log}, indent=1))
    print(f"{len(log)} layers after {time.perf_counter() - began:.0f} s", flush=True)
    if failed or any(row["eager"] or row["captured"] for row in log):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
