from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from loaded_experts import INT4_GROUPS, INT4_ZEROS, TILES, check, make_request, stored_layer, values_of, wanted_share
from stored_experts import MODULE, WRITERS, save, write_layer

from moe_core.errors import WeightsError
from moe_core.quant import (
    BF16,
    FP8_BLOCK128,
    MXFP4_W4A16,
    MXFP8,
    NVFP4,
    NVFP4_W4A16,
    STORAGES,
    W4A4_INT4,
    W4A8_INT8,
    W8A8_INT8,
    WHOLE,
    LayerQuant,
    QuantScheme,
    StoredScheme,
)
from moe_core.weights.checkpoint import Checkpoint
from moe_core.weights.expected import check_weights
from moe_core.weights.loading import cut, load_experts, load_matrix

PER_TENSOR = attrs.evolve(FP8_BLOCK128, weight_block=(WHOLE, WHOLE), activation_scaling="static", activation_group=0)
INT8_GROUPS = attrs.evolve(INT4_GROUPS, weight_dtype="int8")
INT8_ZEROS = attrs.evolve(INT4_GROUPS, weight_dtype="int8", zero_point=True)
INT8_TENSOR = attrs.evolve(INT8_ZEROS, weight_block=(WHOLE, WHOLE), zero_point=False)
INT8_TENSOR_ZERO = attrs.evolve(INT8_TENSOR, zero_point=True)
INT4_TENSOR_ZERO = attrs.evolve(INT8_TENSOR_ZERO, weight_dtype="int4")
INT8_ROW_ZERO = attrs.evolve(INT8_ZEROS, weight_block=(1, WHOLE))
INT4_ROW = attrs.evolve(INT4_GROUPS, weight_block=(1, WHOLE))
INT4_ROW_ZERO = attrs.evolve(INT4_ROW, zero_point=True)
MXFP4_STATIC = attrs.evolve(
    MXFP4_W4A16,
    activation_dtype="fp8",
    activation_scaling="static",
    activation_group=0,
    activation_scale="fp32",
)

CASES = [
    ("plain", BF16),
    ("scaled", TILES),
    ("scaled", PER_TENSOR),
    ("scaled", attrs.evolve(PER_TENSOR, weight_scale="e8m0")),
    ("scaled", W8A8_INT8),
    ("scaled", MXFP8),
    ("scaled", W4A8_INT8),
    ("packed_fp4", MXFP4_W4A16),
    ("compressed_tensors_packed", INT4_GROUPS),
    ("compressed_tensors_packed", INT4_ZEROS),
    ("compressed_tensors_packed", W4A8_INT8),
    ("compressed_tensors_packed", INT8_ZEROS),
    ("compressed_tensors_packed", INT8_TENSOR),
    ("compressed_tensors_packed", INT8_TENSOR_ZERO),
    ("compressed_tensors_packed", INT4_TENSOR_ZERO),
    ("compressed_tensors_packed", INT8_ROW_ZERO),
    ("gptq", INT8_GROUPS),
    ("gptq", INT8_ZEROS),
    ("compressed_tensors_nvfp4", NVFP4),
    ("compressed_tensors_nvfp4", NVFP4_W4A16),
    ("compressed_tensors_mxfp4", MXFP4_W4A16),
    ("modelopt_nvfp4", NVFP4),
    ("gptq", INT4_GROUPS),
    ("gptq", INT4_ZEROS),
    ("gptq_v2", INT4_ZEROS),
    ("awq", INT4_ZEROS),
    ("packed_fp4", MXFP4_STATIC),
    ("quark_int4", INT4_GROUPS),
    ("quark_int4", INT4_ZEROS),
    ("quark_uint4", INT4_ZEROS),
    ("quark_int4_channel", INT4_ROW),
    ("quark_uint4_channel", INT4_ROW_ZERO),
    ("quark_int4_fp8", attrs.evolve(INT4_ROW, global_scale=True)),
    ("quark_nvfp4", NVFP4),
    ("modelslim_w8a8", W8A8_INT8),
    ("modelslim_w4a8", W4A8_INT8),
    ("modelslim_w4a4", W4A4_INT4),
]
IDS = [f"{storage}-{scheme}"[:60] for storage, scheme in CASES]


def test_every_storage_has_a_case() -> None:
    assert {storage for storage, _ in CASES} | {"gpt_oss_mxfp4"} == set(STORAGES)


@pytest.mark.parametrize(("storage", "scheme"), CASES, ids=IDS)
@pytest.mark.parametrize("tp_size", [1, 2, 5, 7])
def test_shares(storage: str, scheme: QuantScheme, tp_size: int, tmp_path: Path) -> None:
    # 96 channels: 48 lie inside a group of 32, 20 inside a word of 8, and the last share of 14 is padded.
    request = make_request(scheme, tp_size=tp_size)
    stored = write_layer(tmp_path, request, (storage, storage))
    with Checkpoint(tmp_path) as checkpoint:
        for rank in range(tp_size):
            weights = load_experts(checkpoint, MODULE, request, stored_layer(request, storage), tp_rank=rank)
            check(weights, request, wanted_share(stored, request, (0, 1, 2), rank))


@pytest.mark.parametrize(("storage", "scheme"), CASES, ids=IDS)
def test_experts_of_one_rank(storage: str, scheme: QuantScheme, tmp_path: Path) -> None:
    request = make_request(scheme, ep_size=2)
    stored = write_layer(tmp_path, request, (storage, storage), shards=3)
    for rank in range(2):
        with Checkpoint(tmp_path) as checkpoint:
            weights = load_experts(checkpoint, MODULE, request, stored_layer(request, storage), ep_rank=rank)
        check(weights, request, wanted_share(stored, request, request.local_experts(rank), 0))


@pytest.mark.parametrize(("storage", "scheme"), CASES, ids=IDS)
def test_a_rank_without_experts(storage: str, scheme: QuantScheme, tmp_path: Path) -> None:
    request = make_request(scheme, ep_size=4)
    write_layer(tmp_path, request, (storage, storage))
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_experts(checkpoint, MODULE, request, stored_layer(request, storage), ep_rank=3)
        assert checkpoint.bytes_read == 0
    check_weights(weights, request, 0)


@pytest.mark.parametrize(("storage", "scheme"), CASES, ids=IDS)
@pytest.mark.parametrize("tp_size", [2, 7])
def test_canonical_tensors_are_cut_like_files(storage: str, scheme: QuantScheme, tp_size: int, tmp_path: Path) -> None:
    whole = make_request(scheme)
    write_layer(tmp_path, whole, (storage, storage))
    request = make_request(scheme, tp_size=tp_size)
    with Checkpoint(tmp_path) as checkpoint:
        full = load_experts(checkpoint, MODULE, whole, stored_layer(whole, storage)).tensors
        for rank in range(tp_size):
            from_file = load_experts(checkpoint, MODULE, request, stored_layer(request, storage), tp_rank=rank).tensors
            in_memory = cut(full, request, rank)
            assert from_file.keys() == in_memory.keys()
            for name, tensor in from_file.items():
                assert torch.equal(tensor.view(torch.uint8), in_memory[name].view(torch.uint8)), name


@pytest.mark.parametrize(("storage", "scheme"), CASES, ids=IDS)
def test_a_matrix_outside_the_experts(storage: str, scheme: QuantScheme, tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.o_proj"
    matrix = WRITERS[storage](torch.Generator().manual_seed(4), 64, 96, scheme)
    tensors = {f"{module}.{suffix}": tensor for suffix, tensor in matrix.tensors.items()}
    save(tmp_path, tensors | {f"{module}.bias": torch.zeros(64), f"{module}_norm.weight": torch.zeros(3)})
    with Checkpoint(tmp_path) as checkpoint:
        loaded = load_matrix(checkpoint, module, StoredScheme(scheme, storage))
    assert {name.partition("_")[0] for name in loaded} == {"w2"}
    values = values_of(loaded, make_request(LayerQuant(BF16, scheme)), "w2")
    torch.testing.assert_close(values[0], matrix.values, rtol=1e-14, atol=0)


@pytest.mark.error_path
def test_a_matrix_that_does_not_fit(tmp_path: Path) -> None:
    save(tmp_path, {"o.weight": torch.zeros(4, 4, dtype=torch.int8), "o.x": torch.zeros(1), "p.y": torch.zeros(1)})
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(WeightsError) as caught:
            load_matrix(checkpoint, "o", StoredScheme(W8A8_INT8, "scaled"))
        assert str(caught.value).splitlines() == [
            "o: the weights do not fit; nothing was loaded:",
            "  o.x: nothing of a matrix in storage scaled reads it",
            "  o.weight_scale: missing",
        ]
        with pytest.raises(WeightsError, match=r"p.weight: missing"):
            load_matrix(checkpoint, "p", StoredScheme(BF16))


@pytest.mark.parametrize(
    ("storage", "scheme"),
    [(storage, scheme) for storage, scheme in CASES if scheme.zero_point],
    ids=lambda value: value if isinstance(value, str) else str(value),
)
def test_padding_inside_a_group_means_zero(storage: str, scheme: QuantScheme, tmp_path: Path) -> None:
    # The last of four shares has 14 channels in a group of 16 whose zero point is not the code 0.
    request = make_request(scheme, 62, tp_size=4)
    stored = write_layer(tmp_path, request, (storage, storage))
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_experts(checkpoint, MODULE, request, stored_layer(request, storage), tp_rank=3)
    assert weights.tensors["w2_zero_point"].any()
    check(weights, request, wanted_share(stored, request, (0, 1, 2), 3))


def test_scales_of_padding_are_one(tmp_path: Path) -> None:
    for scheme, one in ((W8A8_INT8, 1.0), (MXFP8, 127)):
        request = make_request(scheme, 9, tp_size=8)
        write_layer(tmp_path, request, ("scaled", "scaled"))
        with Checkpoint(tmp_path) as checkpoint:
            tensors = load_experts(checkpoint, MODULE, request, stored_layer(request, "scaled"), tp_rank=7).tensors
        assert not tensors["w13"].view(torch.uint8).any()
        assert bool((tensors["w13_scale"] == one).all())
