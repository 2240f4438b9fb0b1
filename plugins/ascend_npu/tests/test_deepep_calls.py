"""What the plugin tells the library, with a library that writes down its calls and sends nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, cast

import attrs
import pytest
import torch
from ascend_layers import A2_HOSTS, A3, manager, small
from moe_plugin_ascend import deepep, fuseep
from recorder import VARIABLES, Recorder

from moe_core import ExpertGroup, LayerRequest, Workload, rank_buffers
from moe_core.errors import InputError, PluginError
from moe_core.kernels import checks
from moe_core.payloads import PreparedWeights
from moe_core.planner import make_plan
from moe_core.quant import BF16, W8A8_INT8
from moe_core.rank_buffers import BufferRegistry
from moe_core.testing.examples import stored_layer

#: Compared by identity alone.
GROUP = ExpertGroup(rank=0, size=2, process_group=cast(Any, object()))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recorder]]:
    made = type("Made", (Recorder,), {"seen": []})
    registry = BufferRegistry(lambda group, geometry: made(group, geometry), lambda buffer: None)
    monkeypatch.setattr(rank_buffers, "every_rank", lambda group, mine: [mine, mine])
    for module in (deepep, fuseep):
        monkeypatch.setattr(module, "BUFFERS", registry)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield made
    assert not any(name in os.environ for name in VARIABLES), "a call left a variable behind"


def bound(mode: str, quant: Any = W8A8_INT8, machine: Any = A3, **fields: Any) -> Any:
    layer = small(quant=quant, a2a_backend=f"deepep.{mode}", **fields)
    plan, _ = make_plan(manager(), layer, machine)
    bind = deepep.bind_low_latency if "low_latency" in mode else deepep.bind_normal
    return bind(plan, plan.routes[0], GROUP)


def tokens(count: int = 3, top_k: int = 2) -> tuple[torch.Tensor, ...]:
    ids = torch.tensor([[0, 4], [-1, 2], [3, -1]])[:count, :top_k]
    # Views with strides, and halves: what the library takes is made of them.
    hidden = torch.randn(2 * count, 1024).bfloat16()[::2]
    return hidden, ids.int(), torch.rand(top_k, count).half().T


def test_tokens_are_as_the_library_takes_them(recorder: type[Recorder]) -> None:
    for mode in ("normal", "low_latency"):
        bound(mode)[0](*tokens())
    for _, arguments, _ in recorder.seen:
        assert arguments["x"].is_contiguous()
        assert arguments["topk_weights"].is_contiguous()
        assert arguments["topk_weights"].dtype == torch.float32
        ids = arguments["topk_idx"]
        assert ids.is_contiguous()
        assert ids.dtype == torch.int64
        # Three experts per rank, of which the second rank has two.
        assert ids.tolist() == [[0, 4], [-1, 2], [3, -1]]


def test_experts_are_numbered_as_the_library_divides_them(recorder: type[Recorder]) -> None:
    hidden, _, weights = tokens()
    ids = torch.tensor([[6, 0], [2, 3], [4, -1]])
    bound("low_latency", num_experts=7, ep_size=3)[0](hidden, ids, weights)
    (_, arguments, _) = recorder.seen[0]
    # Shares of 3, 2 and 2 experts; of 3 for the library.
    assert arguments["num_experts"] == 9
    assert arguments["topk_idx"].tolist() == [[7, 0], [2, 3], [4, -1]]


@pytest.mark.parametrize("bind", [deepep.bind_normal, deepep.bind_low_latency, fuseep.bind])
def test_ids_are_looked_up_where_tokens_come(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(request: LayerRequest, device: torch.device) -> None:
        raise LookupError(device)

    for module in (deepep, fuseep):
        monkeypatch.setattr(module, "LibraryIds", told)
    plan, _ = make_plan(manager(), small(quant=W8A8_INT8, a2a_backend="deepep.normal"), A3)
    weights = [PreparedWeights(layout=next(iter(fuseep.FUSE_MODES)), tensors={})] if bind is fuseep.bind else []
    with pytest.raises(LookupError, match="meta"):
        bind(plan, plan.routes[0], *weights, attrs.evolve(GROUP, device=torch.device("meta")))


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_a_rank_without_tokens_sends_one_without_experts(recorder: type[Recorder], mode: str) -> None:
    dispatch, combine = bound(mode)
    dispatched, sent = dispatch(*tokens(0))
    output = combine(torch.zeros(dispatched.hidden_states.shape, dtype=torch.bfloat16), sent)
    assert output.shape == (0, 1024)
    (_, arguments, _) = recorder.seen[0]
    assert arguments["x"].shape == (1, 1024)
    assert arguments["topk_idx"].tolist() == [[-1, -1]]


@pytest.mark.parametrize(("quant", "word", "flag"), [(W8A8_INT8, "int8", "1"), (BF16, "bf16", "0")])
def test_normal_mode_says_the_dtype_by_argument_or_by_environment(
    recorder: type[Recorder], quant: Any, word: str, flag: str
) -> None:
    bound("normal", quant)[0](*tokens())
    recorder.old = True
    deepep.BUFFERS.free_unused(GROUP.process_group)
    bound("normal", quant)[0](*tokens())
    told = [(arguments["quant_mode"], variables[0]) for _, arguments, variables in recorder.seen]
    assert told == [(word, None), (None, flag)]


def test_between_hosts_the_environment_says_it_too(recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch, _ = bound(
        "a2_normal_two_hosts",
        machine=A2_HOSTS,
        hidden_size=7168,
        ep_size=16,
        num_experts=32,
        workloads=Workload(max_tokens=64),
    )
    monkeypatch.setenv(VARIABLES[0], "1")
    dispatch(torch.zeros(1, 7168).bfloat16(), torch.tensor([[0, 5]]), torch.ones(1, 2))
    assert os.environ[VARIABLES[0]] == "1"
    monkeypatch.delenv(VARIABLES[0])
    assert [(arguments["quant_mode"], variables[0]) for _, arguments, variables in recorder.seen] == [("bf16", "0")]


@pytest.mark.parametrize(("quant", "use_fp8", "word"), [(W8A8_INT8, True, "int8"), (BF16, False, None)])
def test_low_latency_mode_says_the_dtype_and_that_slots_may_be_empty(
    recorder: type[Recorder], quant: Any, use_fp8: bool, word: str | None
) -> None:
    dispatch, combine = bound("low_latency", quant)
    dispatched, sent = dispatch(*tokens())
    combine(torch.zeros(dispatched.hidden_states.shape).bfloat16(), sent)
    recorder.old = True
    bound("low_latency", quant, num_experts=8)[0](*tokens())
    calls = {name: arguments for name, arguments, _ in recorder.seen[:2]}
    first, (_, old, _) = calls["low_latency_dispatch"], recorder.seen[2]
    assert (first["use_fp8"], first["quant_mode"], first["num_max_dispatch_tokens_per_rank"]) == (use_fp8, word, 64)
    assert (old["use_fp8"], old["quant_mode"]) == (use_fp8, None)
    assert calls["low_latency_combine"]["topk_weights"] is first["topk_weights"]
    assert all(variables == (None, "1") for _, _, variables in recorder.seen)


@pytest.mark.error_path
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize("wrong", [5, -2])
def test_an_id_out_of_range_is_an_error_on_the_host(recorder: type[Recorder], mode: str, wrong: int) -> None:
    hidden, ids, weights = tokens()
    ids[1, 1] = wrong
    with pytest.raises(InputError, match=rf"expert id {wrong} is out of range"):
        bound(mode)[0](hidden, ids, weights)
    if recorder.seen:
        raise AssertionError("it was sent")


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_an_id_out_of_range_makes_its_token_nan_on_a_device(
    recorder: type[Recorder], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "ASSERTING", ())
    hidden, ids, weights = tokens()
    ids[1, 1], ids[2] = 5, torch.tensor([-1, 7])
    bound(mode)[0](hidden, ids, weights)
    (_, arguments, _) = recorder.seen[0]
    # The last one would have no expert left to bring its NaN.
    assert arguments["topk_idx"].tolist() == [[0, 4], [0, -1], [0, -1]]
    assert arguments["topk_weights"].isnan().any(1).tolist() == [False, True, True]


@pytest.mark.error_path
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_a_library_that_sends_something_else_is_caught(recorder: type[Recorder], mode: str) -> None:
    recorder.lies = True
    with pytest.raises(PluginError, match=r"sent torch.bfloat16 tokens, this route asked for int8"):
        bound(mode)[0](*tokens())


def test_threads_of_two_models_on_an_old_library(recorder: type[Recorder]) -> None:
    recorder.old, recorder.seconds = True, 0.001
    target, draft = bound("normal")[0], bound("normal", BF16, intermediate_size=96)[0]
    wrong: list[str] = []

    def forward(dispatch: Any, dtype: torch.dtype) -> None:
        for _ in range(20):
            dispatched, _ = dispatch(*tokens())
            if dispatched.hidden_states.dtype != dtype:
                wrong.append(f"{dispatched.hidden_states.dtype} instead of {dtype}")

    jobs = [(target, torch.int8), (draft, torch.bfloat16)] * 2
    threads = [threading.Thread(target=forward, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(recorder.seen) == 80


def test_layers_share_what_sizes_a_buffer_and_nothing_else(recorder: type[Recorder]) -> None:
    def buffer(mode: str, **fields: Any) -> Any:
        return bound(mode, **fields)[0].__self__._shared.buffer

    kept = [bound("low_latency"), bound("normal")]
    first, normal = (exchange[0].__self__._shared.buffer for exchange in kept)
    same = ({"quant": BF16}, {"intermediate_size": 96}, {"top_k": 3}, {"num_experts": 6})
    # Five and six experts are three for each of two ranks.
    assert all(buffer("low_latency", **fields) is first for fields in same)
    decode = Workload(phase="decode", max_tokens=65)
    others = [buffer("low_latency", **fields) for fields in ({"hidden_size": 2048}, {"num_experts": 8})]
    others.append(buffer("low_latency", workloads=decode))
    assert len({id(each) for each in (first, normal, *others)}) == 5
    # A normal buffer takes whatever comes.
    same = ({"hidden_size": 2048}, {"num_experts": 8}, {"top_k": 3}, {"workloads": decode})
    assert all(buffer("normal", **fields) is normal for fields in same)


def test_the_fused_call_runs_on_a_buffer_of_the_low_latency_mode(recorder: type[Recorder]) -> None:
    dispatch, _ = bound("low_latency")
    layer = small(quant=W8A8_INT8, intermediate_size=512, a2a_backend="ascend_fuseep", runner_backend="fuseep.mode1")
    plan, _ = make_plan(manager(), layer, A3)
    weights = manager().process_weights(plan, stored_layer(layer).raw((0, 1, 2), "cpu"), None)
    fused = manager().bind_experts(plan, plan.routes[0], weights, GROUP)
    # What is held keeps the buffer from being given back.
    assert fused._shared is dispatch.__self__._shared


@pytest.mark.error_path
def test_ranks_without_a_process_group() -> None:
    plan, _ = make_plan(manager(), small(a2a_backend="deepep"), A3)
    with pytest.raises(InputError, match=r"deepep\.low_latency needs ExpertGroup\.process_group"):
        deepep.bind_low_latency(plan, plan.routes[0], ExpertGroup(size=2))


@pytest.mark.parametrize(("mode", "capacity"), [(1, 64), (2, 64 * 2 * 2)])
def test_the_fused_call(recorder: type[Recorder], mode: int, capacity: int) -> None:
    layer = small(
        quant=W8A8_INT8,
        hidden_size=1024,
        intermediate_size=512,
        a2a_backend="ascend_fuseep",
        runner_backend=f"fuseep.mode{mode}",
    )
    plan, _ = make_plan(manager(), layer, A3)
    weights = manager().process_weights(plan, stored_layer(layer).raw((0, 1, 2), "cpu"), None)
    fused = manager().bind_experts(plan, plan.routes[0], weights, GROUP)
    hidden, ids, router = tokens()
    hidden = hidden.clone()
    hidden[0] = 0
    fused(hidden, ids, router)  # type: ignore[call-arg, arg-type]
    fused(*tokens(0))  # type: ignore[call-arg, arg-type]
    (_, arguments, _), (_, nothing, _) = recorder.seen
    assert (arguments["fuse_mode"], arguments["quant_mode"]) == (mode, 1)
    assert (arguments["num_max_dispatch_tokens_per_rank"], arguments["num_experts"]) == (capacity, 6)
    # Mode 2 divides by zero where a row is.
    assert arguments["topk_idx"].tolist() == [[0, 4] if mode == 1 else [-1, -1], [-1, 2], [3, -1]]
    assert nothing["topk_idx"].tolist() == [[-1, -1]]
    shapes = {name: list(arguments[name].shape) for name in arguments if name.startswith("gmm")}
    assert shapes == {
        "gmm1_permuted_weight": [3, 1024, 1024],
        "gmm1_permuted_weight_scale": [3, 1024] if mode == 1 else [3 * 1024],
        "gmm2_weight": [3, 1024, 512] if mode == 1 else [3, 512, 1024],
        "gmm2_weight_scale": [3, 1024] if mode == 1 else [3 * 1024],
    }


@pytest.mark.error_path
def test_a_library_without_the_second_fused_mode(recorder: type[Recorder]) -> None:
    recorder.old = True
    layer = small(quant=W8A8_INT8, intermediate_size=512, a2a_backend="ascend_fuseep")
    plan, _ = make_plan(manager(), layer, A3)
    weights = manager().process_weights(plan, stored_layer(layer).raw((0, 1, 2), "cpu"), None)
    with pytest.raises(PluginError, match=r"deep_ep .*fused_deep_moe: .*'topk_idx'.*build deep_ep"):
        manager().bind_experts(plan, plan.routes[0], weights, GROUP)
