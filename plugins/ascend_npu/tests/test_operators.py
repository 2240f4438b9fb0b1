"""The vendor's own schemas and Meta kernels against the plugin's calls and their emulation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_plugin_ascend import operators
from moe_plugin_ascend.emulation import ASSUMPTIONS, Emulation, shipped_schemas
from moe_plugin_ascend.emulation.kernels import KERNELS
from moe_plugin_ascend.emulation.stubs import make_stubs
from moe_plugin_ascend.emulation.vendor import VARIABLE, find_vendor, load_vendor
from moe_plugin_ascend.operators import CALLS, Groups, require_arguments, require_operators

from moe_core.errors import PluginError

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 6, 2, 4, 64, 128
ROWS = TOKENS * TOP_K


def drawn(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, device=device).to(dtype)
    return torch.ones(shape, dtype=dtype, device=device)


def groups(device: str) -> Groups:
    return Groups(torch.full((EXPERTS,), ROWS // EXPERTS, dtype=torch.int64, device=device), None)


def gemm(device: str, kernel: str) -> torch.Tensor:
    new, f32, i8, i32, i64 = drawn, torch.float32, torch.int8, torch.int32, torch.int64
    rows_of = {"w4a4": new(device, ROWS, HIDDEN // 8, dtype=i32), "bf16": new(device, ROWS, HIDDEN)}
    rows = rows_of.get(kernel, new(device, ROWS, HIDDEN, dtype=i8))
    weight_of = {"bf16": new(device, EXPERTS, INNER, HIDDEN).mT, "w8a8": new(device, EXPERTS, HIDDEN, INNER, dtype=i8)}
    weight_of["sums"] = weight_of["w8a8"]
    weight = weight_of.get(kernel, new(device, EXPERTS, HIDDEN, INNER // 8, dtype=i32))
    scale_of = {
        "w8a8": new(device, EXPERTS, INNER),
        "w4a8": new(device, EXPERTS, 1, INNER, dtype=i64),
        "w4a4": new(device, EXPERTS, INNER, dtype=i64),
    }
    return operators.grouped_matmul(
        rows,
        weight,
        groups(device),
        torch.int32 if kernel == "sums" else torch.bfloat16,
        scale=scale_of.get(kernel),
        row_scale=new(device, ROWS, dtype=f32) if kernel in scale_of else None,
        bias=new(device, EXPERTS, INNER, dtype=f32) if kernel in ("bf16", "w4a8") else None,
    )


def routed(device: str, to_int8: bool) -> Any:
    ids = torch.arange(ROWS, dtype=torch.int32).view(TOKENS, TOP_K).remainder(EXPERTS).to(device)
    return operators.group_tokens(drawn(device, TOKENS, HIDDEN), ids, EXPERTS + 1, range(1, EXPERTS), to_int8=to_int8)


#: Every call that `operators` makes, in every form that the plugin uses.
CASES: dict[str, Callable[[str], Any]] = {
    "route": lambda device: routed(device, to_int8=False),
    "route to int8": lambda device: routed(device, to_int8=True),
    "weighted sum": lambda device: operators.weighted_sum(
        drawn(device, ROWS, HIDDEN), torch.arange(ROWS, dtype=torch.int32, device=device), drawn(device, TOKENS, TOP_K)
    ),
    **{
        f"gemm {kernel}": lambda device, kernel=kernel: gemm(device, kernel)
        for kernel in ("bf16", "w8a8", "sums", "w4a8", "w4a4")
    },
    "swiglu": lambda device: operators.swiglu(drawn(device, ROWS, 2 * INNER)),
    "int8 rows": lambda device: operators.round_rows(drawn(device, ROWS, HIDDEN), torch.int8),
    "int4 rows": lambda device: operators.round_rows(drawn(device, ROWS, HIDDEN), torch.quint4x2),
    "swiglu of sums": lambda device: operators.swiglu_int8(
        drawn(device, ROWS, 2 * INNER, dtype=torch.int32),
        groups(device).sizes,
        drawn(device, EXPERTS, 2 * INNER, dtype=torch.float32),
        drawn(device, ROWS, dtype=torch.float32),
    ),
    "swiglu of bf16": lambda device: operators.swiglu_int8(drawn(device, ROWS, 2 * INNER), groups(device).sizes),
}


def forms(result: Any) -> list[tuple[torch.dtype, tuple[int, ...]] | None]:
    results = result if isinstance(result, tuple) else (result,)
    return [None if tensor is None else (tensor.dtype, tuple(tensor.shape)) for tensor in results]


@pytest.mark.parametrize("case", CASES)
def test_emulated_results_have_the_form_that_the_vendors_meta_kernels_give(case: str, vendor: Emulation) -> None:
    assert forms(CASES[case]("cpu")) == forms(CASES[case]("meta"))


@pytest.mark.parametrize("case", CASES)
def test_every_call_runs_on_the_emulation(case: str, emulation: Emulation) -> None:
    assert all(form is None or form[1] for form in forms(CASES[case]("cpu")))


def test_shipped_schemas_are_the_vendors(vendor: Emulation) -> None:
    registered = {str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("npu::")}
    assert set(shipped_schemas()) <= registered, f"torch_npu {vendor.torch_npu} has other schemas"


def test_every_operator_has_a_kernel_and_a_schema() -> None:
    names = {schema.partition("(")[0].removeprefix("npu::").partition(".")[0] for schema in shipped_schemas()}
    assert set(CALLS) == names == {operator for operator, _ in KERNELS}


def test_assumptions_name_operators_that_are_called() -> None:
    for text in ASSUMPTIONS:
        assert any(operator in text for operator in CALLS) or text.startswith("copy_"), text


@pytest.mark.error_path
def test_a_folder_without_a_loadable_torch_npu_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setenv(VARIABLE, "")
    assert find_vendor() == ""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"python -m moe_plugin_ascend.emulation {tmp_path}"):
        find_vendor()
    with pytest.raises(FileNotFoundError, match="holds no torch_npu"):
        make_stubs(tmp_path)
    other = tmp_path / "torch_npu-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 1.0\n")
    with pytest.raises(ImportError, match="is for another torch"):
        load_vendor(tmp_path)


@pytest.mark.error_path
def test_an_unknown_argument_or_operator_is_an_error_before_anything_runs(emulation: Emulation) -> None:
    require_operators()
    with pytest.raises(PluginError, match="npu_swiglu takes input, dim; this plugin passes alpha"):
        require_arguments({"npu_swiglu": ("input", "alpha")})
    with pytest.raises(PluginError, match="npu_swiglu_v9 is not registered"):
        require_arguments({"npu_swiglu_v9": ("input",)})
    with pytest.raises(RuntimeError, match="active_nums"):
        torch.ops.npu.npu_moe_init_routing_v2(drawn("cpu", 2, 8), torch.zeros(2, 1, dtype=torch.int32), active_nums=3)
