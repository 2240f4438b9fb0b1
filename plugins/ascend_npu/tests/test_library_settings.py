"""Variables that contradict a route are refused where it is bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ascend_layers import A2, A3, plan_of
from moe_plugin_ascend.library_settings import check_settings

from moe_core.errors import PluginError


def check(environ: Mapping[str, str], machine: Any = A3, max_tokens: int = 64, **fields: Any) -> None:
    plan = plan_of(machine, **{"a2a_backend": "deepep", "hidden_size": 7168, **fields})
    check_settings(plan, plan.routes[0], max_tokens, environ)


def test_nothing_is_set() -> None:
    check({})
    check({"MOE_EXPERT_TOKEN_NUMS_TYPE": "1", "DEEP_USE_MODE": "DEFAULT", "MOE_SHARED_EXPERT_RANK_NUM": "0"})
    # Set around every call that reads them.
    check({"DEEP_NORMAL_MODE_USE_INT8_QUANT": "1", "MOE_ENABLE_TOPK_NEG_ONE": "0"})


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("name", "value"),
    [("MOE_EXPERT_TOKEN_NUMS_TYPE", "0"), ("DEEP_USE_MODE", "alltoall"), ("MOE_SHARED_EXPERT_RANK_NUM", "1")],
)
def test_a_contradiction(name: str, value: str) -> None:
    with pytest.raises(PluginError, match=rf"deepep\.normal cannot run .*{name}={value}: expected .*, or unset"):
        check({name: value})


@pytest.mark.error_path
def test_buffers_are_large_enough() -> None:
    # 2 * (64 tokens * 8 ranks * 8 slots * 7168 * 2 bytes + 2 MiB) = 116 MiB; ten times the tokens: 1124 MiB.
    check({"HCCL_BUFFSIZE": "116"})
    with pytest.raises(PluginError, match=r"HCCL_BUFFSIZE \(115\): 64 tokens per rank need at least 116"):
        check({"HCCL_BUFFSIZE": "115"})
    with pytest.raises(PluginError, match=r"HCCL_BUFFSIZE \(unset\): 640 tokens .* 1124 .*Workload\(max_tokens="):
        check({}, max_tokens=640)
    with pytest.raises(PluginError, match="DEEPEP_HCCL_BUFFSIZE"):
        check({"DEEPEP_HCCL_BUFFSIZE": "many", "HCCL_BUFFSIZE": "9999"})


@pytest.mark.error_path
def test_a2() -> None:
    layered = {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}
    check({}, A2)
    check({**layered, "HCCL_BUFFSIZE": "1024"}, A2, ep_size=16)
    with pytest.raises(PluginError, match="HCCL_OP_EXPANSION_MODE is set"):
        check({"HCCL_OP_EXPANSION_MODE": "AIV"}, A2)
    with pytest.raises(PluginError, match="unset them on one host"):
        check(layered, A2)
    with pytest.raises(PluginError, match="must be 1 and 0 between two hosts"):
        check({"HCCL_BUFFSIZE": "1024"}, A2, ep_size=16)
    # 64 experts * 64 tokens * (7168 * 2 + 16 * 8) bytes + 804 MiB.
    with pytest.raises(PluginError, match="need at least 861"):
        check({**layered, "HCCL_BUFFSIZE": "860"}, A2, ep_size=16)
