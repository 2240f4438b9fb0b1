"""Tokens in NVFP4: which installation sends them, and how they lie in memory."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from deepep_layers import B200, DECODE, decision_of
from moe_plugin_deepgemm.deepep_nvfp4 import blocks_of

from moe_core.errors import PluginError
from moe_core.specs import TokenDtype

EXPERTS, ROWS, HIDDEN = 3, 256, 128
NVFP4 = TokenDtype("nvfp4", "block_16_tiled")


def views() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as kernels read them: views of memory in which the expert comes first."""
    codes = torch.randint(0, 256, (EXPERTS, ROWS, HIDDEN // 2), dtype=torch.uint8)
    tiles = torch.randint(0, 127, (EXPERTS, ROWS // 128, HIDDEN // 64, 32, 4, 4), dtype=torch.uint8)
    return codes.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


def test_blocks_are_the_librarys_memory() -> None:
    codes, tiles = views()
    rows, scales = blocks_of(codes, tiles)
    assert (rows.shape, scales.shape) == ((EXPERTS, ROWS, HIDDEN // 2), (EXPERTS, ROWS, HIDDEN // 16))
    assert (rows.data_ptr(), scales.data_ptr()) == (codes.data_ptr(), tiles.data_ptr())
    assert rows.is_contiguous()
    assert scales.is_contiguous()
    for expert, row, group in ((0, 0, 0), (1, 37, 5), (2, 255, 7)):
        assert rows[expert, row, 9] == codes[row, 9, expert]
        place = (row // 128 * (HIDDEN // 64) + group // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
        stored = tiles[row % 32, row % 128 // 32, row // 128, group % 4, group // 4, expert]
        assert scales[expert].view(torch.uint8).flatten()[place] == stored


@pytest.mark.error_path
@pytest.mark.parametrize("fault", ["as documented", "copied codes", "copied scales", "other rows"])
def test_memory_in_another_order_is_refused(fault: str) -> None:
    codes, tiles = views()
    if fault == "as documented":
        codes = codes.permute(2, 1, 0).contiguous()
    elif fault == "copied codes":
        codes = codes.contiguous()
    elif fault == "copied scales":
        tiles = tiles.contiguous()
    else:
        codes = codes[:128]
    with pytest.raises(PluginError, match=r"deep_ep returned tokens \[.*pin dispatch_dtype='bf16'"):
        blocks_of(codes, tiles)


@pytest.mark.parametrize(
    ("version", "mode"),
    [
        ("1.2.1", "low_latency_unverified"),
        ("0.1.0", "low_latency_unverified"),
        ("0.1.1", "low_latency_nvfp4_unverified"),
        ("0.1.3", "low_latency_nvfp4_unverified"),
    ],
)
def test_one_mode_serves_each_installation(version: str, mode: str) -> None:
    machine = attrs.evolve(B200, packages=dict(B200.packages) | {"deep_ep": version})
    (workload,) = decision_of(machine, workloads=DECODE).workloads
    serving: list[Any] = [
        spec.declared.spec
        for spec in workload.specs
        if ":deepep.low_latency" in spec.declared.full_name and not spec.reasons
    ]
    assert [spec.mode for spec in serving] == [mode]
    assert (NVFP4 in serving[0].sends) == ("nvfp4" in mode)
