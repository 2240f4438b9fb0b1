"""What a rank gets besides its cut of the matrices: biases, copies of experts, input scales, progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from loaded_experts import TILES, check, make_request, stored_layer, wanted_share
from safetensors.torch import save_file
from stored_experts import MODULE, save, write_layer

from moe_core.placement import ExpertPlacement
from moe_core.quant import (
    BF16,
    FP8_BLOCK128,
    NVFP4,
    W4A8_INT8,
    W8A8_INT8,
    LayerQuant,
    QuantScheme,
    StoredLayer,
    StoredScheme,
)
from moe_core.weights.bands import StoredLayout
from moe_core.weights.checkpoint import Checkpoint
from moe_core.weights.loading import cut, load_experts


def with_biases(folder: Path, tensors: dict[str, torch.Tensor], inner: int, dtype: torch.dtype) -> dict[str, Any]:
    """Adds a bias to every projection; gives them as `[E, ...]` by word."""
    g = torch.Generator().manual_seed(9)
    sizes = {"gate_proj": inner, "up_proj": inner, "down_proj": 64}
    biases = {word: torch.randn(3, size, generator=g).to(dtype) for word, size in sizes.items()}
    for word, bias in biases.items():
        tensors |= {f"{MODULE}.{expert}.{word}.bias": bias[expert] for expert in range(3)}
    save(folder, tensors)
    return biases


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tp_size", [1, 7])
def test_biases(dtype: torch.dtype, tp_size: int, tmp_path: Path) -> None:
    request = make_request(BF16, tp_size=tp_size, bias=True)
    stored = write_layer(tmp_path, request, ("plain", "plain"))
    biases = with_biases(tmp_path, stored.tensors, 96, dtype)
    width = request.local_intermediate_size
    for rank in range(tp_size):
        with Checkpoint(tmp_path) as checkpoint:
            weights = load_experts(checkpoint, MODULE, request, stored_layer(request, "plain"), tp_rank=rank)
        check(weights, request, wanted_share(stored, request, (0, 1, 2), rank))
        rows = slice(rank * width, min(96, rank * width + width))
        for first, word in ((0, "gate_proj"), (width, "up_proj")):
            half = weights.tensors["b13"][:, first : first + width]
            mine = biases[word][:, rows]
            assert torch.equal(half[:, : mine.shape[1]], mine)
            assert not half[:, mine.shape[1] :].any()
        wanted = biases["down_proj"] if rank == 0 else torch.zeros(3, 64)
        assert torch.equal(weights.tensors["b2"].float(), wanted.float())


def test_biases_of_alternating_rows(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(1)
    tensors = {
        f"{MODULE}.gate_up_proj": torch.randn(3, 64, 80, generator=g).bfloat16(),
        f"{MODULE}.gate_up_proj_bias": torch.randn(3, 80, generator=g).bfloat16(),
        f"{MODULE}.down_proj": torch.randn(3, 40, 64, generator=g).bfloat16(),
        f"{MODULE}.down_proj_bias": torch.randn(3, 64, generator=g).bfloat16(),
    }
    save(tmp_path, tensors)
    from moe_core.weights.bands import StoredLayout

    request = make_request(BF16, 40, tp_size=3, bias=True)
    layout = StoredLayout(rows="interleaved", orientation="in_out")
    with Checkpoint(tmp_path) as checkpoint:
        layer = stored_layer(request, "plain")
        loaded = load_experts(checkpoint, MODULE, request, layer, tp_rank=1, layout=layout).tensors
    bias = tensors[f"{MODULE}.gate_up_proj_bias"]
    assert torch.equal(loaded["b13"], torch.cat([bias[:, 28:56:2], bias[:, 29:56:2]], dim=1))


@pytest.mark.parametrize("storage", ["scaled", "modelslim_w8a8"])
def test_copies_of_an_expert_are_read_once(storage: str, tmp_path: Path) -> None:
    placement = ExpertPlacement(kind="map", experts=(2, 0, 2, 1))
    request = make_request(W8A8_INT8, ep_size=2, placement=placement)
    stored = write_layer(tmp_path, request, (storage, storage))
    assert request.local_experts(0) == (2, 0)
    for rank in range(2):
        with Checkpoint(tmp_path) as checkpoint:
            weights = load_experts(checkpoint, MODULE, request, stored_layer(request, storage), ep_rank=rank)
        check(weights, request, wanted_share(stored, request, request.local_experts(rank), 0))
    alone = make_request(W8A8_INT8, placement=placement)
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_experts(checkpoint, MODULE, alone, stored_layer(alone, storage))
        # Offsets too: 3 experts of 3 matrices with 1 byte per weight and 8 per row.
        per_row = 8 if storage == "modelslim_w8a8" else 4
        assert checkpoint.bytes_read == 3 * (3 * 96 * 64 + per_row * (96 + 96 + 64))
    check(weights, alone, wanted_share(stored, alone, (2, 0, 2, 1), 0))


@pytest.mark.parametrize("storage", ["modelopt_nvfp4", "compressed_tensors_nvfp4"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_input_scales_are_the_largest_of_all_ranks(storage: str, ep_size: int, tmp_path: Path) -> None:
    request = make_request(NVFP4, ep_size=ep_size)
    stored = write_layer(tmp_path, request, (storage, storage))
    for rank in range(ep_size):
        with Checkpoint(tmp_path) as checkpoint:
            layer = stored_layer(request, storage)
            tensors = load_experts(checkpoint, MODULE, request, layer, ep_rank=rank).tensors
        count = len(request.local_experts(rank))
        for name, scales in zip(("w13", "w2"), stored.input_scales, strict=True):
            torch.testing.assert_close(tensors[f"{name}_input_scale"], torch.full((count,), max(scales)))


def test_both_projections_may_be_stored_differently(tmp_path: Path) -> None:
    request = make_request(LayerQuant(W4A8_INT8, W8A8_INT8), tp_size=2)
    stored = write_layer(tmp_path, request, ("modelslim_w4a8", "modelslim_w8a8"))
    layer = StoredLayer(StoredScheme(W4A8_INT8, "modelslim_w4a8"), StoredScheme(W8A8_INT8, "modelslim_w8a8"))
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_experts(checkpoint, MODULE, request, layer, tp_rank=1)
    check(weights, request, wanted_share(stored, request, (0, 1, 2), 1))


def test_a_rank_beyond_the_last_row_holds_zeros(tmp_path: Path) -> None:
    # Nine channels over eight ranks are two each: the fifth rank has one, the rest none.
    request = make_request(BF16, 9, tp_size=8)
    stored = write_layer(tmp_path, request, ("plain", "plain"))
    with Checkpoint(tmp_path) as checkpoint:
        for rank in range(8):
            weights = load_experts(checkpoint, MODULE, request, stored_layer(request, "plain"), tp_rank=rank)
            check(weights, request, wanted_share(stored, request, (0, 1, 2), rank))
    assert not weights.tensors["w13"].any()


@pytest.mark.parametrize("scheme", [BF16, TILES])
def test_bytes_and_progress(scheme: Any, tmp_path: Path) -> None:
    storage = "plain" if scheme == BF16 else "scaled"
    request = make_request(scheme, 128, ep_size=3, tp_size=2)
    write_layer(tmp_path, request, (storage, storage), shards=2)
    calls: list[tuple[int, int]] = []
    with Checkpoint(tmp_path) as checkpoint:
        tensors = load_experts(
            checkpoint,
            MODULE,
            request,
            stored_layer(request, storage),
            ep_rank=1,
            tp_rank=1,
            progress=lambda done, total: calls.append((done, total)),
        ).tensors
        assert checkpoint.bytes_read == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert calls[-1] == (checkpoint.bytes_read, checkpoint.bytes_read)
    assert calls == sorted(calls)


def test_alternating_rows_are_read_once(tmp_path: Path) -> None:
    from moe_core.weights.bands import StoredLayout

    save_file(
        {
            f"{MODULE}.gate_up_proj": torch.randn(3, 80, 64).bfloat16(),
            f"{MODULE}.down_proj": torch.randn(3, 64, 40).bfloat16(),
        },
        tmp_path / "model.safetensors",
    )
    request = make_request(BF16, 40)
    with Checkpoint(tmp_path) as checkpoint:
        layer = stored_layer(request, "plain")
        load_experts(checkpoint, MODULE, request, layer, layout=StoredLayout(rows="interleaved"))
        assert checkpoint.bytes_read == 3 * (80 + 40) * 64 * 2


def test_what_is_cut_in_memory_is_not_changed(tmp_path: Path) -> None:
    whole = make_request(TILES)
    write_layer(tmp_path, whole, ("scaled", "scaled"))
    with Checkpoint(tmp_path) as checkpoint:
        full = load_experts(checkpoint, MODULE, whole, stored_layer(whole, "scaled")).tensors
    before = {name: tensor.clone() for name, tensor in full.items()}
    for tensor in cut(full, make_request(TILES, tp_size=2), 1).values():
        tensor.view(torch.uint8).fill_(7)
    for name, tensor in full.items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))


def test_a_cut_gives_back_whole_weights_and_makes_scales(tmp_path: Path) -> None:
    # 96 gate rows end inside a tile of 64.
    request = make_request(attrs.evolve(FP8_BLOCK128, weight_block=(64, 32)))
    g = torch.Generator().manual_seed(4)
    full = {
        "w13": torch.randn(3, 192, 64, generator=g).to(torch.float8_e4m3fn),
        "w13_scale": torch.rand(3, 3, 2, generator=g),
        "w2": torch.randn(3, 64, 96, generator=g).to(torch.float8_e4m3fn),
        "w2_scale": torch.rand(3, 1, 3, generator=g),
    }
    share = cut(full, request, layout=StoredLayout(tiling="through"))
    assert share["w13"] is full["w13"]
    assert share["w2"] is full["w2"]
    assert torch.equal(share["w13_scale"], full["w13_scale"].repeat_interleave(2, dim=1))


@pytest.mark.parametrize(("scheme", "storage"), [(BF16, "plain"), (FP8_BLOCK128, "scaled"), (W8A8_INT8, "scaled")])
def test_the_default_device_of_the_caller_does_not_matter(scheme: QuantScheme, storage: str, tmp_path: Path) -> None:
    # Models are often built and loaded with an accelerator as the default device.
    request = make_request(scheme, tp_size=2)
    stored = write_layer(tmp_path, request, (storage, storage))
    layer = stored_layer(request, storage)
    with Checkpoint(tmp_path) as checkpoint, torch.device("meta"):
        share = load_experts(checkpoint, MODULE, request, layer, tp_rank=1)
    check(share, request, wanted_share(stored, request, (0, 1, 2), 1))
