from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stored_experts import save

from moe_core.errors import WeightsError
from moe_core.weights.checkpoint import INDEX_FILE, Checkpoint

TENSORS = {f"t{i}": torch.randn(6, 4) for i in range(6)}


OTHER_INDEX = "quant_model_weights.safetensors.index.json"


def edit_index(folder: Path, **changes: str | None) -> None:
    file = folder / INDEX_FILE
    index = json.loads(file.read_text())
    for name, shard in changes.items():
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    file.write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
def test_slices_are_read_and_counted(shards: int, tmp_path: Path) -> None:
    save(tmp_path, TENSORS, shards)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == set(TENSORS)
        assert (checkpoint.shape("t2"), checkpoint.dtype("t2"), checkpoint.bytes_read) == ((6, 4), torch.float32, 0)
        assert torch.equal(checkpoint.read("t2", (slice(1, 3), slice(2, 4))), TENSORS["t2"][1:3, 2:4])
        assert checkpoint.bytes_read == 2 * 2 * 4
        assert torch.equal(checkpoint.read("t5"), TENSORS["t5"])
        assert checkpoint.bytes_read == 16 + 96


def test_a_file_by_itself(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    for path in (tmp_path, tmp_path / "weights.safetensors"):
        assert torch.equal(Checkpoint(path).read("t1"), TENSORS["t1"])


def test_an_index_of_another_name(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, 2)
    (tmp_path / INDEX_FILE).rename(tmp_path / OTHER_INDEX)
    assert torch.equal(Checkpoint(tmp_path).read("t5"), TENSORS["t5"])


def test_other_formats_beside_the_shards_do_not_matter(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, 2)
    (tmp_path / "consolidated.safetensors").write_bytes(b"something else")
    assert torch.equal(Checkpoint(tmp_path).read("t1"), TENSORS["t1"])


@pytest.mark.error_path
def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no safetensors file; expected model.safetensors, or shards with model"):
        Checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="no safetensors file"):
        Checkpoint(tmp_path / "nowhere")


@pytest.mark.error_path
def test_shards_without_an_index(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, 2)
    (tmp_path / INDEX_FILE).unlink()
    with pytest.raises(WeightsError, match="2 safetensors files and no index"):
        Checkpoint(tmp_path)


@pytest.mark.error_path
def test_several_indexes(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, 2)
    (tmp_path / OTHER_INDEX).write_bytes((tmp_path / INDEX_FILE).read_bytes())
    Checkpoint(tmp_path)
    (tmp_path / INDEX_FILE).rename(tmp_path / f"another_{INDEX_FILE}")
    with pytest.raises(WeightsError, match=rf"several indexes \(another_{INDEX_FILE}, {OTHER_INDEX}\); expected one"):
        Checkpoint(tmp_path)


@pytest.mark.error_path
@pytest.mark.parametrize("kept", [4, 40, -5])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_truncated_file(kept: int, shards: int, tmp_path: Path) -> None:
    save(tmp_path, TENSORS, shards)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=rf"{file.name}: not a whole safetensors file \(.*\); fetch it again"):
        Checkpoint(tmp_path).shape("t5")


@pytest.mark.error_path
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"t1": null}}'])
def test_an_index_that_is_none(content: str, tmp_path: Path) -> None:
    save(tmp_path, TENSORS, 2)
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(WeightsError, match=r"index.json: not readable as an index with a weight_map"):
        Checkpoint(tmp_path)


@pytest.mark.error_path
def test_a_shard_that_is_not_on_disk(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"shards that are not on disk: model-00002-of-00003.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.error_path
def test_of_very_many_shards_some_are_named(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, 3)
    missing = {f"absent{number}": f"model-{number:05}-of-00300.safetensors" for number in range(100, 300)}
    edit_index(tmp_path, **missing)
    listed = r"(model-\d+-of-00300.safetensors, ){11}model-00111-of-00300.safetensors and 188 more; fetch the rest"
    with pytest.raises(WeightsError, match=rf"shards that are not on disk: {listed}"):
        Checkpoint(tmp_path)


@pytest.mark.error_path
def test_of_very_many_shards_that_nobody_names_some_are_named(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, 2)
    edit_index(tmp_path)
    for number in range(20):
        (tmp_path / f"model-{number + 100:05}-of-00002.safetensors").touch()
    with pytest.raises(
        WeightsError, match=r"does not name: (model-001\d\d-of-00002.safetensors, ){11}[^,]+ and 8 more$"
    ):
        Checkpoint(tmp_path)


@pytest.mark.error_path
def test_a_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, 3)
    edit_index(tmp_path, t0=None, t3=None)
    with pytest.raises(WeightsError, match=r"the index does not name: model-00001-of-00003.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.error_path
@pytest.mark.parametrize("index", [INDEX_FILE, OTHER_INDEX])
def test_an_index_that_names_tensors_elsewhere(index: str, tmp_path: Path) -> None:
    save(tmp_path, TENSORS, 2)
    edit_index(tmp_path, t9="model-00001-of-00002.safetensors", t2=None)
    (tmp_path / INDEX_FILE).rename(tmp_path / index)
    with pytest.raises(WeightsError, match=rf"{index} and model-00001-of-00002.safetensors disagree") as caught:
        Checkpoint(tmp_path).shape("t0")
    assert "t9: in the index, not in the file" in str(caught.value)
    assert "t2: in the file, not in the index" in str(caught.value)


@pytest.mark.error_path
def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, TENSORS)
    with pytest.raises(WeightsError, match="no tensor t7"):
        Checkpoint(tmp_path).read("t7")
