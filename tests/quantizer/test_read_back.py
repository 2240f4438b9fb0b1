"""What is written is read back: configuration and weights by this project's own readers give what was meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference_moe import decode_e2m1, decode_e8m0, expand_blocks, int4_values, unpack_nibbles
from tiny_checkpoints import (
    EXPERTS,
    HIDDEN,
    INNER,
    MODULE,
    NAMES,
    READERS,
    expert_weights,
    fused,
    of_projection,
    read_tensors,
    write_checkpoint,
)

from moe_core import LayerQuant, LayerRequest
from moe_core.quant.hf import read_layer
from moe_core.quantizer.checkpoint import quantize_checkpoint
from moe_core.quantizer.input_amax import ModelInputs
from moe_core.quantizer.layouts import LAYOUTS
from moe_core.weights.checkpoint import Checkpoint
from moe_core.weights.loading import load_experts


def _configuration(folder: Path) -> dict[str, object]:
    config = json.loads((folder / "config.json").read_text())
    description = folder / "quant_model_description.json"
    return dict(config.get("quantization_config") or json.loads(description.read_text()))


def _values(tensors: dict[str, torch.Tensor], name: str, expert: int, block: tuple[int, int]) -> torch.Tensor:
    """Canonical tensors of one projection in float64 `[N, K]`."""
    weight, scale = tensors[name][expert], tensors[f"{name}_scale"][expert]
    values = weight.double()
    if weight.dtype == torch.uint8:
        codes = unpack_nibbles(weight)
        values = decode_e2m1(codes) if scale.dim() == 2 else int4_values(codes).double()
    if scale.dim() == 1:
        return values * scale.double()[:, None]
    factors = decode_e8m0(scale) if scale.dtype == torch.uint8 else scale.double()
    values = values * expand_blocks(factors, *values.shape, *block)
    if f"{name}_global_scale" in tensors:
        by_half = tensors[f"{name}_global_scale"][expert].double().reshape(-1)
        values = values * by_half.repeat_interleave(len(values) // len(by_half))[:, None]
    return values


@pytest.mark.parametrize(("scheme", "ecosystem"), READERS, ids=["-".join(pair) for pair in READERS])
def test_read_back(scheme: str, ecosystem: str, tmp_path: Path) -> None:
    source, out = write_checkpoint(tmp_path / "source", fused(expert_weights())), tmp_path / "out"
    inputs = ModelInputs(default=5.0) if scheme == "nvfp4" else None
    quantize_checkpoint(source, out, scheme, ecosystem=ecosystem, inputs=inputs)
    stored = read_layer(_configuration(out), MODULE)
    assert stored.w13 == stored.w2 == LAYOUTS[ecosystem][scheme].stored
    request = LayerRequest(
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        quant=LayerQuant(stored.w13.scheme, stored.w2.scheme),
    )
    with Checkpoint(out) as checkpoint:
        tensors = load_experts(checkpoint, MODULE, request, stored).tensors
    files = read_tensors(out)
    for expert in range(EXPERTS):
        gate, up, down = (
            READERS[scheme, ecosystem](of_projection(files, f"{MODULE}.{expert}.{name}")) for name in NAMES.values()
        )
        for name, want in (("w13", torch.cat([gate, up])), ("w2", down)):
            block = getattr(request.local_quant, name).weight_block
            # A divisor becomes a multiplier in fp32.
            torch.testing.assert_close(_values(tensors, name, expert, block), want, rtol=1e-7, atol=0)
    if scheme == "nvfp4":
        for name in ("w13", "w2"):
            torch.testing.assert_close(tensors[f"{name}_input_scale"], torch.full((EXPERTS,), 5.0 / 2688))
