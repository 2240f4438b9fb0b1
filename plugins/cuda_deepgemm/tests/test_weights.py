"""What is borrowed, what is copied, and how scales are packed."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from deepgemm_layers import small_layer
from moe_plugin_deepgemm.packed_scales import pack_block_scales
from moe_plugin_deepgemm.weights import is_readable

from moe_core.errors import WeightsError
from moe_core.payloads import RawWeights
from moe_core.quant import BF16, FP8_BLOCK128, FP8_BLOCK128_UE8M0


def _strided(raw: RawWeights) -> RawWeights:
    """The same weights as another framework may hold them: the projection's input as the first axis."""
    return attrs.evolve(raw, tensors={name: tensor.mT.contiguous().mT for name, tensor in raw.tensors.items()})


@pytest.mark.parametrize("quant", [BF16, FP8_BLOCK128], ids=["bf16", "fp8"])
def test_readable_weights_stay_where_they_are(quant: Any) -> None:
    layer = small_layer(quant)
    raw = layer.raw
    prepared = layer.prepare(raw)
    assert {name: tensor.data_ptr() for name, tensor in raw.tensors.items()} == {
        name: tensor.data.data_ptr() for name, tensor in prepared.tensors.items()
    }
    assert not any(tensor.owned for tensor in prepared.tensors.values())


@pytest.mark.parametrize("quant", [BF16, FP8_BLOCK128, FP8_BLOCK128_UE8M0], ids=["bf16", "fp8", "ue8m0"])
def test_others_are_copied_expert_by_expert(quant: Any) -> None:
    layer = small_layer(quant)
    released: list[int] = []
    raw = attrs.evolve(_strided(layer.raw), release=released.append)
    prepared = layer.prepare(raw)
    assert released == [0, 1, 2, 3]
    assert all(tensor.owned for tensor in prepared.tensors.values())
    error, allowed = layer.error(layer.bind(prepared))
    assert error < allowed


@pytest.mark.error_path
def test_weights_that_another_plugin_borrowed_unreadable_are_refused() -> None:
    layer = small_layer()
    prepared = layer.prepare()
    prepared.tensors["w13"] = attrs.evolve(prepared.tensors["w13"], data=prepared["w13"].mT.contiguous().mT)
    with pytest.raises(
        WeightsError, match=r"w13 \[4, 256, 256\] row by row .* strides \[65536, 1, 256\]: let the plugin"
    ):
        layer.bind(prepared)


def test_what_begins_at_an_odd_address_is_not_readable() -> None:
    memory = torch.zeros(4 * 64 * 64 + 1, dtype=torch.bfloat16)
    assert is_readable(memory[:-1].view(4, 64, 64))
    assert not is_readable(memory[1:].view(4, 64, 64))


@pytest.mark.parametrize("columns", [1, 3, 4, 5, 16])
def test_packed_scales_are_those_of_every_row(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    exponents = torch.randint(0, 256, (3, 2, columns), generator=generator, dtype=torch.uint8)
    packed = pack_block_scales(exponents, num_rows=256)
    assert (packed.dtype, tuple(packed.shape)) == (torch.int32, (3, 256, -(-columns // 4)))
    assert (packed.stride(-2), packed.stride(-1)) == (1, 256)
    unpacked = torch.stack([packed >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)
    assert torch.equal(unpacked[..., :columns], exponents.repeat_interleave(128, dim=1))
    # Past the last block nothing is left from what the memory held before.
    assert not unpacked[..., columns:].any()


def test_packed_words_by_hand() -> None:
    exponents = torch.tensor([[[127, 126, 130, 0, 255]]], dtype=torch.uint8)
    packed = pack_block_scales(exponents, num_rows=4)
    words = [127 | 126 << 8 | 130 << 16, 255]
    assert packed.tolist() == [[words] * 4]
    as_floats = pack_block_scales(exponents.view(torch.float8_e8m0fnu), num_rows=4)
    assert torch.equal(as_floats, packed)
