"""Compiles what layers of several schemes, blocks for plugins and ranks of one host launch, for a GPU not here.

Run by a test in a process of its own: `python compile_kernels.py 90`. The interpreter takes code that the compiler
refuses; this finds it. Kernels are compiled instead of launched, so that tensors may stay on the CPU, with any content.
"""

from __future__ import annotations

import sys
from typing import Any

import attrs
import torch
from compiling import compile_only
from layers import random_tokens
from triton_layers import both_manager

from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.activation import SWIGLU_OAI
from moe_core.environment import load_environment
from moe_core.kernels import ops
from moe_core.kernels.triton.gemm import GroupedGemm
from moe_core.kernels.triton.peer import kernels as peer_kernels
from moe_core.kernels.triton.peer.buffer import PeerBuffer
from moe_core.kernels.triton.peer.exchange import PeerExchange
from moe_core.kernels.triton.peer.layout import PeerLayout
from moe_core.kernels.triton.sort import sort_slots
from moe_core.kernels.triton.tiles import Tile
from moe_core.kernels.triton.weights import GroupedWeight
from moe_core.quant import (
    BF16,
    FP8_BLOCK128,
    FP16,
    MXFP4_W4A16,
    MXFP8_W8A16,
    PER_TENSOR,
    W4A16_INT4_G128,
    W8A8_INT8,
    W8A16_INT8,
)
from moe_core.specs import TokenDtype
from moe_core.weights.expected import expected_tensors

#: Scheme -> token counts: one token, few and many rows per expert.
LAYERS = {
    BF16: (1, 5, 150, 900),
    FP16: (150,),
    FP8_BLOCK128: (5, 150),
    W8A8_INT8: (150,),
    attrs.evolve(W8A8_INT8, activation_scaling="static", activation_group=PER_TENSOR): (5,),
    W8A16_INT8: (32, 64),
    MXFP8_W8A16: (32,),
    MXFP4_W4A16: (5,),
    W4A16_INT4_G128: (5, 150),
}


#: Buffers of ranks: sums in one piece and in several, rows of one chunk and of several, any number of ranks and slots.
PEERS = (
    PeerLayout(device_type="cpu", size=2, capacity=64, hidden_size=256, top_k=2, dtype="bf16"),
    PeerLayout(device_type="cpu", size=3, capacity=700, hidden_size=2064, top_k=3, dtype="fp16"),
)


def main(capability: int) -> None:
    """Compile, and print each kernel's name once per variant."""
    compile_only(capability, lambda name, _: print(name))
    for scheme, token_counts in LAYERS.items():
        dtype = "fp16" if scheme == FP16 else "bf16"
        sizes: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_size": 256, "intermediate_size": 128}
        request = LayerRequest(quant=scheme, dtype=dtype, runner_backend="triton", **sizes)
        layer = MoELayer(request, environment=load_environment("h100"), manager=both_manager())
        shapes = expected_tensors(request, 4)
        # Input scales of zero are refused.
        layer.load_weights(RawWeights(tensors={n: torch.ones(e.shape).to(e.dtypes[0]) for n, e in shapes.items()}))
        for count in token_counts:
            layer(*random_tokens(request, count))
    _bytes()
    _blocks()
    for layout in PEERS:
        _peers(layout)


def _bytes() -> None:
    """Codes of four bits where no words can be had: their rows begin anywhere."""
    slots, tile = sort_slots(torch.zeros(4, 2, dtype=torch.int64), 4, 16), Tile(16, 64, 64)
    rows, out = torch.zeros(8, 256).bfloat16(), torch.zeros(8, 128).bfloat16()
    for packing, scale in (("int4", torch.zeros(4, 128, 2)), ("e2m1", torch.zeros(4, 128, 8, dtype=torch.uint8))):
        data = torch.zeros(4, 128, 129, dtype=torch.uint8)[..., 1:]
        weight = GroupedWeight(data=data, packing=packing, scale=scale, block=(1, 256 // scale.shape[2]))
        GroupedGemm(weight)(rows, slots.tiles, out, tile)


def _blocks() -> None:
    """Every block behind the common door, in every layout of scales, on flat rows and on blocks of rows."""
    ops._uses_triton = lambda tensor: True
    x, ids, weights = torch.zeros(40, 256).bfloat16(), torch.zeros(40, 2, dtype=torch.int64), torch.zeros(40, 2)
    # More slots than one launch sorts.
    ops.sort_by_expert(ids.repeat(200, 1), 4, alignment=128)
    codes, scales = ops.quantize(x, TokenDtype("fp8", "row_128"))
    for tokens, words in ((x, None), (codes, scales)):
        on_input = weights if words is None else None
        rows, row_map = ops.permute_contiguous(
            tokens, ids, 4, alignment=128, row_weights=on_input, scales=words, column_major=True
        )
        ops.permute_masked(tokens, ids, 4, 80, row_weights=on_input, scales=words)
    for layout in ("row_128", "ue8m0_128"):
        ops.permute_contiguous(x, ids, 4, token_dtype=TokenDtype("fp8", layout))
    ops.permute_masked(x, ids, 4, 80, token_dtype=TokenDtype("int8", "column_128"))
    for given, table in ((ids, None), (ids.int(), ids[:4, 0])):
        ops.checked_ids(given, 4, table)
    flat = ops.row_experts(rows.num_tokens_per_expert, rows.group_ends, 128)
    ops.combine(x, row_map, weights, torch.bfloat16, scaling_factor=2.0)
    for hidden, real in ((torch.zeros(128, 512), flat), (torch.zeros(4, 8, 512), rows.num_tokens_per_expert)):
        ops.activate(hidden.bfloat16(), SWIGLU_OAI, real=real)
        for layout in ("row_128", "column_128", "ue8m0_128", "token"):
            ops.quantize(hidden.bfloat16(), TokenDtype("fp8", layout), activation=SWIGLU_OAI, real=real)
    ops.quantize(x, TokenDtype("int8", "token"))


def _peers(layout: PeerLayout) -> None:
    """The launches of one rank of several, each with the one in front of it still running."""
    nothing: Any = None
    buffer = PeerBuffer(
        layout=layout,
        rank=1,
        own=torch.zeros(layout.num_bytes, dtype=torch.uint8),
        offsets=torch.zeros(layout.size, dtype=torch.int64),
        state=torch.zeros(layout.state_words, dtype=torch.int32),
        counts=torch.zeros(layout.size, dtype=torch.int32),
        ids=torch.zeros(layout.places, layout.top_k, dtype=torch.int32),
        weights=torch.zeros(layout.places, layout.top_k),
        memory=nothing,
        process_group=nothing,
    )
    constants = {"RANK": buffer.rank, "SIZE": layout.size, "NUMBERS_AT": layout.numbers_at}
    peer_kernels.try_out[(1,)](buffer.own, buffer.offsets, **constants)
    exchange = PeerExchange(buffer, torch.zeros(layout.size + 1, dtype=torch.int32), multiprocessors=132, pdl=True)
    hidden = torch.zeros(16, layout.hidden_size, dtype=layout.torch_dtype)
    weights = torch.zeros(16, layout.top_k)
    for ids in (torch.zeros(16, layout.top_k, dtype=torch.int64), torch.zeros(16, layout.top_k, dtype=torch.int32)):
        exchange.send(hidden, ids, weights)
        exchange.receive()
        exchange.bring_back(exchange.tokens, ids)


if __name__ == "__main__":
    main(int(sys.argv[1]))
