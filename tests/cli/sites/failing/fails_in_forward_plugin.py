"""A plugin of the highest tier whose experts do what the variable FAILS says instead of computing."""

from __future__ import annotations

import functools
import os
import sys

from moe_core.activation import ActivationPattern
from moe_core.errors import InputError
from moe_core.hookspecs import hookimpl
from moe_core.quant import FP32
from moe_core.specs import PluginSpec, RunnerSpec, TokenDtype

RUNNER = RunnerSpec(
    name="fails",
    kernel="fused",
    format="fused",
    a2a="none",
    reads=(TokenDtype("fp32"),),
    schemes=(FP32,),
    activations=(ActivationPattern(),),
    dtypes=("fp32",),
    weight_layout="canonical",
    tier="fused",
)


@hookimpl
def declare_backends():
    return PluginSpec(name="fails", hook_api=1, runners=(RUNNER,))


@hookimpl
def process_weights_after_loading(plan, weights, out):
    from moe_core.payloads import PreparedTensor, PreparedWeights

    tensors = {name: PreparedTensor(data=tensor, owned=False) for name, tensor in weights.tensors.items()}
    return PreparedWeights(layout="canonical", tensors=tensors)


@hookimpl
def fused_experts(plan, route, weights):
    how = os.environ["FAILS"]
    if how == "hook":
        raise InputError("no such tile")

    if how == "library":
        from torch.nn.functional import bilinear

        return functools.partial(bilinear, None)

    def experts(hidden_states, topk_ids, topk_weights):
        if how == "raise":
            raise ValueError("no such tile")
        if how == "exit":
            sys.exit(3)
        if how == "memory":
            hidden_states.new_empty(1 << 50)
        if how == "own":
            raise InputError("no such tile")
        if how == "interrupt":
            raise BaseExceptionGroup("of several threads", [ValueError("no such tile"), KeyboardInterrupt()])
        return {
            "shape": hidden_states[:, 1:],
            "none": None,
            "dtype": hidden_states.double(),
            "device": hidden_states.to("meta"),
            "wrong": hidden_states,
        }[how]

    return experts
