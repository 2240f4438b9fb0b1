"""Finding, checking and calling the library: versions with other names and keywords, and libraries that do not load."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any

import emulated_deep_gemm
import pytest
from moe_plugin_deepgemm import library
from moe_plugin_deepgemm.library import CALLS, grouped_gemm, parameters

from moe_core.errors import PluginError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A `deep_gemm` without any function, in place of the present one."""
    module = types.ModuleType("deep_gemm")
    module.__file__ = "somewhere"
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    library.deep_gemm.cache_clear()
    yield module
    library.deep_gemm.cache_clear()


def _masked(a, b, d, masked_m, expected_m, compiled_dims="nk"):  # type: ignore[no-untyped-def]
    """Of bf16."""


@pytest.mark.parametrize(("dtype", "format_"), CALLS)
def test_the_vendors_functions_take_what_is_passed(vendor: Any, dtype: str, format_: str) -> None:
    function = grouped_gemm(dtype, format_)
    known = parameters(function)
    assert known is not None
    assert set(CALLS[dtype, format_].arguments) <= set(known)


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_no_vendor_tells_which_rows_are_done(vendor: Any, call: tuple[str, str]) -> None:
    # What some frameworks pass for it. The runners declare `down_gemm_overlap` once a build takes these.
    assert {"enable_overlap", "max_block_n", "signal"}.isdisjoint(parameters(grouped_gemm(*call)) or ())


def test_another_name_of_the_same_function(installed: Any) -> None:
    installed.bf16_m_grouped_gemm_nt_masked = _masked
    assert grouped_gemm("bf16", "masked").func is _masked


def test_padding_is_not_zeroed_where_that_can_be_said(installed: Any) -> None:
    def gemm(a, b, d, grouped_layout, compiled_dims="nk", ensure_zero_padding=True):  # type: ignore[no-untyped-def]
        """Of a build that has the keyword."""

    installed.m_grouped_bf16_gemm_nt_contiguous = gemm
    found = grouped_gemm("bf16", "contiguous")
    assert isinstance(found, functools.partial)
    assert found.keywords == {"ensure_zero_padding": False}


@pytest.mark.error_path
def test_a_build_without_the_function(installed: Any) -> None:
    installed.__version__ = "0.1.0"
    with pytest.raises(PluginError, match=r"deep_gemm 0\.1\.0 \(somewhere\) has no m_grouped_bf16.*pip install"):
        grouped_gemm("bf16", "masked")


@pytest.mark.error_path
def test_a_keyword_that_went_and_one_that_came(installed: Any) -> None:
    def gemm(a, b, d, grouped_layout, epilogue):  # type: ignore[no-untyped-def]
        """Of another time."""

    installed.m_grouped_fp8_gemm_nt_contiguous = gemm
    with pytest.raises(PluginError, match="takes no 'recipe', needs 'epilogue'"):
        grouped_gemm("fp8", "contiguous")


@pytest.mark.error_path
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(PluginError, match=r"with nvcc, which was not found: CUDA_HOME=/.* and CUDA_PATH=.*; install"):
        library.require_compiler()
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    library.require_compiler()


@pytest.mark.error_path
def test_without_any_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "DG_JIT_USE_NVRTC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(library, "program_path", lambda program: "")
    with pytest.raises(PluginError, match=r"CUDA_HOME= and CUDA_PATH=, PATH, /usr/local/cuda; install a CUDA toolkit"):
        library.require_compiler()


@pytest.mark.error_path
def test_another_row_alignment_of_the_process(installed: Any) -> None:
    installed.get_mk_alignment_for_contiguous_layout = lambda: 256
    with pytest.raises(PluginError, match="multiples of 256, the route has 128"):
        library.require_row_alignment(128)


def test_what_compiled_functions_tell_of_themselves() -> None:
    class Compiled:
        """f(a: Tensor, b: tuple[Tensor, Tensor], recipe: Optional[tuple[int, int]] = (1, 2)) -> None."""

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            """Of pybind11, Python knows no more."""

    compiled = Compiled()
    compiled.__doc__ = (Compiled.__doc__ or "").rstrip(".")
    assert parameters(compiled) == {"a": True, "b": True, "recipe": False}
    for text in (None, "f(*args, **kwargs)\nOverloaded function.", "Multiplies."):
        compiled.__doc__ = text
        assert parameters(compiled) is None


@pytest.mark.error_path
def test_vendors_refuse_what_they_do_not_know(vendor: Any) -> None:
    gemm = vendor.m_grouped_bf16_gemm_nt_masked
    with pytest.raises(TypeError):
        gemm(a=1, b=2, d=3, masked_m=4)
    with pytest.raises(TypeError):
        gemm(a=1, b=2, d=3, masked_m=4, expected_m=5, signal=None)


def test_the_present_library_is_the_emulated_one() -> None:
    emulated = emulated_deep_gemm.install()
    assert library.deep_gemm() is emulated
