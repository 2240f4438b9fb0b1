"""Variables of the vendor's libraries: recorded with a machine, shown in a decision, refused where they contradict."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
from ascend_layers import A2, A2_HOSTS, A3, decision_of, manager, plan_of, with_variables
from moe_plugin_ascend import deepep_specs, fuseep_specs

from moe_core import Workload
from moe_core.environment import Environment
from moe_core.quant import W8A8_INT8

#: Everything that changes what the libraries do.
READ = {
    "DEEP_USE_MODE",
    "MOE_EXPERT_TOKEN_NUMS_TYPE",
    "MOE_ENABLE_TOPK_NEG_ONE",
    "MOE_SHARED_EXPERT_RANK_NUM",
    "DEEP_NORMAL_MODE_USE_INT8_QUANT",
    "DEEPEP_NORMAL_LONG_SEQ_ROUND",
    "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS",
    "HCCL_BUFFSIZE",
    "DEEPEP_HCCL_BUFFSIZE",
    "HCCL_OP_EXPANSION_MODE",
    "HCCL_INTRA_PCIE_ENABLE",
    "HCCL_INTRA_ROCE_ENABLE",
}
NORMAL, LOW_LATENCY = ["deepep.normal"], ["deepep.low_latency"]
FUSED = ["fuseep.mode1", "fuseep.mode2"]


def layer(machine: Environment, max_tokens: int | None = 64, **fields: Any) -> Any:
    workload = Workload(phase="decode", max_tokens=max_tokens)
    return decision_of(machine, **{"quant": W8A8_INT8, "hidden_size": 7168, "workloads": workload, **fields})


def refused(machine: Environment, max_tokens: int | None = 64, **fields: Any) -> dict[str, str]:
    """Name of each dispatcher and runner -> the first reason against it that is about variables."""
    decision = layer(machine, max_tokens, **fields)
    names = [spec.short_name for spec in (*deepep_specs.DISPATCHERS, *fuseep_specs.RUNNERS)]
    found = {name: decision.reasons_of(f"ascend_npu:{name}") for name in names}
    return {
        name: str(next(reason for reason in reasons if reason.code == "variable"))
        for name, reasons in found.items()
        if {reason.code for reason in reasons} == {"variable"}
    }


def test_what_is_set_is_recorded_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in READ:
        monkeypatch.setenv(name, "1")
    variables = manager().probe().variables
    assert {name for name, _ in variables} == READ
    decision = layer(attrs.evolve(A3, variables=variables))
    assert "MOE_ENABLE_TOPK_NEG_ONE=1" in decision.explain()
    assert decision.to_json()["environment"]["variables"] == dict.fromkeys(sorted(READ), "1")


def test_nothing_contradicts_a_plan_on_a_preset() -> None:
    assert refused(A3) == {}
    assert refused(A2) == {}


def test_what_a_call_sets_itself_contradicts_nothing() -> None:
    assert refused(with_variables(A3, DEEP_NORMAL_MODE_USE_INT8_QUANT="1", MOE_ENABLE_TOPK_NEG_ONE="0")) == {}


def test_what_is_the_default_may_be_said() -> None:
    said = {"MOE_EXPERT_TOKEN_NUMS_TYPE": "1", "DEEP_USE_MODE": "DEFAULT", "MOE_SHARED_EXPERT_RANK_NUM": "0"}
    rounds = {"DEEPEP_NORMAL_LONG_SEQ_ROUND": "1", "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS": "8192"}
    assert refused(with_variables(A3, **said, **rounds)) == {}


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("MOE_EXPERT_TOKEN_NUMS_TYPE", "0", NORMAL + LOW_LATENCY + FUSED),
        ("MOE_SHARED_EXPERT_RANK_NUM", "1", NORMAL + LOW_LATENCY + FUSED),
        ("DEEP_USE_MODE", "alltoall", NORMAL + LOW_LATENCY + FUSED),
        ("DEEPEP_NORMAL_LONG_SEQ_ROUND", "2", NORMAL),
        ("DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS", "32", NORMAL),
    ],
)
def test_a_contradiction(name: str, value: str, where: list[str]) -> None:
    reasons = refused(with_variables(A3, **{name: value}))
    assert list(reasons) == where
    for reason in reasons.values():
        assert reason.startswith(f"variable: needs {name} unset or ")
        assert f"found {name}={value}; unset it" in reason


def test_one_rank_needs_none_of_it() -> None:
    machine = with_variables(A3, DEEP_USE_MODE="ops", HCCL_BUFFSIZE="1")
    (route,) = plan_of(machine, quant=W8A8_INT8, ep_size=1).routes
    assert route.candidate.full_name == "ascend_npu:none.contiguous + ascend_npu:ascend.w8a8"


def _mib(size: int) -> int:
    return -(-size // (1 << 20))


# Eight experts on each of eight ranks, top-k 8, H 7168; what the operators of August 2026 compute, in MiB.
TOKENS, BYTES = 64, 2 * 7168
#: In whole 512 bytes: 28 of them, and one more for scale and indices of a token that is dispatched.
SENT, RETURNED = BYTES + 512, BYTES


@pytest.mark.parametrize(
    ("name", "checked"),
    [
        ("deepep.normal", 2 * (TOKENS * 8 * (SENT + RETURNED) + (106 << 20))),
        ("deepep.low_latency", 2 * TOKENS * (8 * 8 * SENT + 8 * RETURNED)),
        ("fuseep.mode1", 2 * 2 * 8 * TOKENS * 8 * 7168),
        ("fuseep.mode2", 3 * TOKENS * 8 * 7168 + (10 << 20)),
        ("deepep.a2_normal", 2 * (8 * TOKENS * 8 * BYTES + (2 << 20))),
        ("deepep.a2_low_latency", 2 * (8 * TOKENS * 8 * BYTES + (2 << 20))),
        ("deepep.a2_normal_two_hosts", 64 * TOKENS * (BYTES + 16 * 8) + (804 << 20)),
    ],
)
def test_communication_domains_are_large_enough(name: str, checked: int) -> None:
    machine = A2_HOSTS if "two_hosts" in name else A2 if "a2" in name else A3
    fields = {"ep_size": 16} if "two_hosts" in name else {}
    reason = refused(with_variables(machine, HCCL_BUFFSIZE="1"), **fields)[name]
    match = re.match(
        "variable: needs DEEPEP_HCCL_BUFFSIZE or HCCL_BUFFSIZE >= ([0-9]+), found HCCL_BUFFSIZE=1;", reason
    )
    assert match
    # The workload says how many tokens it has.
    assert reason.endswith("or send fewer tokens at a time")
    needed = int(match[1])
    # Up to one more: rows are taken for whole 512 bytes and one, whatever they are.
    assert 0 <= needed - _mib(checked) <= 1
    assert name in refused(with_variables(machine, HCCL_BUFFSIZE=str(needed - 1)), **fields)
    assert name not in refused(with_variables(machine, HCCL_BUFFSIZE=str(needed)), **fields)


def test_how_large_a_domain_is_may_be_left_open_or_said_twice() -> None:
    unset = attrs.evolve(A3, variables={})
    # The normal mode of A3 keeps more for its own state than a domain has where nothing is set.
    assert list(refused(unset)) == NORMAL
    assert "found unset, which means 200" in refused(unset)["deepep.normal"]
    # The library's own variable comes first.
    twice = with_variables(A3, DEEPEP_HCCL_BUFFSIZE="1")
    assert list(refused(twice)) == NORMAL + LOW_LATENCY + FUSED
    # As many tokens as the mode takes, where a workload does not say how many it has.
    assert list(refused(with_variables(A3, HCCL_BUFFSIZE="1000"), max_tokens=None)) == [*NORMAL, *LOW_LATENCY]


def test_a2() -> None:
    assert list(refused(with_variables(A2, HCCL_OP_EXPANSION_MODE="AIV"))) == [
        "deepep.a2_normal",
        "deepep.a2_low_latency",
    ]
    # One host must not say what two hosts need; one of the two alone means nothing.
    layered = refused(A2_HOSTS)
    assert list(layered) == ["deepep.a2_normal", "deepep.a2_low_latency"]
    assert "unset them on one host" in layered["deepep.a2_normal"]
    assert refused(with_variables(A2, HCCL_INTRA_PCIE_ENABLE="1")) == {}
    assert refused(A2_HOSTS, ep_size=16) == {}
    hosts = refused(A2, ep_size=16)
    assert list(hosts) == ["deepep.a2_normal_two_hosts"]
    assert "HCCL_INTRA_PCIE_ENABLE=1 and HCCL_INTRA_ROCE_ENABLE=0, found HCCL_INTRA_PCIE_ENABLE unset" in next(
        iter(hosts.values())
    )
