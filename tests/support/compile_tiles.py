"""Compiles layers with the largest measured tiles, and prints which take more shared memory than Hopper has.

Run by a test in a process of its own. What a program holds beside its steps is the compiler's choice, so that no rule
of the table's can tell; but it is not more than its results in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from compiling import compile_only
from layers import random_tokens
from triton_layers import both_manager

from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.backends.triton import tiles
from moe_core.backends.triton.tiles import MEASURED, MEASURED_IN_PANELS, TilePair
from moe_core.environment import load_environment
from moe_core.kernels.triton.tiles import Tile
from moe_core.quant import FP8_BLOCK128, FP16, W4A16_INT4_G128, W8A16_INT8, QuantScheme
from moe_core.weights.expected import expected_tensors

#: Operands -> scheme and dtype of a layer. Rows of fp16 layers are summed in fp32, so that of all results theirs take
#: most room; only bf16 layers have planes.
LAYERS = {
    "half": (FP16, "fp16"),
    "byte": (FP8_BLOCK128, "fp16"),
    "byte_weight": (W8A16_INT8, "fp16"),
    "narrow": (W4A16_INT4_G128, "fp16"),
    "planes": (W4A16_INT4_G128, "bf16"),
}
#: Of one program on Hopper.
_MOST_BYTES = 227 << 10


def _may_not_fit(tile: Tile, value_bytes: int) -> bool:
    steps = tile.num_stages * tile.k * (2 * tile.m + value_bytes * 2 * tile.n)
    return steps + 4 * tile.m * tile.n > _MOST_BYTES


def large_tiles() -> Iterator[tuple[str, str, TilePair]]:
    """Operands, runner and tiles of each entry that has to be compiled to know."""
    tables = [("triton.fused", table) for table in MEASURED.values()] + [("triton.fused_panels", MEASURED_IN_PANELS)]
    for runner, table in tables:
        for operands, entries in table.items():
            for pair in entries.values():
                if any(_may_not_fit(tile, 2 if operands == "half" else 1) for tile in pair):
                    yield operands, runner, pair


def launch(quant: QuantScheme, dtype: str, runner: str, pair: TilePair) -> None:
    """One layer of a few tokens with these tiles."""
    request = LayerRequest(
        num_experts=4,
        top_k=2,
        hidden_size=512,
        intermediate_size=512,
        dtype=dtype,
        quant=quant,
        runner_backend=runner,
    )
    tiles.measured = lambda *_: {math.inf: pair}
    layer = MoELayer(request, environment=load_environment("h100"), manager=both_manager())
    shapes = expected_tensors(request, 4)
    layer.load_weights(RawWeights(tensors={n: torch.zeros(e.shape).to(e.dtypes[0]) for n, e in shapes.items()}))
    layer(*random_tokens(request, 2))


def main() -> None:
    """Compile, and print a line for each entry, with the most bytes that a launch takes, and whether it fits."""
    taken: list[int] = []
    compile_only(90, lambda _, shared: taken.append(shared))
    for operands, runner, pair in [*dict.fromkeys(large_tiles())]:
        taken.clear()
        launch(*LAYERS[operands], runner, pair)
        print("fits:" if max(taken) <= _MOST_BYTES else "too large:", operands, runner, max(taken), *pair)


if __name__ == "__main__":
    main()
