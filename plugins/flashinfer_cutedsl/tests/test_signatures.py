"""The signatures that judge the plugin's calls: shipped ones are those of the library."""

from __future__ import annotations

import inspect
import runpy
import sys
from pathlib import Path

import pytest
from moe_plugin_flashinfer import emulation
from moe_plugin_flashinfer.emulation import signatures
from moe_plugin_flashinfer.emulation.signatures import RELEASES, VARIABLE

SOURCE = '''
import torch
@decorated
def scaled_fp4_grouped_quantize(a, mask: "T" = None, *, b: int = torch.bfloat16, **more) -> None:
    """Text."""
def other(a): ...
'''


def test_shipped_signatures_are_those_of_the_installed_library() -> None:
    folder = signatures.installed_folder()
    if folder is None:
        pytest.skip("no flashinfer here, whose signatures could be asked (make flashinfer-vendor)")
    assert signatures.read_sources(folder) == signatures.shipped(signatures.installed_release(folder))


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_has_every_function_that_is_emulated(release: str) -> None:
    listed = signatures.shipped(release)
    missing = set(signatures.SOURCES) - set(listed)
    assert missing == ({"fused_moe.cute_dsl_fused_moe"} if release == RELEASES[0] else set())
    assert ("nvfp4_4over6" in listed["fp4_quantize"].parameters) == (release != RELEASES[0])


def test_functions_show_the_signature_of_their_release() -> None:
    wrapper = emulation.find("fused_moe.CuteDslMoEWrapper")
    assert "use_fused_finalize" in inspect.signature(wrapper).parameters
    assert list(inspect.signature(wrapper).parameters)[:4] == [
        "num_experts",
        "top_k",
        "hidden_size",
        "intermediate_size",
    ]
    assert list(inspect.signature(wrapper.run).parameters)[:3] == ["self", "x", "x_sf"]
    quantize = "scaled_fp4_grouped_quantize"
    assert str(inspect.signature(emulation.find(quantize))) == "(a, mask, a_global_sf, nvfp4_4over6=_UNSET)"
    with emulation.emulated(RELEASES[0]):
        assert str(inspect.signature(emulation.find(quantize))) == "(a, mask, a_global_sf)"


def test_sources_are_read_as_python_reads_them(tmp_path: Path) -> None:
    (tmp_path / "flashinfer" / "quantization").mkdir(parents=True)
    (tmp_path / "flashinfer" / "quantization" / "fp4_quantization.py").write_text(SOURCE)
    (tmp_path / "flashinfer_python-1.2.3.dist-info").mkdir()
    assert signatures.installed_release(tmp_path) == "1.2.3"
    read = signatures.read_sources(tmp_path)
    assert {name: str(signature) for name, signature in read.items()} == {
        "scaled_fp4_grouped_quantize": "(a, mask=None, *, b=torch.bfloat16, **more)"
    }


def test_the_command_lists_a_folder_as_the_shipped_list_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "activation.py").write_text(
        "def silu_and_mul_scaled_nvfp4_experts_quantize(a, mask, a_global_sf): ..."
    )
    (tmp_path / "flashinfer_python-1.2.3.dist-info").mkdir()
    monkeypatch.setattr(sys, "argv", ["emulation", str(tmp_path)])
    runpy.run_module("moe_plugin_flashinfer.emulation", run_name="__main__")
    listed = "silu_and_mul_scaled_nvfp4_experts_quantize(a, mask, a_global_sf)"
    assert capsys.readouterr().out == f"## 1.2.3\n{listed}\n"


def test_the_installed_library_is_asked_where_it_is_that_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert "shipped" in signatures.signatures_of(RELEASES[0]).source
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / f"flashinfer_python-{RELEASES[0]}.dist-info").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert signatures.signatures_of(RELEASES[0]).source == f"the sources of flashinfer {RELEASES[0]}"
    assert "shipped" in signatures.signatures_of(RELEASES[1]).source


@pytest.mark.error_path
def test_unknown_releases_functions_and_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no signatures of flashinfer 0\.5 are shipped; there are 0\.6\.11"):
        signatures.shipped("0.5")
    with pytest.raises(AttributeError, match=r"has no 'gemm\.mm_fp4'"):
        emulation.find("gemm.mm_fp4")
    with emulation.emulated(RELEASES[0]), pytest.raises(AttributeError, match="cute_dsl_fused_moe"):
        emulation.find("fused_moe.cute_dsl_fused_moe")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="holds no flashinfer"):
        signatures.installed_folder()
