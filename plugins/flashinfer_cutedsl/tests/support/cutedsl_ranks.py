"""A rank's job: a layer of masked NVFP4 experts behind DeepEP's low latency mode, both libraries emulated."""

from __future__ import annotations

import attrs
import emulated_deep_ep
import moe_plugin_deepgemm.plugin as deepep
import nvfp4_on_the_wire
from cutedsl_layers import B200, manager

from moe_core import ExpertGroup, LayerRequest, MoELayer, Workload
from moe_core.environment import Environment
from moe_core.errors import MoeCoreError
from moe_core.quant import NVFP4
from moe_core.testing.doubts import nearest_answer
from moe_core.testing.examples import stored_layer, telling_tokens
from moe_core.testing.memory import PoisonedMemory
from moe_core.testing.stored import DrawnLayer
from moe_core.testing.tolerance import tolerance

#: The smallest sizes that the library sends; ranks have unequal numbers of experts.
SIZES = {"num_experts": 5, "top_k": 2, "hidden_size": 2048, "intermediate_size": 128}


def machine(sends_nvfp4: bool) -> Environment:
    """A Blackwell GPU with one of the two distributions of `deep_ep`."""
    version = {"deep_ep": "0.1.2" if sends_nvfp4 else "1.2.1"}
    return attrs.evolve(B200, packages=dict(B200.packages) | version)


def request() -> LayerRequest:
    """Two ranks that decode."""
    return LayerRequest(
        **SIZES,
        ep_size=2,
        quant=NVFP4,
        workloads=Workload(phase="decode", max_tokens=8),
        a2a_backend="deepep",
        runner_backend="flashinfer_cutedsl",
    )


def stored(sends_nvfp4: bool) -> DrawnLayer:
    """The weights of all experts; they do not depend on who computes."""
    return stored_layer(request(), one_input_scale=sends_nvfp4)


def output_and_answers(group: ExpertGroup, counts: list[int], sends_nvfp4: bool) -> tuple[str, list[object]]:
    """What runs, the output of this rank's tokens, its answer in float64, and that of rows that were weighted twice."""
    (nvfp4_on_the_wire if sends_nvfp4 else emulated_deep_ep).install()
    plugins = manager()
    plugins.register("cuda_deepgemm", deepep)
    layer = MoELayer(request(), environment=machine(sends_nvfp4), manager=plugins, group=group)
    layer.load_weights(stored(sends_nvfp4).raw(layer.local_experts, "cpu"))
    tokens = hidden, ids, weights = telling_tokens(request(), counts[group.rank], seed=group.rank)
    with PoisonedMemory():  # type: ignore[no-untyped-call]
        output = layer(*tokens, phase="decode")
    reference = stored(sends_nvfp4).reference
    answer = nearest_answer(reference, tokens, output, tolerance(request()))
    answers = answer, reference(hidden, ids, weights * weights)
    return str(layer.plan), [each.double().numpy() for each in (output, *answers)]


def refusal(group: ExpertGroup, apart: bool) -> str:
    """What a layer says whose ranks were calibrated `apart`, or whose `deep_ep` cannot do what its version says."""
    (nvfp4_on_the_wire if apart else emulated_deep_ep).install()
    plugins = manager()
    plugins.register("cuda_deepgemm", deepep)
    layer = MoELayer(request(), environment=machine(sends_nvfp4=True), manager=plugins, group=group)
    raw = stored(sends_nvfp4=True).raw(layer.local_experts, "cpu")
    raw.tensors["w13_input_scale"] *= 1 + apart * group.rank
    try:
        layer.load_weights(raw)
    except MoeCoreError as error:
        return f"{type(error).__name__}: {error}"
    return "none"
