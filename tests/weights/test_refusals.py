"""Everything that is wrong with a checkpoint is said at once, and nothing is loaded."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from loaded_experts import INT4_GROUPS, TILES, check, make_request, stored_layer, wanted_share
from stored_experts import MODULE, save, write_layer

from moe_core.errors import SpecError, WeightsError
from moe_core.payloads import Tensor
from moe_core.quant import (
    BF16,
    MXFP4_W4A16,
    MXFP8,
    NVFP4,
    NVFP4_W4A16,
    W4A4_INT4,
    W4A8_INT8,
    W8A8_INT8,
    QuantScheme,
    StoredScheme,
)
from moe_core.request import LayerRequest
from moe_core.weights.checkpoint import Checkpoint
from moe_core.weights.loading import cut, load_experts, load_matrix

Change = Callable[[dict[str, Tensor]], Any]


def refusal(folder: Path, request: LayerRequest, storage: str, change: Change, ep_rank: int = 0) -> str:
    """The message about a checkpoint after `change`."""
    stored = write_layer(folder, request, (storage, storage))
    change(stored.tensors)
    save(folder, stored.tensors)
    with Checkpoint(folder) as checkpoint, pytest.raises(WeightsError) as caught:
        load_experts(checkpoint, MODULE, request, stored_layer(request, storage), ep_rank=ep_rank)
    assert str(caught.value).startswith(f"{MODULE}: the weights do not fit; nothing was loaded:")
    return str(caught.value)


@pytest.mark.error_path
def test_all_faults_of_names_shapes_and_dtypes_are_one_error(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{MODULE}.1.up_proj.weight_scale_inv"]
        tensors[f"{MODULE}.0.gate_proj.weight"] = torch.zeros(95, 64).to(torch.float8_e4m3fn)
        tensors[f"{MODULE}.2.down_proj.weight"] = torch.zeros(64, 96, dtype=torch.bfloat16)
        tensors[f"{MODULE}.0.down_proj.weight_scale_inv"] = torch.zeros(2, 2)
        tensors[f"{MODULE}.3.down_proj.weight"] = torch.zeros(64, 96).to(torch.float8_e4m3fn)
        tensors[f"{MODULE}.0.gate_proj.bias"] = torch.zeros(96)

    message = refusal(tmp_path, make_request(TILES), "scaled", change)
    assert message.splitlines()[1:] == [
        f"  {MODULE}.0.gate_proj.bias: nothing of a layer with 3 experts reads it",
        f"  {MODULE}.3.down_proj.weight: nothing of a layer with 3 experts reads it",
        f"  {MODULE}.0.gate_proj.weight: expected [96, 64] float8_e4m3fn, got [95, 64] float8_e4m3fn",
        f"  {MODULE}.1.up_proj.weight_scale: missing",
        f"  {MODULE}.0.down_proj.weight_scale_inv: expected [2, 3] or [2, 1, 3, 1] "
        "float32 or bfloat16 or float16 or float8_e8m0fnu, got [2, 2] float32",
        f"  {MODULE}.2.down_proj.weight: expected [64, 96] float8_e4m3fn, got [64, 96] bfloat16",
    ]


@pytest.mark.error_path
def test_other_ranks_experts_are_not_this_ranks_fault(tmp_path: Path) -> None:
    request = make_request(TILES, ep_size=3)
    stored = write_layer(tmp_path, request, ("scaled", "scaled"))
    del stored.tensors[f"{MODULE}.2.up_proj.weight"]
    save(tmp_path, stored.tensors)
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_experts(checkpoint, MODULE, request, stored_layer(request, "scaled"), ep_rank=1)
        check(weights, request, wanted_share(stored, request, (1,), 0))
        with pytest.raises(WeightsError, match=r"experts.2.up_proj.weight: missing"):
            load_experts(checkpoint, MODULE, request, stored_layer(request, "scaled"), ep_rank=2)


@pytest.mark.error_path
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("storage", "suffixes"),
    [
        ("modelopt_nvfp4", ("weight_scale_2", "input_scale")),
        ("compressed_tensors_nvfp4", ("weight_global_scale", "input_global_scale")),
    ],
)
def test_scales_that_no_calibration_gives(
    storage: str, suffixes: tuple[str, str], value: float, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{MODULE}.2.gate_proj.{suffixes[0]}"].fill_(value)
        tensors[f"{MODULE}.1.down_proj.{suffixes[1]}"].fill_(value)

    request = make_request(NVFP4)
    message = refusal(tmp_path, request, storage, change)
    assert f"2.gate_proj.{suffixes[0]}: expert 2 has {value:g}; expected finite numbers above zero" in message
    assert f"1.down_proj.{suffixes[1]}: expert 1 has {value:g}" in message


def act_order(tensors: dict[str, Tensor]) -> None:
    tensors[f"{MODULE}.1.gate_proj.g_idx"] = tensors[f"{MODULE}.1.gate_proj.g_idx"].flip(0)


def raise_zeros(tensors: dict[str, Tensor]) -> None:
    # All eight 4-bit zero points of a word, 7 -> 8.
    for name, tensor in tensors.items():
        if name.endswith("qzeros"):
            tensors[name] = tensor + 0x11111111


def set_offset(tensors: dict[str, Tensor]) -> None:
    tensors[f"{MODULE}.2.up_proj.weight_offset"][3] = 1.0


def drop_offset(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{MODULE}.2.up_proj.weight_offset"]


def large_code(tensors: dict[str, Tensor]) -> None:
    tensors[f"{MODULE}.2.up_proj.weight"][3, 4] = 8


def not_finite(suffix: str, value: float) -> Change:
    """One scale of the second expert that is no number; `value` in the dtype of the scales."""

    def change(tensors: dict[str, Tensor]) -> None:
        scales = tensors[f"{MODULE}.1.gate_proj.{suffix}"]
        scales.view(-1)[0] = torch.tensor(value).to(scales.dtype)

    return change


def float_scales(factor: float) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            if name.endswith(("scale", "scale_inv")):
                tensors[name] = 2.0 ** (tensor.float() - 127)
        tensors[next(name for name in tensors if name.endswith(("scale", "scale_inv")))][1] *= factor

    return change


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("storage", "scheme", "change", "match"),
    [
        ("gptq", INT4_GROUPS, act_order, "1.gate_proj.g_idx: the groups follow the order of activations"),
        ("gptq", INT4_GROUPS, raise_zeros, "these are not all zero; a storage of the other GPTQ format?"),
        ("modelslim_w8a8", W8A8_INT8, set_offset, "2.up_proj.weight_offset: offsets that are not zero"),
        ("modelslim_w8a8", W8A8_INT8, drop_offset, "2.up_proj.weight_offset"),
        ("modelslim_w4a4", W4A4_INT4, large_code, "2.up_proj.weight: values outside -8..7"),
        ("scaled", TILES, not_finite("weight_scale_inv", math.inf), "expert 1 has scales that are not finite"),
        ("scaled", W8A8_INT8, not_finite("weight_scale_inv", math.nan), "expert 1 has scales that are not finite"),
        ("scaled", MXFP8, not_finite("weight_scale_inv", 255), "expert 1 has scales that are not finite"),
        ("modelopt_nvfp4", NVFP4_W4A16, not_finite("weight_scale", math.nan), "expert 1 has scales that are not"),
        ("scaled", MXFP8, float_scales(1.5), "0.gate_proj.weight_scale_inv: the scheme has scales that are powers of"),
        (
            "packed_fp4",
            MXFP4_W4A16,
            float_scales(0.0),
            "0.gate_proj.weight_scale: the scheme has scales that are",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_content_that_the_scheme_does_not_have(
    storage: str, scheme: QuantScheme, change: Change, match: str, tmp_path: Path
) -> None:
    assert match in refusal(tmp_path, make_request(scheme), storage, change)


@pytest.mark.parametrize(("storage", "scheme"), [("scaled", MXFP8), ("packed_fp4", MXFP4_W4A16)])
def test_powers_of_two_in_float_become_their_exponents(storage: str, scheme: QuantScheme, tmp_path: Path) -> None:
    request = make_request(scheme)
    stored = write_layer(tmp_path, request, (storage, storage))
    float_scales(1.0)(stored.tensors)
    save(tmp_path, stored.tensors)
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_experts(checkpoint, MODULE, request, stored_layer(request, storage))
    check(weights, request, wanted_share(stored, request, (0, 1, 2), 0))


@pytest.mark.error_path
def test_a_global_scale_that_the_scheme_does_not_multiply(tmp_path: Path) -> None:
    request = make_request(NVFP4_W4A16)
    write_layer(tmp_path, request, ("modelopt_nvfp4", "modelopt_nvfp4"))
    without = make_request(attrs.evolve(NVFP4_W4A16, global_scale=False))
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(WeightsError, match=r"gate_proj.weight_scale_2: nothing of"):
        load_experts(checkpoint, MODULE, without, stored_layer(without, "modelopt_nvfp4"))


def test_input_scales_that_the_layer_does_not_use_are_left(tmp_path: Path) -> None:
    static = make_request(NVFP4)
    stored = write_layer(tmp_path, static, ("modelopt_nvfp4", "modelopt_nvfp4"))
    request = make_request(NVFP4_W4A16)
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_experts(checkpoint, MODULE, request, stored_layer(static, "modelopt_nvfp4"))
    check(weights, request, wanted_share(stored, request, (0, 1, 2), 0))


@pytest.mark.error_path
def test_a_matrix_of_half_a_byte_more(tmp_path: Path) -> None:
    save(tmp_path, {"attention.weight": torch.zeros(4, 3, dtype=torch.int8)})
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(WeightsError, match=r"^attention: .* two values to a byte, so w2 cannot have 3 input channels"),
    ):
        load_matrix(checkpoint, "attention", StoredScheme(W4A8_INT8, "scaled"))


@pytest.mark.error_path
def test_a_request_about_other_weights(tmp_path: Path) -> None:
    request = make_request(TILES)
    write_layer(tmp_path, request, ("scaled", "scaled"))
    with Checkpoint(tmp_path) as checkpoint:
        other = stored_layer(make_request(W8A8_INT8), "scaled")
        with pytest.raises(WeightsError, match=r"w13: the request has fp8.* weights, the checkpoint w8a8_int8"):
            load_experts(checkpoint, MODULE, request, other)
        with pytest.raises(SpecError, match=r"tensor-parallel rank 1 is not in 0..0"):
            load_experts(checkpoint, MODULE, request, stored_layer(request, "scaled"), tp_rank=1)


@pytest.mark.error_path
def test_canonical_tensors_that_do_not_fit() -> None:
    request = make_request(TILES, 64)
    with pytest.raises(WeightsError) as caught:
        cut({"w13": torch.zeros(3, 128, 64, dtype=torch.bfloat16), "w4": torch.zeros(3)}, request)
    assert str(caught.value).splitlines() == [
        "canonical tensors: the weights do not fit; nothing was loaded:",
        "  w4: unknown",
        "  w13: expected [3, 128, 64] float8_e4m3fn, got [3, 128, 64] bfloat16",
        "  w13_scale: missing",
        "  w2: missing",
        "  w2_scale: missing",
    ]
    with pytest.raises(WeightsError, match="w2: missing"):
        cut({}, make_request(BF16))
    with pytest.raises(WeightsError, match="w13 are no tensors; nothing was cut"):
        cut({"w13": None}, make_request(BF16))  # type: ignore[dict-item]


@pytest.mark.error_path
def test_biases_in_a_foreign_dtype(tmp_path: Path) -> None:
    request = make_request(BF16, bias=True)
    stored = write_layer(tmp_path, request, ("plain", "plain"))
    for expert in range(3):
        for word, size in (("gate_proj", 96), ("up_proj", 96), ("down_proj", 64)):
            stored.tensors[f"{MODULE}.{expert}.{word}.bias"] = torch.zeros(size, dtype=torch.float16)
    save(tmp_path, stored.tensors)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(WeightsError, match=r"b13: stored as torch.float16 in a"):
        load_experts(checkpoint, MODULE, request, stored_layer(request, "plain"))


@pytest.mark.error_path
def test_a_long_list_is_cut_and_kept() -> None:
    problems = [f"tensor {number}: missing" for number in range(52)]
    error = WeightsError.listing("they do not fit:", problems)
    lines = str(error).splitlines()
    assert (lines[0], lines[50], lines[51:]) == ("they do not fit:", "  tensor 49: missing", ["  and 2 more"])
    assert pickle.loads(pickle.dumps(error)).problems == tuple(problems)
    assert str(WeightsError.listing("they do not fit:", problems[:50])).splitlines()[-1] == "  tensor 49: missing"
