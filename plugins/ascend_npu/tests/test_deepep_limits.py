"""Every limit that the vendor documents, on both sides of its edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ascend_layers import A2, A2_HOSTS, A3, decision_of
from moe_plugin_ascend.deepep_specs import DISPATCHERS
from moe_plugin_ascend.fuseep_specs import RUNNERS

from moe_core import Workload
from moe_core.environment import Environment
from moe_core.quant import W8A8_INT8

#: A layer that each mode takes; the limits are tried around it.
NORMAL = {"quant": W8A8_INT8, "ep_size": 8, "hidden_size": 7168}
LOW_LATENCY = {**NORMAL, "workloads": Workload(phase="decode")}
TWO_HOSTS = {**NORMAL, "ep_size": 16}
FUSED = {**LOW_LATENCY, "top_k": 8}


def tokens(count: int, phase: str = "decode") -> dict[str, Any]:
    return {"workloads": Workload(phase=phase, max_tokens=count)}


def case(name: str, machine: Environment, base: dict[str, Any], inside: Any, outside: Any, limit: str) -> Any:
    return pytest.param(name, machine, base, inside, outside, limit, id=f"{name} {limit}")


def sizes(field: str, inside: int, outside: int) -> tuple[dict[str, int], dict[str, int]]:
    return {field: inside}, {field: outside}


CASES = [
    case("deepep.normal", A3, NORMAL, tokens(8192, "any"), tokens(8193, "any"), "max_tokens <= 8192"),
    case("deepep.normal", A3, NORMAL, *sizes("hidden_size", 1024, 1023), "hidden_size >= 1024"),
    case("deepep.normal", A3, NORMAL, *sizes("hidden_size", 7168, 7169), "hidden_size <= 7168"),
    case("deepep.normal", A3, NORMAL, *sizes("top_k", 16, 17), "top_k <= 16"),
    case("deepep.normal", A3, NORMAL, *sizes("num_experts", 512, 520), "num_experts <= 512"),
    case("deepep.normal", A3, NORMAL, *sizes("ep_size", 24, 12), "ep_size in (2, 4, 8, 16, 24"),
    case("deepep.low_latency", A3, LOW_LATENCY, tokens(512), tokens(513), "max_tokens <= 512"),
    case("deepep.low_latency", A3, LOW_LATENCY, *sizes("hidden_size", 7168, 7200), "hidden_size <= 7168"),
    case("deepep.low_latency", A3, LOW_LATENCY, *sizes("hidden_size", 64, 80), "hidden_size multiple_of 32"),
    case("deepep.low_latency", A3, LOW_LATENCY, *sizes("top_k", 16, 17), "top_k <= 16"),
    case("deepep.low_latency", A3, LOW_LATENCY, *sizes("num_experts", 512, 513), "num_experts <= 512"),
    case("deepep.low_latency", A3, LOW_LATENCY, *sizes("ep_size", 2, 1), "ep_size >= 2"),
    case("deepep.a2_normal", A2, NORMAL, tokens(8192, "any"), tokens(8193, "any"), "max_tokens <= 8192"),
    case("deepep.a2_normal", A2, NORMAL, *sizes("hidden_size", 7168, 4096), "hidden_size in (7168)"),
    case("deepep.a2_normal", A2, NORMAL, *sizes("top_k", 1, 17), "top_k <= 16"),
    case("deepep.a2_normal", A2, NORMAL, *sizes("ep_size", 8, 16), "ep_size in (2, 4, 8)"),
    case(
        "deepep.a2_normal_two_hosts",
        A2_HOSTS,
        TWO_HOSTS,
        tokens(4096, "any"),
        tokens(4097, "any"),
        "max_tokens <= 4096",
    ),
    case("deepep.a2_normal_two_hosts", A2_HOSTS, TWO_HOSTS, *sizes("top_k", 2, 1), "top_k >= 2"),
    case("deepep.a2_normal_two_hosts", A2_HOSTS, TWO_HOSTS, *sizes("top_k", 16, 17), "top_k <= 16"),
    case("deepep.a2_normal_two_hosts", A2_HOSTS, TWO_HOSTS, *sizes("hidden_size", 7168, 6144), "hidden_size in (7168)"),
    case("deepep.a2_normal_two_hosts", A2_HOSTS, TWO_HOSTS, *sizes("ep_size", 16, 8), "ep_size in (16)"),
    case("deepep.a2_low_latency", A2, LOW_LATENCY, tokens(512), tokens(513), "max_tokens <= 512"),
    case("deepep.a2_low_latency", A2, LOW_LATENCY, *sizes("hidden_size", 32, 7200), "hidden_size <= 7168"),
    case("deepep.a2_low_latency", A2, LOW_LATENCY, *sizes("ep_size", 8, 16), "ep_size <= 8"),
    case("fuseep.mode1", A3, FUSED, tokens(256), tokens(257), "max_tokens <= 256"),
    case("fuseep.mode1", A3, FUSED, *sizes("hidden_size", 512, 480), "hidden_size >= 512"),
    case("fuseep.mode1", A3, FUSED, *sizes("hidden_size", 7168, 7200), "hidden_size <= 7168"),
    case("fuseep.mode1", A3, FUSED, *sizes("intermediate_size", 512, 448), "intermediate_size >= 512"),
    # 2I of 6144 and of 6272.
    case("fuseep.mode1", A3, FUSED, *sizes("intermediate_size", 3072, 3136), "intermediate_size <= 3072"),
    case("fuseep.mode1", A3, FUSED, *sizes("intermediate_size", 576, 544), "intermediate_size multiple_of 64"),
    case("fuseep.mode1", A3, FUSED, *sizes("top_k", 12, 13), "top_k <= 12"),
    case("fuseep.mode1", A3, FUSED, *sizes("num_experts", 512, 513), "num_experts <= 512"),
    case("fuseep.mode2", A3, FUSED, tokens(512), tokens(513), "max_tokens <= 512"),
    case("fuseep.mode2", A3, FUSED, *sizes("intermediate_size", 3136, 3144), "intermediate_size multiple_of 32"),
    case("fuseep.mode2", A3, FUSED, *sizes("top_k", 16, 17), "top_k <= 16"),
]


@pytest.mark.parametrize(("name", "machine", "base", "inside", "outside", "limit"), CASES)
def test_a_documented_limit(
    name: str, machine: Environment, base: dict[str, Any], inside: Any, outside: Any, limit: str
) -> None:
    full_name = f"ascend_npu:{name}"
    assert not decision_of(machine, **(base | inside)).reasons_of(full_name)
    (reason,) = decision_of(machine, **(base | outside)).reasons_of(full_name)
    assert (reason.code, reason.needs[: len(limit)]) == ("limit", limit)


def test_the_page_names_every_mode() -> None:
    text = (Path(__file__).parents[3] / "docs" / "ascend.md").read_text(encoding="utf-8")
    for spec in DISPATCHERS:
        assert f"| `{spec.mode}` |" in text
    for runner in RUNNERS:
        assert f"`{runner.short_name}`" in text
        assert f"`{runner.weight_layout}`" in text


def test_every_declared_limit_is_in_the_table() -> None:
    declared = {(s.short_name, str(limit)) for s in (*DISPATCHERS, *RUNNERS) for limit in s.limits}
    tried = [(param.values[0], str(param.values[5])) for param in CASES]
    # What several modes have in common is tried on some of them.
    common = {"num_experts <= 512", "ep_size >= 2", "hidden_size <= 7168", "hidden_size multiple_of 32", "top_k <= 16"}
    for name, limit in declared:
        names = {mode for mode, start in tried if limit.startswith(start)}
        assert name in names or (names and limit in common), f"{name}: {limit}"
