"""Buffers of DeepEP: who shares one, who gets another, when one goes, and what NVSHMEM is told meanwhile."""

from __future__ import annotations

import gc
import os
import types
from collections.abc import Iterator
from typing import Any

import attrs
import emulated_deep_ep
import pytest
import torch
from deepep_layers import DECODE, build, install, plan_of, small
from moe_plugin_deepgemm import deepep_buffers, deepep_low_latency, deepep_normal
from moe_plugin_deepgemm.deepep_buffers import BUFFERS, BufferRegistry, Geometry, low_latency_geometry, normal_configs
from moe_plugin_deepgemm.deepep_specs import DEEP_EP
from moe_plugin_deepgemm.nvshmem_settings import nvshmem_settings

from moe_core import ExpertGroup, LayerRequest, Workload, rank_buffers
from moe_core.errors import InputError, PluginError
from moe_core.kernel_library import require_keywords
from moe_core.quant import BF16, FP8_BLOCK128
from moe_core.testing.compare import relative_error
from moe_core.testing.examples import stored_layer, telling_tokens
from moe_core.testing.ranks import RankError, run_on_ranks

DECODE_GEOMETRY = Geometry(mode="low_latency", hidden_size=2048, num_experts=8, capacity=64)
PREFILL_GEOMETRY = Geometry(mode="normal", hidden_size=2048)


class FakeConfig:
    """Needs as much room as it has multiprocessors."""

    def __init__(self, num_sms: int, *chunks: int) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms * hidden_bytes * num_ranks


class FakeBuffer:
    """Notes what it was made with, and whether it was destroyed."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.destroyed = arguments, False
        self.variables = {name for name in os.environ if name.startswith("NVSHMEM_")}
        if arguments.get("low_latency_mode"):
            # As the library does.
            os.environ["NVSHMEM_MAX_TEAMS"] = "7"

    def destroy(self) -> None:
        self.destroyed = True

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return FakeConfig(1)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Any:
        return FakeConfig(3)

    @staticmethod
    def get_low_latency_rdma_size_hint(capacity: int, hidden: int, ranks: int, experts: int) -> int:
        return capacity * hidden * experts


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[BufferRegistry]:
    """An empty one over the fake; the other rank of every group says what this one says."""
    library = types.SimpleNamespace(Buffer=FakeBuffer, Config=FakeConfig)
    monkeypatch.setattr(deepep_buffers, "import_library", lambda _: library)
    monkeypatch.setattr(rank_buffers, "every_rank", lambda group, mine: [mine, mine])
    fake = types.SimpleNamespace(
        ProcessGroup=object,
        get_world_size=lambda group: len(group.ranks),
        get_process_group_ranks=lambda group: group.ranks,
    )
    monkeypatch.setattr(deepep_buffers, "dist", fake)
    for name in [name for name in os.environ if name.startswith("NVSHMEM_")]:
        monkeypatch.delenv(name)
    yield BufferRegistry()
    assert not [name for name in os.environ if name.startswith("NVSHMEM_")], "a variable was left behind"


@attrs.define(eq=False)
class Ranks:
    """Compared by identity, as process groups are."""

    ranks: list[int]


def group(*ranks: int) -> Any:
    """A process group."""
    return Ranks(list(ranks))


def test_what_makes_a_geometry(registry: BufferRegistry) -> None:
    ranks = group(0, 1)
    changes = ({}, {"hidden_size": 4096}, {"num_experts": 16}, {"capacity": 128})
    shared = [registry.get(ranks, attrs.evolve(DECODE_GEOMETRY, **change)) for change in changes]
    assert len({id(each.buffer) for each in [*shared, registry.get(ranks, PREFILL_GEOMETRY)]}) == 5


def test_sizes_come_from_the_library(registry: BufferRegistry) -> None:
    ranks = group(0, 1)
    shared = registry.get(ranks, DECODE_GEOMETRY), registry.get(ranks, PREFILL_GEOMETRY)
    decode, prefill = (each.buffer.arguments for each in shared)
    assert decode == {
        "group": ranks,
        "num_rdma_bytes": 64 * 2048 * 8,
        "low_latency_mode": True,
        "num_qps_per_rank": 4,
        "explicitly_destroy": True,
    }
    assert prefill == {"group": ranks, "num_nvl_bytes": 64 * 2 * 2048 * 2, "explicitly_destroy": True}


def test_ranks_that_nobody_measured_have_the_librarys_settings(registry: BufferRegistry) -> None:
    ranks = group(0, 1, 2, 3)
    # The larger of both directions.
    assert registry.get(ranks, PREFILL_GEOMETRY).buffer.arguments["num_nvl_bytes"] == 3 * 2 * 2048 * 4
    assert [config.num_sms for config in normal_configs(4)] == [1, 3]


def test_a_buffer_is_destroyed_when_the_ranks_meet(registry: BufferRegistry) -> None:
    ranks = group(0, 1)
    kept, buffer = registry.get(ranks, PREFILL_GEOMETRY), registry.get(ranks, DECODE_GEOMETRY).buffer
    assert registry.free_unused(ranks) == 1
    assert (buffer.destroyed, kept.buffer.destroyed) == (True, False)


@pytest.mark.error_path
def test_nvshmem_serves_one_set_of_ranks(registry: BufferRegistry) -> None:
    first = registry.get(group(0, 1), DECODE_GEOMETRY)
    with pytest.raises(PluginError, match=r"serves the ranks \[0, 1\].*cannot serve \[2, 3\]"):
        registry.get(group(2, 3), DECODE_GEOMETRY)
    assert not registry.get(group(2, 3), PREFILL_GEOMETRY).buffer.destroyed
    assert not first.buffer.destroyed


@pytest.mark.error_path
def test_ranks_on_two_hosts_are_refused(registry: BufferRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_buffers, "every_rank", lambda group, mine: ["north", "south"])
    with pytest.raises(PluginError, match="north, south; pin a2a_backend='torch_alltoall'"):
        registry.get(group(0, 1), PREFILL_GEOMETRY)


@pytest.mark.error_path
def test_a_group_that_cannot_send_is_refused() -> None:
    layer = small()
    with pytest.raises(InputError, match=r"deepep needs ExpertGroup\.process_group"):
        build(layer, ExpertGroup(rank=0, size=2))


def test_settings_are_there_for_low_latency_buffers_alone(registry: BufferRegistry) -> None:
    ranks = group(0, 1)
    decode, prefill = registry.get(ranks, DECODE_GEOMETRY), registry.get(ranks, PREFILL_GEOMETRY)
    assert decode.buffer.variables == {"NVSHMEM_QP_DEPTH", "NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_DISABLE_NVLS"}
    assert prefill.buffer.variables == set()


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "ibrc")
    monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
    with nvshmem_settings(64):
        assert os.environ["NVSHMEM_REMOTE_TRANSPORT"] == "ibrc"
        assert os.environ["NVSHMEM_QP_DEPTH"] == "2048"
        os.environ["NVSHMEM_REMOTE_TRANSPORT"] = "changed by the library"
    assert os.environ["NVSHMEM_REMOTE_TRANSPORT"] == "ibrc"
    assert "NVSHMEM_QP_DEPTH" not in os.environ


@pytest.mark.error_path
def test_settings_are_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
    with pytest.raises(ZeroDivisionError), nvshmem_settings(64):
        raise ZeroDivisionError
    assert "NVSHMEM_QP_DEPTH" not in os.environ
    with nvshmem_settings(64):
        pass


@pytest.mark.error_path
def test_queues_that_are_too_short_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "1024")
    with nvshmem_settings(511):
        pass
    with (
        pytest.raises(PluginError, match=r"NVSHMEM_QP_DEPTH=1024: 512 tokens per rank need at least 1026"),
        nvshmem_settings(512),
    ):
        pass


@pytest.mark.parametrize(
    ("ranks", "runner", "tokens", "capacity"),
    [
        (2, "deep_gemm", 1, 64),
        (2, "deep_gemm", 65, 128),
        (8, "deep_gemm", 100, 112),
        (3, "deep_gemm", 100, 128),
        (2, "torch", 1, 2),
        (8, "torch", 7, 7),
        (3, "torch", 5, 8),
        (3, "deep_gemm", 896, 896),
    ],
)
def test_blocks_are_whole_tiles(ranks: int, runner: str, tokens: int, capacity: int) -> None:
    workload = Workload(phase="decode", max_tokens=tokens)
    fields = {"ep_size": ranks, "runner_backend": runner, "a2a_backend": "deepep.low_latency"}
    plan = plan_of(workloads=workload, **fields)
    geometry = low_latency_geometry(plan, plan.routes[0], 64)
    assert geometry.capacity == capacity
    assert geometry.capacity * ranks % (128 if runner == "deep_gemm" else 4) == 0


# --- the library ---


def test_the_vendors_signatures_take_what_is_passed(deep_ep_vendor: Any) -> None:
    """And no more; ranks that exchange through it are in the tests of the ranks."""
    buffer = deep_ep_vendor.Buffer
    assert buffer.get_low_latency_rdma_size_hint(1024, 6144, 8, 256) == 13_086_230_656
    names = ("self", "x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts")
    assert require_keywords(buffer.low_latency_dispatch, *names, of=DEEP_EP) is buffer.low_latency_dispatch
    with pytest.raises(PluginError, match="use_nvfp4"):
        require_keywords(buffer.low_latency_dispatch, *names, "use_nvfp4", of=DEEP_EP)


# --- on ranks ---


def settings_of_calls(group: ExpertGroup) -> list[int]:
    """A rank's job: multiprocessors of the calls of a prefill, alone and beside something."""
    install()
    layer = small(workloads=Workload(phase="prefill"), runner_backend="deep_gemm", num_experts=4)
    made, tokens = build(layer, group), telling_tokens(layer, 5, group.rank)
    made(*tokens)
    made(*tokens, overlap=lambda: None)
    return emulated_deep_ep.Config.seen


def test_every_call_says_with_how_many_multiprocessors() -> None:
    """The library's own number would be one of the process, and stays as it is."""
    assert run_on_ranks(settings_of_calls, [(), ()]) == [[64] * 4] * 2


def alternate(group: ExpertGroup, layers: list[LayerRequest]) -> list[Any]:
    """A rank's job: layers that alternate; their errors, dtypes, and what became of their buffers."""
    install()
    os.environ["NVSHMEM_MAX_TEAMS"] = "9"
    made = [build(layer, group) for layer in layers]
    errors: list[float] = []
    for step in range(6):
        for layer, each in zip(layers, made, strict=True):
            for phase in ("prefill", "decode"):
                tokens = telling_tokens(layer, 3 + step % 2 + group.rank, step)
                errors.append(relative_error(each(*tokens, phase=phase), stored_layer(layer).reference(*tokens)))
    dtypes = [sorted({str(route.token_dtype) for route in each.plan.routes}) for each in made]
    refused = False
    try:
        made[0](*telling_tokens(layers[0], 9, 0), phase="decode")
    except InputError:
        refused = True
    tokens = telling_tokens(layers[0], 4, 1)
    errors.append(relative_error(made[0](*tokens, phase="decode"), stored_layer(layers[0]).reference(*tokens)))
    alive = [len(emulated_deep_ep.Runtime.alive)]
    if group.process_group is None:
        raise RuntimeError("no process group")
    del made[1], each
    gc.collect()
    BUFFERS.free_unused(group.process_group)
    alive.append(len(emulated_deep_ep.Runtime.alive))
    errors.append(relative_error(made[0](*tokens, phase="decode"), stored_layer(layers[0]).reference(*tokens)))
    made.clear()
    gc.collect()
    BUFFERS.free_unused(group.process_group)
    alive.append(len(emulated_deep_ep.Runtime.alive))
    settings = [s["NVSHMEM_REMOTE_TRANSPORT"] for s in emulated_deep_ep.Runtime.settings]
    left = {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}
    return [errors, dtypes, refused, alive, settings, left]


@pytest.mark.parametrize("draft_first", [False, True])
def test_a_bf16_draft_and_an_fp8_target_alternate(draft_first: bool) -> None:
    target = small(quant=FP8_BLOCK128, runner_backend="deep_gemm", workloads=(DECODE, Workload(phase="prefill")))
    draft = small(
        quant=BF16, num_experts=4, intermediate_size=64, runner_backend="deep_gemm", workloads=target.workloads
    )
    layers = [draft, target] if draft_first else [target, draft]
    for found in run_on_ranks(alternate, [(layers,)] * 2):
        assert not isinstance(found, RankError), found
        errors, dtypes, refused, alive, settings, left = found
        # e4m3, and by other scales than the answer's; see the tests of the ranks.
        assert max(errors) < 5e-2
        assert dtypes == ([["bf16"], ["fp8/column_128"]] if draft_first else [["fp8/column_128"], ["bf16"]])
        assert refused, "nine tokens of eight"
        # One normal buffer for both, since they agree in the width of tokens, and two of the other mode.
        assert alive == [3, 2, 0]
        assert settings == ["none", "none"]
        assert left == {"NVSHMEM_MAX_TEAMS": "9"}


def overflow(group: ExpertGroup) -> list[str]:
    """A rank's job: the dispatcher by itself refuses what does not fit, alone, and the next call is right."""
    layer = small(workloads=DECODE, runner_backend="deep_gemm", num_experts=4)
    made = build(layer, group)
    (route,) = made._bound.routes  # type: ignore[union-attr]
    told = []
    if group.rank == 0:
        try:
            route.dispatch(torch.zeros(65, 2048).bfloat16(), torch.zeros(65, 2, dtype=torch.int64), torch.ones(65, 2))  # type: ignore[misc]
        except InputError as error:
            told.append(str(error))
    tokens = telling_tokens(layer, 5, 0)
    told.append(str(relative_error(made(*tokens), stored_layer(layer).reference(*tokens)) < 1e-2))
    return told


@pytest.mark.error_path
def test_too_many_tokens_raise_before_anything_is_sent() -> None:
    first, second = run_on_ranks(overflow, [(), ()])
    assert first == ["65 tokens on this rank, its buffer takes 64; nothing was sent", "True"]
    assert second == ["True"]


@pytest.mark.parametrize("module", [deepep_low_latency, deepep_normal])
def test_ids_are_looked_up_where_tokens_come(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(request: LayerRequest, device: torch.device) -> None:
        raise LookupError(device)

    monkeypatch.setattr(module, "EvenIds", told)
    plan = plan_of(workloads=DECODE)
    with pytest.raises(LookupError, match="meta"):
        module.bind(plan, plan.routes[0], ExpertGroup(size=8, device=torch.device("meta")))
