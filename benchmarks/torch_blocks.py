"""Whole layers of the torch runner: blocks of rows beside the loop that reads the groups' sizes back.

Run: python benchmarks/torch_blocks.py        (without a GPU: only the results, at small sizes)

Experts of Qwen3-30B-A3B's size. `loop` is what a CPU does, told to take a whole weight at a time: it waits for the GPU
in every product. `eager` is timed by the clock, `graph` by replays of a captured graph. The columns of MiB are graphs
with other budgets for the weights that are fetched at a time (`blocks._STEP_BYTES`).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import attrs
import torch
from rich.console import Console
from rich.table import Table

from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.backends.torch import experts as runner
from moe_core.kernels import blocks, linear
from moe_core.kernels.expert_weights import Experts
from moe_core.quant import SCHEMES, LayerQuant
from moe_core.tuning.layers import Batches, random_weights, release_memory
from moe_core.tuning.timing import measure

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SIZES = LayerRequest(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, a2a_backend="none.standard")
TOKENS = (1, 16, 256, 2048) if ON_GPU else (1, 7)
NAMES = ("fp32", "fp16", "fp8_block128", "w8a8_int8", "w4a16_int4_g128", "nvfp4")
MIB = (1, 16, 64)


def layer_of(name: str) -> tuple[MoELayer, Experts]:
    """A random layer, and its experts."""
    dtype = name if name in ("fp32", "fp16") else "bf16"
    request = attrs.evolve(SIZES, dtype=dtype, quant=LayerQuant.of(SCHEMES[name]), runner_backend="torch.standard")
    if not ON_GPU:
        request = attrs.evolve(request, num_experts=12, hidden_size=256, intermediate_size=128)
    made = []

    def kept(*args: object, **fields: object) -> Experts:
        made.append(Experts(*args, **fields))
        return made[-1]

    with mock.patch.object(runner, "Experts", kept):
        layer = MoELayer(request, device=DEVICE)
        layer.load_weights(RawWeights(tensors=random_weights(request, DEVICE)))
    made[0].takes_blocks = True
    return layer, made[0]


@contextmanager
def looped(experts: Experts) -> Iterator[None]:
    """Inside, the loop of the CPU."""
    whole = mock.patch.multiple(linear, _BLOCK_BYTES=1 << 40, _multiplies_as_stored=lambda rows, weight: True)
    experts.takes_blocks = False
    with whole:
        yield
    experts.takes_blocks = True


def microseconds(layer: MoELayer, batches: Batches, capture: bool) -> str:
    """Median time per call."""
    if not ON_GPU:
        return "-"
    return f"{measure(batches.calls(layer), DEVICE, capture=capture, repeats=5).microseconds:.0f}"


def cells(name: str) -> Iterator[tuple[str, ...]]:
    """One row of the table per number of tokens."""
    layer, experts = layer_of(name)
    for num_tokens in TOKENS:
        batches = Batches.random(layer.plan.request, num_tokens, DEVICE)
        got = layer(*batches.one(0)).double()
        with looped(experts):
            want, loop = layer(*batches.one(0)).double(), microseconds(layer, batches, capture=False)
        error = f"{float((got - want).norm() / want.norm()):.0e}"
        times = [microseconds(layer, batches, capture) for capture in (False, True)]
        for budget in MIB:
            with mock.patch.object(blocks, "_STEP_BYTES", budget << 20):
                times.append(microseconds(layer, batches, capture=True))
        yield name, str(num_tokens), loop, *times, error
    del layer, experts
    release_memory(DEVICE)


def main() -> None:
    """Measure and print one table."""
    # The loop divides small products among a CPU's threads.
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if ON_GPU else "CPU"
    own = f"graph ({blocks._STEP_BYTES >> 20} MiB)"
    title = f"{where}, Python {platform.python_version()}, torch {torch.__version__}; microseconds"
    table = Table("scheme", "T", "loop", "eager", own, *map(str, MIB), "blocks against loop", title=title)
    for name in NAMES:
        for row in cells(name):
            table.add_row(*row)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
