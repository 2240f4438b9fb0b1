"""Requests, plans and layers of the plugin on a described Ascend machine, and jobs for ranks."""

from __future__ import annotations

import os
import threading
from typing import Any, ClassVar

import attrs
import moe_plugin_ascend.plugin as ascend
import torch
from moe_plugin_ascend.emulation import deep_ep

import moe_core.backends.torch.plugin as torch_plugin
from moe_core import ExpertGroup, LayerRequest, MoELayer, Workload
from moe_core.decision import Decision
from moe_core.environment import PRESETS, Environment
from moe_core.errors import InputError
from moe_core.manager import BackendManager
from moe_core.plan import MoEPlan
from moe_core.planner import decide, make_plan
from moe_core.testing.compare import relative_error
from moe_core.testing.examples import stored_layer, telling_tokens

A2, A3 = PRESETS["ascend-a2"], PRESETS["ascend-a3"]


def with_variables(machine: Environment, **variables: str) -> Environment:
    """The machine in a process that has these environment variables set as well."""
    return attrs.evolve(machine, variables={**dict(machine.variables), **variables})


#: A machine of two A2 hosts.
A2_HOSTS = with_variables(A2, HCCL_INTRA_PCIE_ENABLE="1", HCCL_INTRA_ROCE_ENABLE="0")
DECODE = Workload(phase="decode", max_tokens=64)


def manager() -> BackendManager:
    """The plugin beside the built-in one."""
    made = BackendManager()
    made.register("torch", torch_plugin)
    made.register("ascend_npu", ascend)
    return made


def request(**fields: Any) -> LayerRequest:
    """A layer of ordinary sizes over eight ranks."""
    sizes = {"num_experts": 64, "top_k": 8, "hidden_size": 4096, "intermediate_size": 1536, "ep_size": 8}
    return LayerRequest(**(sizes | fields))


def plan_of(machine: Any = A3, **fields: Any) -> MoEPlan:
    """The plan of `request`."""
    return make_plan(manager(), request(**fields), machine)[0]


def decision_of(machine: Any = A3, **fields: Any) -> Decision:
    """Everything that was considered for `request`."""
    return decide(manager(), request(**fields), machine)


def small(**fields: Any) -> LayerRequest:
    """A layer of the smallest sizes that `deepep` takes, over two ranks with unequal numbers of experts."""
    sizes = {"num_experts": 5, "top_k": 2, "hidden_size": 1024, "intermediate_size": 64, "ep_size": 2}
    return LayerRequest(**(sizes | {"workloads": DECODE} | fields))


def build(layer: LayerRequest, group: ExpertGroup, machine: Environment = A3) -> MoELayer:
    """A loaded layer on this rank."""
    made = MoELayer(layer, environment=machine, manager=manager(), group=group)
    made.load_weights(stored_layer(layer).raw(made.local_experts, "cpu"))
    return made


def outputs_and_answers(
    group: ExpertGroup, requests: list[LayerRequest], counts: list[int], machine: Environment = A3
) -> list[Any]:
    """A rank's job: per request its output, the float64 answer, and what twice-weighted rows would give."""
    found = []
    for seed, layer in enumerate(requests):
        tokens = hidden, ids, weights = telling_tokens(layer, counts[group.rank], 10 * seed + group.rank)
        output = build(layer, group, machine)(*tokens, phase="decode")
        reference = stored_layer(layer).reference
        answer, twice = reference(*tokens), reference(hidden, ids, weights * weights)
        found.append(tuple(tensor.double().numpy() for tensor in (output, answer, twice)))
    return found


def too_many(group: ExpertGroup, requests: list[LayerRequest]) -> list[Any]:
    """A rank's job: one rank has a token too many, alone; what it was told, and errors of the next forward."""
    found = []
    for layer in requests:
        made, told, limit = build(layer, group), "", layer.workloads[0].max_tokens or 0
        if group.rank == 0:
            try:
                made(*telling_tokens(layer, limit + 1, 0), phase="decode")
            except InputError as error:
                told = str(error)
        tokens = telling_tokens(layer, limit, group.rank)
        found.append((told, relative_error(made(*tokens, phase="decode"), stored_layer(layer).reference(*tokens))))
    return found


class WithoutDtypeArgument(deep_ep.Buffer):
    """A library of before `quant_mode`: in normal mode the environment alone decides."""

    seen: ClassVar[list[str | None]] = []

    def dispatch(  # type: ignore[override]
        self,
        x: torch.Tensor,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> Any:
        self.seen.append(os.environ.get("DEEP_NORMAL_MODE_USE_INT8_QUANT"))
        return super().dispatch(
            x,
            num_tokens_per_rank=num_tokens_per_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
        )


def alternating(group: ExpertGroup, requests: list[LayerRequest], variable: str | None) -> list[Any]:
    """A rank's job: layers that alternate on a library without `quant_mode`; what it saw, and their relative errors."""
    deep_ep.Buffer = WithoutDtypeArgument  # type: ignore[misc]
    os.environ.pop("DEEP_NORMAL_MODE_USE_INT8_QUANT", None)
    if variable is not None:
        os.environ["DEEP_NORMAL_MODE_USE_INT8_QUANT"] = variable
    layers = [build(layer, group) for layer in requests]
    errors = []
    for turn in range(2):
        for layer, made in zip(requests, layers, strict=True):
            tokens = telling_tokens(layer, 3 + group.rank, turn)
            errors.append(relative_error(made(*tokens).double(), stored_layer(layer).reference(*tokens)))
    return [WithoutDtypeArgument.seen, os.environ.get("DEEP_NORMAL_MODE_USE_INT8_QUANT"), errors]


def in_threads(group: ExpertGroup, requests: list[LayerRequest]) -> list[Any]:
    """A rank's job: each layer in a thread and a process group of its own, at the same time; their relative errors."""
    ranks = list(range(group.size))
    groups = [attrs.evolve(group, process_group=torch.distributed.new_group(ranks)) for _ in requests]
    errors: list[list[float]] = [[] for _ in requests]

    def forward(index: int) -> None:
        layer = build(requests[index], groups[index])
        for turn in range(4):
            tokens = telling_tokens(requests[index], 2 + turn, turn)
            output = layer(*tokens, phase="decode").double()
            errors[index].append(relative_error(output, stored_layer(requests[index]).reference(*tokens)))

    threads = [threading.Thread(target=forward, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
