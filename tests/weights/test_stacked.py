"""Checkpoints that keep all experts of a projection in one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from loaded_experts import TILES, check, make_request, stored_layer, values_of, wanted_share
from stored_experts import MODULE, WRITERS, Stored, save

from moe_core import LayerRequest
from moe_core.activation import RELU2, SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.errors import WeightsError
from moe_core.quant import BF16, FP8_BLOCK128, MXFP4_W4A16, NVFP4, WHOLE, QuantScheme
from moe_core.weights.bands import StoredLayout
from moe_core.weights.checkpoint import Checkpoint
from moe_core.weights.loading import cut, load_experts

CHANNEL = attrs.evolve(FP8_BLOCK128, weight_block=(1, WHOLE))
TENSOR = attrs.evolve(FP8_BLOCK128, weight_block=(WHOLE, WHOLE), activation_scaling="static", activation_group=0)
TENSOR_ZERO = QuantScheme(weight_dtype="int8", weight_block=(WHOLE, WHOLE), weight_scale="fp32", zero_point=True)
INTERLEAVED = attrs.evolve(SWIGLU_OAI, row_order="interleaved")

SPELLINGS: dict[str, Any] = {
    "dotted": lambda base, suffix: f"{base}.{suffix}",
    "joined": lambda base, suffix: f"{base}_{suffix}",
    "bare": lambda base, suffix: base if suffix == "weight" else f"{base}_{suffix.removeprefix('weight_')}",
}


def write_stacked(
    folder: Path,
    request: LayerRequest,
    storage: str,
    *,
    order: str = "gate_up",
    in_out: bool = False,
    apart: bool = False,
    spelling: str = "bare",
) -> Stored:
    """Matrices of 2I rows as the order says, all experts in one tensor."""
    g = torch.Generator().manual_seed(3)
    inner, hidden, name = request.intermediate_size, request.hidden_size, SPELLINGS[spelling]
    tensors: dict[str, list[torch.Tensor]] = {}
    values: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
    for _ in range(request.num_experts):
        if apart:
            halves = [WRITERS[storage](g, inner, hidden, request.quant.w13) for _ in range(2)]
            both = {s: torch.cat([half.tensors[s] for half in halves]) for s in halves[0].tensors}
            matrix = torch.cat([half.values for half in halves])
        else:
            written = WRITERS[storage](g, 2 * inner, hidden, request.quant.w13)
            both, matrix = written.tensors, written.values
        down = WRITERS[storage](g, hidden, inner, request.quant.w2)
        first, second = (matrix[0::2], matrix[1::2]) if order == "interleaved" else matrix.chunk(2)
        gate, up = (second, first) if order == "up_gate" else (first, second)
        for word, value in (("gate", gate), ("up", up), ("down", down.values)):
            values[word].append(value)
        for base, part in (("gate_up_proj", both), ("down_proj", down.tensors)):
            for suffix, tensor in part.items():
                stored = tensor.mT if in_out and tensor.dim() == 2 else tensor
                tensors.setdefault(name(f"{MODULE}.{base}", suffix), []).append(stored)
    stacked = {name: torch.stack(parts) for name, parts in tensors.items()}
    save(folder, stacked)
    return Stored(folder, stacked, *(torch.stack(values[word]) for word in ("gate", "up", "down")), ([], []))


def check_ranks(folder: Path, request: LayerRequest, storage: str, stored: Stored, layout: StoredLayout) -> None:
    for rank in range(request.tp_size):
        with Checkpoint(folder) as checkpoint:
            weights = load_experts(
                checkpoint, MODULE, request, stored_layer(request, storage), tp_rank=rank, layout=layout
            )
        wanted = wanted_share(stored, request, (0, 1, 2), rank)
        if request.activation.row_order == "interleaved":
            # The layer keeps its rows as they are.
            pairs = torch.stack(wanted[0].chunk(2, dim=1), dim=2).flatten(1, 2)
            wanted = (pairs, wanted[1])
        check(weights, request, wanted)


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize(
    ("storage", "scheme"),
    [
        ("plain", BF16),
        ("scaled", CHANNEL),
        ("packed_fp4", MXFP4_W4A16),
        ("scaled", TENSOR),
        ("compressed_tensors_packed", TENSOR_ZERO),
    ],
    ids=["bf16", "channel", "fp4", "tensor", "tensor_zero"],
)
@pytest.mark.parametrize("tp_size", [1, 3])
def test_orders_and_orientations(
    storage: str, scheme: QuantScheme, order: str, in_out: bool, tp_size: int, tmp_path: Path
) -> None:
    request = make_request(scheme, 40, tp_size=tp_size)
    stored = write_stacked(tmp_path, request, storage, order=order, in_out=in_out)
    layout = StoredLayout(rows=order, orientation="in_out" if in_out else "out_in")
    check_ranks(tmp_path, request, storage, stored, layout)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_stacked_tensors(spelling: str, tmp_path: Path) -> None:
    request = make_request(attrs.evolve(NVFP4, activation_dtype="same", activation_scaling="none"), 32)
    stored = write_stacked(tmp_path, request, "modelopt_nvfp4", spelling=spelling)
    check_ranks(tmp_path, request, "modelopt_nvfp4", stored, StoredLayout())


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("activation", [SWIGLU_OAI, INTERLEAVED], ids=["sorted", "kept"])
def test_gpt_oss(tp_size: int, activation: ActivationSpec, tmp_path: Path) -> None:
    request = make_request(MXFP4_W4A16, 96, tp_size=tp_size, activation=activation)
    stored = write_stacked(tmp_path, request, "gpt_oss_mxfp4", order="interleaved")
    check_ranks(tmp_path, request, "gpt_oss_mxfp4", stored, StoredLayout(rows="interleaved"))


@pytest.mark.parametrize("inner", [48, 64, 80])
@pytest.mark.parametrize("tiling", ["through", "apart"])
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_tiles_of_both_halves(inner: int, tiling: str, order: str, in_out: bool, tp_size: int, tmp_path: Path) -> None:
    request = make_request(TILES, inner, tp_size=tp_size)
    stored = write_stacked(tmp_path, request, "scaled", order=order, in_out=in_out, apart=tiling == "apart")
    layout = StoredLayout(rows=order, orientation="in_out" if in_out else "out_in", tiling=tiling)
    check_ranks(tmp_path, request, "scaled", stored, layout)


def test_a_layer_without_gate(tmp_path: Path) -> None:
    request = make_request(TILES, 48, tp_size=2, activation=RELU2)
    g = torch.Generator().manual_seed(5)
    up = [WRITERS["scaled"](g, 48, 64, TILES) for _ in range(3)]
    down = [WRITERS["scaled"](g, 64, 48, TILES) for _ in range(3)]
    name = SPELLINGS["bare"]
    save(
        tmp_path,
        {
            name(f"{MODULE}.{base}", suffix): torch.stack([part.tensors[suffix] for part in parts])
            for base, parts in (("up_proj", up), ("down_proj", down))
            for suffix in parts[0].tensors
        },
    )
    for rank in range(2):
        with Checkpoint(tmp_path) as checkpoint:
            tensors = load_experts(checkpoint, MODULE, request, stored_layer(request, "scaled"), tp_rank=rank).tensors
        rows = slice(24 * rank, 24 * rank + 24)
        wanted = torch.stack([part.values[rows] for part in up]), torch.stack([part.values[:, rows] for part in down])
        for projection, values in zip(("w13", "w2"), wanted, strict=True):
            torch.testing.assert_close(values_of(tensors, request, projection), values, rtol=1e-14, atol=0)


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("in_out", [False, True])
def test_tiles_in_memory_are_repeated_into_smaller_ones(order: str, in_out: bool, tmp_path: Path) -> None:
    request = make_request(TILES, 48)
    stored = write_stacked(tmp_path, request, "scaled", order=order, in_out=in_out)
    full = {
        "w13": stored.tensors[f"{MODULE}.gate_up_proj"],
        "w13_scale": stored.tensors[f"{MODULE}.gate_up_proj_scale_inv"],
        "w2": stored.tensors[f"{MODULE}.down_proj"],
        "w2_scale": stored.tensors[f"{MODULE}.down_proj_scale_inv"],
    }
    assert full["w13_scale"].shape == ((3, 2, 3) if in_out else (3, 3, 2))
    layout = StoredLayout(rows=order, orientation="in_out" if in_out else "out_in", tiling="through")
    tensors = cut(full, request, layout=layout)
    assert tensors["w13_scale"].shape == (3, 6, 2)
    wanted = wanted_share(stored, request, (0, 1, 2), 0)
    torch.testing.assert_close(values_of(tensors, request, "w13"), wanted[0], rtol=1e-14, atol=0)


@pytest.mark.error_path
def test_tiling_is_never_guessed(tmp_path: Path) -> None:
    request = make_request(TILES, 48)
    write_stacked(tmp_path, request, "scaled")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(WeightsError, match="tiles of 32 rows do not fit 48 gate"):
        load_experts(checkpoint, MODULE, request, stored_layer(request, "scaled"))


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("layout", "activation", "match"),
    [
        (
            StoredLayout(rows="interleaved"),
            SWIGLU,
            "blocks of 32 do not fit tiles of 32 from position 0 on",
        ),
        (StoredLayout(rows="gate_up"), INTERLEAVED, "keeps gate and up rows alternating, so that tiles of 32 rows"),
    ],
)
def test_tiles_that_would_need_two_scales(
    layout: StoredLayout, activation: ActivationSpec, match: str, tmp_path: Path
) -> None:
    request = make_request(TILES, 64, activation=activation)
    write_stacked(tmp_path, request, "scaled")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(WeightsError, match=match):
        load_experts(checkpoint, MODULE, request, stored_layer(request, "scaled"), layout=layout)


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 1), (3, 1, 2), (3,), (3, 1, 1), ()])
def test_scales_of_whole_matrices(order: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    dynamic = attrs.evolve(FP8_BLOCK128, weight_block=(WHOLE, WHOLE))
    request = make_request(dynamic, 32)
    codes = torch.arange(1.0, 4.0)[:, None, None].expand(3, 64, 64).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 7.0)[: torch.Size(shape).numel()].view(shape)
    tensors = {
        f"{MODULE}.gate_up_proj": codes,
        f"{MODULE}.gate_up_proj_scale_inv": scale,
        f"{MODULE}.down_proj": codes[:, :, :32],
        f"{MODULE}.down_proj_scale_inv": torch.tensor(0.5),
    }
    save(tmp_path, tensors)
    with Checkpoint(tmp_path) as checkpoint:
        layer = stored_layer(request, "scaled")
        loaded = load_experts(checkpoint, MODULE, request, layer, layout=StoredLayout(rows=order)).tensors
    halves = scale.reshape(-1, 2) if 2 in shape else scale.reshape(-1, 1).expand(-1, 2)
    wanted = halves.flip(1) if order == "up_gate" else halves
    assert torch.equal(loaded["w13_scale"], wanted.expand(3, 2))
    assert torch.equal(loaded["w2_scale"], torch.full((3, 1), 0.5))


@pytest.mark.parametrize("layout", [StoredLayout(), StoredLayout(rows="up_gate")], ids=str)
@pytest.mark.parametrize("kept", [False, True])
def test_zero_points_of_both_halves(layout: StoredLayout, kept: bool, tmp_path: Path) -> None:
    activation = INTERLEAVED if kept else SWIGLU
    request = make_request(TENSOR_ZERO, 31, tp_size=2, activation=activation)
    points = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int8)
    full = {
        "w13": torch.zeros(3, 62, 64, dtype=torch.int8),
        "w13_scale": torch.ones(3, 2),
        "w13_zero_point": points,
        "w2": torch.zeros(3, 64, 31, dtype=torch.int8),
        "w2_scale": torch.ones(3, 1),
        "w2_zero_point": torch.full((3, 1), 7, dtype=torch.int8),
    }
    tensors = cut(full, request, 1, layout=layout)
    wanted = points.flip(1) if layout.rows == "up_gate" else points
    assert torch.equal(tensors["w13_zero_point"], wanted)
    # The last of each half's 16 rows is padding: a code that means zero.
    padding = tensors["w13"][:, [30, 31] if kept else [15, 31]]
    assert torch.equal(padding, wanted[..., None].expand(3, 2, 64))
    assert torch.equal(tensors["w2"][:, :, 15], torch.full((3, 64), 7, dtype=torch.int8))


@pytest.mark.error_path
def test_a_tile_over_the_end_of_a_padded_share(tmp_path: Path) -> None:
    # Two shares of 32 rows, the second padded; up rows begin at row 63, inside a tile that ends at 64.
    scheme = attrs.evolve(FP8_BLOCK128, weight_block=(64, 32))
    request = make_request(scheme, 63, tp_size=2)
    write_stacked(tmp_path, request, "scaled")
    layer, layout = stored_layer(request, "scaled"), StoredLayout(tiling="through")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(WeightsError, match="blocks of 64 do not fit tiles of 32"):
        load_experts(checkpoint, MODULE, request, layer, layout=layout)


@pytest.mark.error_path
def test_a_scale_of_a_whole_matrix_is_finite(tmp_path: Path) -> None:
    request = make_request(attrs.evolve(FP8_BLOCK128, weight_block=(WHOLE, WHOLE)), 32)
    stored = write_stacked(tmp_path, request, "scaled")
    scales = stored.tensors[f"{MODULE}.down_proj_scale_inv"]
    for value in (0.0, float("nan")):
        scales[1] = value
        save(tmp_path, stored.tensors)
        with Checkpoint(tmp_path) as checkpoint:
            if value == 0.0:
                loaded = load_experts(checkpoint, MODULE, request, stored_layer(request, "scaled"))
                assert torch.equal(loaded.tensors["w2_scale"][:, 0], scales)
                continue
            with pytest.raises(WeightsError, match=r"down_proj_scale_inv: expert 1 has nan; expected finite"):
                load_experts(checkpoint, MODULE, request, stored_layer(request, "scaled"))
