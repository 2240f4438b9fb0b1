"""What environment variables must be: declared by specs, recorded with the machine, compared by the resolver."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from fakes import dispatcher, manager_of, plugin, request, runner

from moe_core import specs
from moe_core.decision import Decision
from moe_core.environment import Environment
from moe_core.errors import ResolutionError, SpecError
from moe_core.planner import make_plan
from moe_core.probing import probe_environment, unprobed_environment
from moe_core.request import LayerRequest, Workload
from moe_core.resolver import resolve
from moe_core.setting import BufferSize, Setting

MIB = 1 << 20
COUNTS = Setting(values={"LIB_COUNTS": ("", "1")}, hint="unset it")
LAYERED = {"LIB_PCIE": ("1",), "LIB_ROCE": ("0",)}
ROWS = BufferSize(
    variables=("LIB_OWN_BUFFER", "LIB_BUFFER"),
    default=4,
    unit=MIB,
    bytes_needed=((2, ("max_rows", "hidden_size")), (MIB, ())),
    hint="set it before",
)


@pytest.mark.parametrize(
    ("setting", "variables", "fault"),
    [
        (COUNTS, {}, None),
        (COUNTS, {"LIB_COUNTS": "1"}, None),
        # A variable that is set to nothing says nothing.
        (COUNTS, {"LIB_COUNTS": ""}, None),
        (COUNTS, {"LIB_COUNTS": "0"}, ("LIB_COUNTS unset or 1", "LIB_COUNTS=0")),
        (Setting(values={"LIB_MODE": ("default", "Fast")}), {"LIB_MODE": "FAST"}, None),
        (Setting(values={"LIB_MODE": ("default", "fast")}), {}, ("LIB_MODE=default or fast", "LIB_MODE unset")),
        (Setting(values=LAYERED), {"LIB_PCIE": "1", "LIB_ROCE": "0"}, None),
        (
            Setting(values=LAYERED),
            {"LIB_PCIE": "1"},
            ("LIB_PCIE=1 and LIB_ROCE=0", "LIB_PCIE=1 and LIB_ROCE unset"),
        ),
        (Setting(values=LAYERED, holds=False), {"LIB_PCIE": "1"}, None),
        (
            Setting(values=LAYERED, holds=False),
            {"LIB_PCIE": "1", "LIB_ROCE": "0"},
            ("not (LIB_PCIE=1 and LIB_ROCE=0)", "LIB_PCIE=1 and LIB_ROCE=0"),
        ),
    ],
)
def test_a_setting(setting: Setting, variables: dict[str, str], fault: Any) -> None:
    assert setting.fault(variables) == fault


@pytest.mark.parametrize(
    ("variables", "max_rows", "found"),
    [
        # 2 bytes * 1024 rows * 1024 channels + 1 MiB are 3 MiB, one row more needs another.
        ({}, 1024, None),
        ({"LIB_BUFFER": "3"}, 1024, None),
        ({"LIB_BUFFER": "3"}, 1025, "LIB_BUFFER=3"),
        ({}, 2048, "unset, which means 4"),
        ({"LIB_BUFFER": ""}, 2048, "unset, which means 4"),
        ({"LIB_BUFFER": "5"}, 2048, None),
        # The first that is set counts, whatever the others say.
        ({"LIB_BUFFER": "100", "LIB_OWN_BUFFER": "2"}, 1024, "LIB_OWN_BUFFER=2"),
        ({"LIB_BUFFER": "many"}, 1, "LIB_BUFFER=many"),
        # Nobody can tell.
        ({"LIB_BUFFER": "1"}, None, None),
    ],
)
def test_a_buffer_size(variables: dict[str, str], max_rows: int | None, found: str | None) -> None:
    fault = ROWS.fault(variables, {"max_rows": max_rows, "hidden_size": 1024})
    assert (fault and fault[1]) == found
    if fault is not None:
        assert fault[0] == f"LIB_OWN_BUFFER or LIB_BUFFER >= {ROWS.needed({'max_rows': max_rows, 'hidden_size': 1024})}"


def test_rows_that_may_reach_a_rank() -> None:
    layer = request(num_experts=6, top_k=4, ep_size=2)
    # Three experts of four that a token names can be on one rank.
    assert layer.sizes(Workload(max_tokens=5))["max_rows"] == 5 * 2 * 3
    assert layer.sizes(Workload())["max_rows"] is None


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Setting(values={}), "field 'values': expected a variable and its values"),
        (lambda: Setting(values="LIB_COUNTS"), "field 'values': expected a variable"),
        (lambda: Setting(values={"LIB COUNTS": ("1",)}), "expected a tuple of names of environment variables"),
        (lambda: Setting(values={"LIB_COUNTS": "1"}), "field 'values', LIB_COUNTS: expected a tuple of texts, got '1'"),
        (lambda: Setting(values={"LIB_COUNTS": ()}), "LIB_COUNTS: expected a tuple of texts"),
        (lambda: Setting(values={"LIB_COUNTS": (1,)}), "LIB_COUNTS: expected a tuple of texts"),
        (lambda: attrs.evolve(ROWS, variables="LIB_BUFFER"), "field 'variables': expected a tuple of names"),
        (lambda: attrs.evolve(ROWS, bytes_needed=((1, ("rows",)),)), "'rows' is not one of top_k"),
        (lambda: attrs.evolve(ROWS, bytes_needed=((1, "max_rows"),)), "expected pairs of a factor and a tuple"),
        (lambda: attrs.evolve(ROWS, bytes_needed=[1, ("max_rows",)]), "expected pairs of a factor and a tuple"),
        (lambda: attrs.evolve(ROWS, unit=0), "field 'unit': expected an int >= 1"),
        (lambda: runner(settings=COUNTS), "field 'settings': expected a tuple"),
        (lambda: plugin("toy", variables="LIB_COUNTS"), "field 'variables': expected a tuple of names"),
    ],
)
def test_a_wrong_declaration(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        make()


@pytest.mark.parametrize("value", [COUNTS, Setting(values=LAYERED, holds=False), ROWS], ids=lambda v: type(v).__name__)
def test_a_declaration_travels(value: Any) -> None:
    assert eval(repr(value), vars(specs)) == pickle.loads(pickle.dumps(value)) == value
    assert len({value, pickle.loads(pickle.dumps(value))}) == 1


def test_lists_become_what_can_be_compared() -> None:
    listed: Any = [[2, ["max_rows", "hidden_size"]], [MIB, []]]
    assert hash(attrs.evolve(ROWS, bytes_needed=listed)) == hash(ROWS)


TOY = plugin(
    "toy",
    dispatchers=[
        dispatcher(settings=(COUNTS,), buffer_sizes=(ROWS,), limits=(specs.Limit("max_tokens", "<=", 64),)),
        dispatcher("plain"),
    ],
    runners=[runner()],
    variables=("LIB_SHOWN",),
)
LAYER = request(num_experts=8, top_k=2, hidden_size=4096, ep_size=2, workloads=Workload(max_tokens=16))


def decide(layer: LayerRequest = LAYER, **variables: str) -> Decision:
    return resolve([TOY], layer, Environment(device_type="cpu", packages={"torch": "2.13"}, variables=variables))


def names(decision: Decision) -> list[str]:
    return [ranked.candidate.a2a_backend for ranked in decision.workloads[0].ranked]


def test_the_resolver_refuses_what_contradicts_a_spec_and_nothing_else() -> None:
    assert names(decide()) == ["plain", "toy"]
    decision = decide(LIB_COUNTS="0", LIB_SHOWN="7")
    assert names(decision) == ["plain"]
    assert [str(reason) for reason in decision.reasons_of("toy:toy.standard")] == [
        "variable: needs LIB_COUNTS unset or 1, found LIB_COUNTS=0; unset it"
    ]


def test_what_memory_a_layer_needs_follows_from_the_layer() -> None:
    # 16 tokens * 2 ranks * 2 of a token's experts on a rank * 4096 * 2 bytes and 1 MiB.
    assert names(decide(LIB_BUFFER="2")) == ["plain", "toy"]
    decision = decide(LIB_BUFFER="1")
    assert names(decision) == ["plain"]
    (reason,) = decision.reasons_of("toy:toy.standard")
    needs = "variable: needs LIB_OWN_BUFFER or LIB_BUFFER >="
    assert str(reason) == f"{needs} 2, found LIB_BUFFER=1; set it before, or send fewer tokens at a time"
    # Who does not say how many tokens there are may bring as many as the spec takes.
    unbounded = attrs.evolve(LAYER, workloads=Workload())
    assert names(decide(unbounded, LIB_BUFFER="3")) == ["plain", "toy"]
    decision = decide(unbounded, LIB_BUFFER="2")
    assert names(decision) == ["plain"]
    (reason,) = decision.reasons_of("toy:toy.standard")
    assert str(reason) == f"{needs} 3, found LIB_BUFFER=2; set it before, or declare Workload(max_tokens=...)"


def test_a_size_that_no_token_changes_asks_for_none() -> None:
    fixed = attrs.evolve(ROWS, bytes_needed=((8 * MIB, ()),))
    toy = attrs.evolve(TOY, dispatchers=[dispatcher(buffer_sizes=(fixed,))])
    decision = resolve([toy], LAYER, Environment(device_type="cpu", packages={"torch": "2.13"}))
    (reason,) = decision.reasons_of("toy:toy.standard")
    assert reason.hint == "set it before"


def test_a_decision_shows_what_was_set() -> None:
    decision = decide(LIB_SHOWN="7", LIB_COUNTS="0")
    assert "\nvariables: LIB_COUNTS=0, LIB_SHOWN=7\n" in decision.explain()
    assert decision.to_json()["environment"]["variables"] == {"LIB_COUNTS": "0", "LIB_SHOWN": "7"}
    assert "variables:" not in decide().explain()


@pytest.mark.error_path
def test_a_pin_that_contradicts_the_environment_is_an_error() -> None:
    machine = Environment(device_type="cpu", packages={"torch": "2.13"}, variables={"LIB_COUNTS": "0"})
    with pytest.raises(ResolutionError, match=r"toy:toy\.standard: variable: needs LIB_COUNTS unset or 1, found"):
        make_plan(manager_of(TOY), attrs.evolve(LAYER, a2a_backend="toy"), machine)


def test_a_machine_records_what_plugins_read_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LIB_COUNTS", "LIB_BUFFER", "LIB_SHOWN", "SOMEBODY_ELSES"):
        monkeypatch.setenv(name, "5")
    plugins = manager_of(TOY)
    assert plugins.variables_read() == ("LIB_BUFFER", "LIB_COUNTS", "LIB_OWN_BUFFER", "LIB_SHOWN")
    recorded = {"LIB_BUFFER": "5", "LIB_COUNTS": "5", "LIB_SHOWN": "5"}
    assert dict(plugins.probe("cpu").variables) == recorded
    assert dict(unprobed_environment(variables=plugins.variables_read()).variables) == recorded
    assert probe_environment(device_type="cpu").variables == ()
    # What was recorded counts, not what this process has.
    assert names(decide()) == ["plain", "toy"]
