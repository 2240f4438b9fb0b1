"""Wrong preparations: what a plugin may do to raw weights, to prepared ones, and to the memory of both."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import toy_backend as toy
from toy_backend import LAYOUT

from moe_core.payloads import PreparedTensor, PreparedWeights


def echoing(plan: Any, weights: Any, out: Any) -> Any:
    prepared = toy.prepare(weights, out)
    return PreparedWeights(layout=plan.weight_layout, tensors=prepared.tensors) if out is None else prepared


def claiming(weights: Any, out: Any) -> Any:
    if out is not None:
        return toy.prepare(weights, out)
    tensors = {name: PreparedTensor(data=tensor) for name, tensor in weights.tensors.items()}
    return PreparedWeights(layout=LAYOUT, tensors=tensors, activation=weights.activation, post_norm=weights.post_norm)


def misnaming(weights: Any, out: Any) -> Any:
    """Calls a tensor like an attribute of the layer that is to hold it."""
    prepared = toy.prepare(weights, out)
    prepared.tensors.setdefault("plan", PreparedTensor(data=torch.zeros(1), expert_axis=None))
    return prepared


def moving(weights: Any, out: Any) -> Any:
    """A reload makes a tensor anew."""
    prepared = toy.prepare(weights, out)
    if out is not None:
        out.tensors["w2"].data = out["w2"].clone()
    return prepared


def consuming(weights: Any, out: Any) -> Any:
    prepared = toy.prepare(weights, out)
    weights.tensors["w13"].zero_()
    return prepared


def forgetful(weights: Any, out: Any) -> Any:
    """A reload brings w13 alone."""
    kept = None if out is None else out["w2"].clone()
    prepared = toy.prepare(weights, out)
    if kept is not None:
        prepared["w2"].copy_(kept)
    return prepared


def unlisted(weights: Any, out: Any) -> Any:
    prepared = toy.prepare(weights, out)
    prepared.tensors["w2"].expert_axis = None
    return prepared


def hasty(weights: Any, out: Any) -> Any:
    """Gives an expert's memory back before its w2 was read."""
    if weights.release is not None:
        for expert in range(len(weights.tensors["w2"])):
            weights.release(expert)
    return toy.prepare(attrs.evolve(weights, release=None), out)


def hoarding(weights: Any, out: Any) -> Any:
    """Never gives an expert's memory back."""
    return toy.prepare(attrs.evolve(weights, release=None), out)


def flat(weights: Any, out: Any) -> Any:
    """Takes raw memory to be contiguous."""
    shapes = {name: torch.empty(tensor.shape).stride() for name, tensor in weights.tensors.items()}
    tensors = {name: tensor.as_strided(tensor.shape, shapes[name]) for name, tensor in weights.tensors.items()}
    return toy.prepare(attrs.evolve(weights, tensors=tensors), out)


def loyal(weights: Any, out: Any) -> Any:
    """Keeps the activation of the first load."""
    if out is None:
        return toy.prepare(weights, None)
    return toy.prepare(attrs.evolve(weights, activation=out.activation, post_norm=out.post_norm), out)


KEPT: list[Any] = []


def keeping(weights: Any, out: Any) -> Any:
    """Remembers what it was given."""
    KEPT.append(dict(weights.tensors))
    return toy.prepare(weights, out)
