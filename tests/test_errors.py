"""Lists in messages end where nobody reads on."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from moe_core import LayerRequest
from moe_core.errors import (
    PluginError,
    SpecError,
    UnknownBackendError,
    UnknownNameError,
    WeightsError,
    counted,
    first_line,
    in_a_line,
    in_words,
    out_of_memory,
    some_of,
)


def test_of_many_names_the_first_and_their_number_are_said() -> None:
    assert some_of([]) == ""
    assert some_of(["a", 2]) == "a, 2"
    assert some_of(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"
    assert some_of(range(13), most=3) == "0, 1, 2 and 10 more"


def test_of_many_problems_the_first_are_listed_and_all_are_kept() -> None:
    problems = [f"tensor {number}" for number in range(40_000)]
    error = WeightsError.listing("wrong:", problems)
    lines = str(error).splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("wrong:", "  tensor 0", "  and 39950 more")
    assert len(lines) == 52
    assert error.problems == tuple(problems)


def test_problems_that_differ_in_the_expert_share_a_line() -> None:
    experts, block, stacked = "model.layers.3.mlp.experts", "layers.0.block_sparse_moe", "layers.1.mlp.experts.w2_scale"
    problems = [
        *(f"{experts}.{e}.{p}.weight: missing" for e in (1, 0, 2, 5) for p in ("up_proj", "down_proj")),
        *(f"{experts}.{e}.unknown.weight: nothing reads it" for e in (3, 4)),
        *(f"{block}.{e}.w1.weight: has shape [1]" for e in (0, 1)),
        *(f"{experts}.{e}.up_proj.g: expert {e} has {e % 2}; expected more" for e in range(4)),
        *(f"{stacked}: expert {e} has scales that are not finite" for e in range(128)),
        "visual.mlp.0.weight: missing",
        "visual.mlp.2.weight: missing",
        f"{experts}.7.gate_proj.weight: missing",
    ]
    error = WeightsError.listing("wrong:", problems)
    assert error.problems == tuple(problems)
    assert str(error).splitlines()[1:] == [
        f"  experts 0-2, 5: {experts}.*.up_proj.weight: missing",
        f"  experts 0-2, 5: {experts}.*.down_proj.weight: missing",
        f"  experts 3-4: {experts}.*.unknown.weight: nothing reads it",
        f"  experts 0-1: {block}.*.w1.weight: has shape [1]",
        f"  experts 0, 2: {experts}.*.up_proj.g: each has 0; expected more",
        f"  experts 1, 3: {experts}.*.up_proj.g: each has 1; expected more",
        f"  experts 0-127: {stacked}: each has scales that are not finite",
        "  visual.mlp.0.weight: missing",
        "  visual.mlp.2.weight: missing",
        f"  {experts}.7.gate_proj.weight: missing",
    ]


def test_no_problem_is_lost_where_others_read_alike() -> None:
    other = [f"experts.1.w1.scale: expert {number} has 0; expected more" for number in (5, 6)]
    twice = ["experts.1.w1.weight: missing"] * 2
    assert str(WeightsError.listing("wrong:", other + twice)).splitlines()[1:] == [
        f"  {line}" for line in (*other, twice[0])
    ]
    many = [f"tensor {number}" for number in range(50)] + twice
    assert str(WeightsError.listing("wrong:", many)).splitlines()[-1] == "  and 2 more"


def test_what_a_message_leaves_out_is_counted_by_problems() -> None:
    problems = [f"layers.{layer}.mlp.experts.{e}.w1.weight: missing" for layer in range(60) for e in range(8)]
    assert str(WeightsError.listing("wrong:", problems)).splitlines()[-1] == "  and 80 more"


def test_who_stops_in_mid_name_means_what_begins_so():
    error = UnknownNameError("scheme", "fp8", ["mxfp8", "fp8_tensor_static", "fp8_block128"])
    assert "did you mean 'fp8_block128'?" in str(error)
    assert "did you mean 'mxfp8'?" in str(UnknownNameError("scheme", "mfp8", ["mxfp8", "fp8_block128"]))
    assert "did you mean" not in str(UnknownNameError("scheme", "", ["mxfp8"]))


@pytest.mark.parametrize("name", ["FP8_BLOCK128", "Fp8", " fp8_block128 "])
def test_capitals_and_spaces_are_slips(name: str) -> None:
    assert "did you mean 'fp8_block128'?" in str(UnknownNameError("scheme", name, ["mxfp8", "fp8_block128"]))
    assert "did you mean 'H100'?" in str(UnknownNameError("card", "h100", ["H100", "cpu"]))


def test_what_people_call_a_gpu_is_never_taken_for_a_cpu() -> None:
    assert "did you mean 'cuda'?" in str(UnknownNameError("device type", "GPU", ["cpu", "cuda"]))
    assert "did you mean" not in str(UnknownNameError("environment", "gpu", ["cpu", "h100"]))


def test_counts_and_their_nouns() -> None:
    assert [counted(number, "token count") for number in (0, 1, 2)] == [
        "0 token counts",
        "1 token count",
        "2 token counts",
    ]
    assert [counted(number, "entry", "entries") for number in (1, 2)] == ["1 entry", "2 entries"]


CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.14 GiB is "
    "free. Including non-PyTorch memory, this process has 75.96 GiB memory in use. Of the allocated memory 75.30 GiB "
    "is allocated by PyTorch, and 20.48 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLDER_TEXT = "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; 1.50 GiB free; ...)"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError(CUDA_TEXT), "out of memory: 20.00 GiB were asked for, 3.14 GiB are free"),
        (RuntimeError(OLDER_TEXT), "out of memory: 2.00 GiB were asked for, 1.50 GiB are free"),
        (torch.OutOfMemoryError("Tried to allocate more than 1EB memory."), "out of memory: 1 EB were asked for"),
        (torch.OutOfMemoryError("no more"), "out of memory"),
        (MemoryError(), "out of memory"),
        (RuntimeError("tried to allocate 1610612736.0 bytes"), "out of memory: 1.50 GiB were asked for"),
        (torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`."), "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out of memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out of memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out of memory"),
        (RuntimeError("unable to mmap 8192 bytes from file <a>: Cannot allocate memory (12)"), "out of memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), ""),
        (RuntimeError("no such kernel\nOne that is out of memory would say so."), ""),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), ""),
        (RuntimeError("tried to allocate ... bytes"), ""),
        (RuntimeError("a kernel failed"), ""),
        (ValueError("Tried to allocate 2 GiB"), ""),
        (PluginError("plugin 'a': CUDA out of memory. Tried to allocate 2.00 GiB"), ""),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_memory_that_ran_out_is_told_in_a_few_words(error: BaseException, text: str) -> None:
    assert out_of_memory(error) == text
    if text:
        assert first_line(error) == in_a_line(error) == in_words(error) == text


def test_what_torch_says_of_this_machine() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert out_of_memory(caught.value) == "out of memory: 4294967296.00 GiB were asked for"


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("wrong", "sizes"),
    [
        ({"top_k": 0}, ("top_k",)),
        ({"top_k": 9}, ("top_k", "num_experts")),
        ({"tp_size": 65}, ("tp_size", "intermediate_size")),
        ({"dtype": "hidden_size"}, ()),
    ],
    ids=str,
)
def test_a_refused_request_says_which_sizes_it_is_about(wrong: dict[str, Any], sizes: tuple[str, ...]) -> None:
    asked: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 64, **wrong}
    with pytest.raises(SpecError) as caught:
        LayerRequest(**asked)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (caught.value.sizes, copied.sizes, str(copied)) == (sizes, sizes, str(caught.value))


@pytest.mark.error_path
def test_an_error_without_a_text_is_told_by_its_class() -> None:
    assert (in_words(AssertionError()), in_words(SystemExit(" "))) == ("AssertionError", "SystemExit")


def test_an_unknown_backend_may_be_one_of_a_plugin_that_is_not_installed() -> None:
    error = UnknownBackendError(
        "runner backend", "tiles", {"torch": ["b", "a", "a"], "plain": ["a"], "acme": []}, "So."
    )
    assert str(error) == (
        "unknown runner backend 'tiles'. Known: acme, plain (plugin a), torch (plugins a, b). So. Backends come with "
        "plugins, which are packages of their own: one that is not listed by moe-core list-backends has to be "
        "installed first."
    )
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.plugins) == (str(error), error.plugins)
