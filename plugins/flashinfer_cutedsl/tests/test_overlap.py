"""Combine that begins while the second projection runs: who can, what is passed on, and what is refused."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import early_combine
import pytest
import torch
from cutedsl_layers import B200, manager
from early_combine import EVENTS, MULTIPROCESSORS
from moe_plugin_flashinfer import library

from moe_core import ExpertGroup, LayerRequest, MoELayer, Workload
from moe_core.errors import PluginError, ResolutionError
from moe_core.manager import BackendManager
from moe_core.planner import make_plan
from moe_core.quant import NVFP4
from moe_core.testing.compare import layer_error
from moe_core.testing.stored import draw_layer
from moe_core.testing.tolerance import tolerance

EARLY = Workload(phase="decode", max_tokens=16, down_gemm_overlap=True)
RUNNER = "flashinfer_cutedsl"
GEMM = "gemm.grouped_gemm_nt_masked"


def plugins() -> BackendManager:
    made = manager()
    made.register("early_combine", early_combine)
    return made


def request(**fields: Any) -> LayerRequest:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 64}
    return LayerRequest(**{**sizes, "quant": NVFP4, "a2a_backend": "early", "workloads": EARLY, **fields})


def loaded(**fields: Any) -> tuple[MoELayer, Any]:
    asked = request(**fields)
    stored = draw_layer(request(workloads=(Workload(),), a2a_backend=None))
    layer = MoELayer(asked, environment=B200, manager=plugins())
    layer.load_weights(stored.raw(layer.local_experts, "cpu"))
    return layer, stored


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    return torch.randn(6, 128).to(torch.bfloat16), ids, torch.rand(6, 2) + 0.25


def test_the_second_projection_tells_which_experts_are_done() -> None:
    layer, stored = loaded()
    assert layer.plan.routes[0].runner.spec.kernel == "masked_overlap"
    given = tokens()
    output = layer(*given)
    assert [*EVENTS] == ["dispatch", "start", f"signals {[MULTIPROCESSORS] * 4}"]
    limit = tolerance(layer.request)
    assert layer_error(output, stored.reference, given, limit) < limit


def test_a_rank_without_experts_lets_combine_begin() -> None:
    one = {"num_experts": 1, "top_k": 1}
    asked = request(**one, ep_size=2, token_placement="replicated")
    layer = MoELayer(asked, environment=B200, manager=plugins(), group=ExpertGroup(rank=1, size=2))
    stored = draw_layer(request(**one, workloads=(Workload(),), a2a_backend=None))
    layer.load_weights(stored.raw(layer.local_experts, "cpu"))
    layer(torch.randn(3, 128).to(torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert [*EVENTS] == ["dispatch", "start", "signals []"]


def test_a_route_that_does_not_overlap_passes_nothing_on() -> None:
    layer, stored = loaded(workloads=Workload(phase="decode", max_tokens=16))
    given = tokens()
    output = layer(*given)
    assert [*EVENTS] == ["dispatch"]
    limit = tolerance(layer.request)
    assert layer_error(output, stored.reference, given, limit) < limit


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every masked GEMM from here on."""
    emulated, calls = library.load(torch.device("cpu")), []

    def find(name: str) -> Any:
        function = emulated.find(name)
        if name != GEMM:
            return function

        @functools.wraps(function)
        def gemm(**arguments: Any) -> Any:
            calls.append(arguments)
            return function(**arguments)

        return gemm

    monkeypatch.setattr("moe_plugin_flashinfer.experts_masked.load", lambda device: library.Library(find))
    return calls


@pytest.mark.parametrize("overlaps", [True, False])
def test_both_kernels_are_compiled_when_the_route_is_bound(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    calls = recorded(monkeypatch)
    layer, _ = loaded(workloads=Workload(phase="decode", max_tokens=16, down_gemm_overlap=overlaps))
    bound = [{"dst_signals", "sm_count"} & {*call} for call in calls]
    assert bound == [set(), {"dst_signals", "sm_count"} if overlaps else set()]
    layer(*tokens())
    assert [{*call} for call in calls[2:]] == [{*call} for call in calls[:2]]


def test_the_views_of_the_weights_are_made_when_the_route_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch)
    layer, stored = loaded()
    layer(*tokens())
    layer.load_weights(stored.raw(layer.local_experts, "cpu"))
    layer(*tokens())
    for first, *others in (calls[0::2], calls[1::2]):
        assert len(others) == 2
        assert all(other["rhs"][0] is first["rhs"][0] for other in others)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({"num_experts": 9}, "num_local_experts <= 8, found num_local_experts 9", id="many experts"),
        pytest.param({"a2a_backend": "none.masked"}, "none.masked: overlap: needs no combine before", id="dispatcher"),
        pytest.param(
            {"a2a_backend": "none.standard"}, "wrapper: overlap: needs no combine before", id="the whole layer at once"
        ),
        pytest.param({"runner_backend": "torch.masked"}, "torch.masked: overlap: needs no combine before", id="runner"),
    ],
)
def test_what_cannot_is_refused_with_that_reason(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ResolutionError) as caught:
        make_plan(plugins(), request(**{"runner_backend": RUNNER, **fields}), B200)
    assert text in str(caught.value)


@pytest.mark.error_path
def test_a_release_without_the_argument_is_refused_when_the_route_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = library.load(torch.device("cpu"))

    def without_signals(name: str) -> Any:
        function = emulated.find(name)
        if name != GEMM:
            return function

        def gemm(**arguments: Any) -> Any:
            return function(**arguments)

        known = inspect.signature(function).parameters.values()
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("alpha", "alpha_dtype")]
        kept = [parameter for parameter in known if parameter.name not in ("dst_signals", "sm_count", "kwargs")]
        gemm.__signature__ = inspect.Signature([*kept, *more])  # type: ignore[attr-defined]
        return gemm

    monkeypatch.setattr("moe_plugin_flashinfer.experts_masked.load", lambda device: library.Library(without_signals))
    loaded(workloads=Workload(phase="decode", max_tokens=16))
    with pytest.raises(PluginError, match="unexpected keyword argument 'dst_signals'"):
        loaded()
