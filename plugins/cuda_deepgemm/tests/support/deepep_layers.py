"""Requests, plans and layers on a described GPU, and jobs for ranks that exchange through the emulated library."""

from __future__ import annotations

from typing import Any

import emulated_deep_ep
import emulated_deep_gemm
import moe_plugin_deepgemm.plugin as deepgemm

import moe_core.backends.torch.plugin as torch_plugin
from moe_core import ExpertGroup, LayerRequest, MoELayer, Workload
from moe_core.decision import Decision
from moe_core.environment import PRESETS
from moe_core.manager import BackendManager
from moe_core.plan import MoEPlan
from moe_core.planner import decide, make_plan
from moe_core.testing.examples import stored_layer, telling_tokens

H100, B200 = PRESETS["h100"], PRESETS["b200"]
PREFILL = Workload(phase="prefill")
DECODE = Workload(phase="decode", max_tokens=8)


def manager() -> BackendManager:
    """The plugin beside the built-in one."""
    made = BackendManager()
    made.register("torch", torch_plugin)
    made.register("cuda_deepgemm", deepgemm)
    return made


def request(**fields: Any) -> LayerRequest:
    """A layer of ordinary sizes over eight ranks, on DeepEP."""
    sizes = {"num_experts": 64, "top_k": 8, "hidden_size": 4096, "intermediate_size": 1536, "ep_size": 8}
    return LayerRequest(**(sizes | {"a2a_backend": "deepep"} | fields))


def plan_of(machine: Any = H100, **fields: Any) -> MoEPlan:
    """The plan of `request`."""
    return make_plan(manager(), request(**fields), machine)[0]


def decision_of(machine: Any = H100, **fields: Any) -> Decision:
    """Everything that was considered for `request`."""
    return decide(manager(), request(**fields), machine)


def small(**fields: Any) -> LayerRequest:
    """A layer of the smallest sizes that both modes take, over two ranks with unequal numbers of experts."""
    sizes = {"num_experts": 5, "top_k": 2, "hidden_size": 2048, "intermediate_size": 128, "ep_size": 2}
    return LayerRequest(**(sizes | {"workloads": (DECODE, PREFILL), "a2a_backend": "deepep"} | fields))


def install() -> None:
    """Both libraries, emulated in this process."""
    emulated_deep_gemm.install()
    emulated_deep_ep.install()


def build(layer: LayerRequest, group: ExpertGroup, machine: Any = H100) -> MoELayer:
    """A loaded layer on this rank."""
    install()
    made = MoELayer(layer, environment=machine, manager=manager(), group=group)
    made.load_weights(stored_layer(layer).raw(made.local_experts, "cpu"))
    return made


def outputs_and_answers(
    group: ExpertGroup, requests: list[LayerRequest], counts: list[int], machine: Any = H100
) -> list[Any]:
    """A rank's job: per request and phase its output, the one beside an overlap, and two answers in float64.

    The second answer is that of rows which were weighted twice.
    """
    found = []
    for seed, layer in enumerate(requests):
        made = build(layer, group, machine)
        for workload in layer.workloads:
            tokens = hidden, ids, weights = telling_tokens(layer, counts[group.rank], 10 * seed + group.rank)
            output, calls = made(*tokens, phase=workload.phase), []
            overlapped = made(*tokens, phase=workload.phase, overlap=lambda calls=calls: calls.append(1))
            reference = stored_layer(layer).reference
            answers = output, overlapped, reference(*tokens), reference(hidden, ids, weights * weights)
            found.append([*(tensor.double().numpy() for tensor in answers), len(calls)])
    return found
