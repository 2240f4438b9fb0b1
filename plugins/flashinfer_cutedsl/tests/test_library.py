"""FlashInfer as it is found: its functions by name, what is switched off, and what a release does not have."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from cutedsl_layers import small_layer
from moe_plugin_flashinfer import library
from moe_plugin_flashinfer.emulation import emulated
from moe_plugin_flashinfer.emulation.signatures import RELEASES
from moe_plugin_flashinfer.library import CALLS, Library

from moe_core.errors import PluginError

CPU = torch.device("cpu")
QUANTIZE = "scaled_fp4_grouped_quantize"


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", CALLS)
def test_every_call_fits_both_releases(name: str, release: str) -> None:
    with emulated(release):
        assert callable(library.load(CPU).function(name))


def test_what_a_release_switches_on_unless_told_not_to_is_switched_off() -> None:
    calls: list[Any] = []

    def later(*, a: Any, mask: Any, a_global_sf: Any, nvfp4_4over6: Any = "as the environment says") -> None:
        calls.append(nvfp4_4over6)

    def earlier(*, a: Any, mask: Any, a_global_sf: Any) -> None:
        calls.append("not asked")

    for function in (later, earlier):
        Library(lambda name, function=function: function).function(QUANTIZE)(a=0, mask=0, a_global_sf=0)
    assert calls == [None, "not asked"]


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda *, a, mask: None, "unexpected keyword argument 'a_global_sf'"),
        (lambda *, a, mask, a_global_sf, layout: None, "missing a required argument: 'layout'"),
    ],
    ids=["one less", "one more"],
)
def test_a_release_with_other_arguments_is_refused(function: Any, text: str) -> None:
    with pytest.raises(PluginError, match=text):
        Library(lambda name: function).function(QUANTIZE)


@pytest.mark.error_path
def test_a_release_without_the_function_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = types.ModuleType("flashinfer")
    # As a namespace, for parts that are looked for.
    found.__path__ = []
    monkeypatch.setitem(sys.modules, "flashinfer", found)
    on_gpu = library.load(torch.device("cuda"))
    for name in (QUANTIZE, "gemm.grouped_gemm_nt_masked"):
        with pytest.raises(PluginError, match=f"flashinfer has no {name}.*nvidia-cutlass-dsl.*flashinfer-python"):
            on_gpu.function(name)


@pytest.mark.error_path
def test_a_library_that_cannot_be_imported_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(PluginError, match=r"flashinfer .* cannot be imported beside torch .*pip install 'flashinfer-p"):
        library.load(torch.device("cuda"))


def test_functions_are_found_in_the_parts_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    top, part = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.gemm")
    top.scaled_fp4_grouped_quantize = lambda *, a, mask, a_global_sf: "top"  # type: ignore[attr-defined]
    part.grouped_gemm_nt_masked = lambda **keywords: "part"  # type: ignore[attr-defined]
    for module in (top, part):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    on_gpu = library.load(torch.device("cuda"))
    assert on_gpu.function(QUANTIZE)(a=0, mask=0, a_global_sf=0) == "top"
    assert on_gpu.function("gemm.grouped_gemm_nt_masked")() == "part"


@pytest.mark.error_path
@pytest.mark.parametrize("kernel", ["masked", "wrapper"])
def test_kernels_that_do_not_compile_fail_when_the_route_is_bound(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = library.load(CPU)

    def broken(name: str) -> Any:
        if name != QUANTIZE and name != "fp4_quantize":
            return known.find(name)

        def function(**keywords: Any) -> None:
            raise RuntimeError("nvcc: command not found")

        return function

    monkeypatch.setattr(f"moe_plugin_flashinfer.experts_{kernel}.load", lambda device: Library(broken))
    layer = small_layer(kernel)
    with pytest.raises(PluginError, match=rf"flashinfer_cutedsl\.{kernel}: flashinfer could not compile or run .*nvcc"):
        layer.bind()
