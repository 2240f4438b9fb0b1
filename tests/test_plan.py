from __future__ import annotations

from typing import Any

import attrs
import pytest
from fakes import (
    A3,
    CPU,
    DECODE,
    PREFILL_AND_DECODE,
    SM90,
    W8A8_INT8,
    dispatcher,
    expect,
    plan,
    plugin,
    request,
    runner,
)

from moe_core.errors import InputError, SpecError
from moe_core.plan import MoEPlan
from moe_core.request import Workload

LOCAL = plugin(
    dispatchers=[dispatcher(token_placements=("distributed", "replicated"))], runners=[runner("a"), runner("b")]
)


def _plan(**fields: Any) -> MoEPlan:
    return plan(request(workloads=PREFILL_AND_DECODE, **fields), CPU, LOCAL)


@pytest.mark.parametrize(
    ("fields", "num_tokens", "phase", "expected"),
    [
        ({}, 1, None, "decode"),
        ({}, 128, None, "decode"),
        ({}, 129, None, "prefill"),
        ({}, 4096, None, "prefill"),
        ({}, 1, "prefill", "prefill"),
        ({"ep_size": 2}, 1, "prefill", "prefill"),
        ({"ep_size": 2, "token_placement": "replicated"}, 129, None, "prefill"),
    ],
)
def test_the_route_of_a_forward(fields: dict[str, Any], num_tokens: int, phase: str | None, expected: str) -> None:
    made = _plan(**fields)
    assert made.routes[made.route_index(num_tokens, phase)].phase == expected


def test_without_a_phase_the_smallest_workload_that_suffices_serves() -> None:
    prefill, decode = sorted(_plan().routes, key=lambda route: route.phase, reverse=True)
    routes = [attrs.evolve(prefill, max_tokens=count) for count in (32, 200, 4096)]
    routes += [attrs.evolve(decode, max_tokens=count) for count in (16, 128)]
    made = attrs.evolve(_plan(), routes=routes)

    def taken(num_tokens: int, phase: str | None = None) -> tuple[str, int | None]:
        route = made.routes[made.route_index(num_tokens, phase)]
        return route.phase, route.max_tokens

    assert [taken(count) for count in (1, 17, 128)] == [("decode", 16), *[("decode", 128)] * 2]
    assert [taken(count) for count in (129, 201)] == [("prefill", 200), ("prefill", 4096)]
    assert [taken(count, "prefill") for count in (1, 33)] == [("prefill", 32), ("prefill", 200)]
    # One phase is left: whoever runs the route says that there are too many.
    assert taken(4097, "prefill") == ("prefill", 4096)


@pytest.mark.parametrize("phase", [None, "prefill", "decode"])
def test_routes_of_a_layer_without_phases(phase: str | None) -> None:
    (route,) = plan(request(), CPU, LOCAL).routes
    made = attrs.evolve(plan(request(), CPU, LOCAL), routes=[attrs.evolve(route, max_tokens=8), route])
    assert [made.route_index(count, phase) for count in (1, 8, 9, 10**6)] == [0, 0, 1, 1]


@pytest.mark.parametrize("phase", [None, "prefill", "decode"])
def test_one_route_for_any_phase(phase: str | None) -> None:
    assert plan(request(), CPU, LOCAL).route_index(7, phase) == 0


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "arguments", "match"),
    [
        ({}, (4097,), "4097 tokens exceed the largest workload of this layer, 4096"),
        ({}, (1, "verify"), "no route for phase 'verify'; this layer has decode, prefill"),
        ({"ep_size": 2}, (1,), "routes for decode, prefill: say which with phase="),
    ],
)
def test_no_route(fields: dict[str, Any], arguments: tuple[Any, ...], match: str) -> None:
    with pytest.raises(InputError, match=match):
        _plan(**fields).route_index(*arguments)


@pytest.mark.error_path
def test_a_layer_without_phases_knows_their_names() -> None:
    with pytest.raises(InputError, match="no route for phase 'prefil'; this layer has any, prefill, decode, verify"):
        plan(request(), CPU, LOCAL).route_index(7, "prefil")


@pytest.mark.error_path
def test_the_only_route_is_not_for_another_phase() -> None:
    made = plan(request(workloads=DECODE), CPU, LOCAL)
    expect(made.route_index(5, "decode") == 0)
    with pytest.raises(InputError, match="no route for phase 'prefill'; this layer has decode"):
        made.route_index(5, "prefill")


def test_a_fused_route_has_no_dispatcher() -> None:
    made = plan(request(quant=W8A8_INT8, a2a_backend="ascend_fuseep"), A3)
    (route,) = made.routes
    assert route.dispatcher is None
    assert made.weight_layout == "fuseep-1"
    assert made.runner_plugin == "ascend_npu"


def test_the_canonical_form_names_every_difference() -> None:
    one, two = (plan(request(a2a_backend="deepep", top_k=k), SM90).canonical() for k in (8, 7))
    assert {field for field in one if one[field] != two[field]} == {"request.top_k"}
    assert all(isinstance(value, str) for value in one.values())


def test_notes_are_no_difference() -> None:
    made = _plan()
    assert attrs.evolve(made, notes=("something",)).canonical() == made.canonical()


def test_as_text() -> None:
    assert str(_plan()).splitlines() == [
        "decode: toy:toy.standard + toy:a.standard, bf16 by runner, up to 128 tokens",
        "prefill: toy:toy.standard + toy:a.standard, bf16 by runner, up to 4096 tokens",
        "weights: canonical",
    ]


@pytest.mark.error_path
def test_routes_are_routes() -> None:
    with pytest.raises(SpecError, match="MoEPlan, field 'routes': expected a tuple of Route"):
        MoEPlan(request=request(workloads=Workload()), routes=["a"], weight_layout="x", output_is_complete=True)
