"""Weights and tokens that plugins' own tests draw."""

from __future__ import annotations

import doctest

import attrs
import pytest
import torch

from moe_core import ExpertPlacement, LayerRequest, Workload
from moe_core.quant import W8A8_INT8
from moe_core.testing import examples
from moe_core.testing.examples import stored_layer, telling_tokens

LAYER = LayerRequest(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32)


def test_the_example_is_true() -> None:
    assert doctest.testmod(examples).attempted == 7
    assert not doctest.testmod(examples).failed


def test_weights_do_not_depend_on_who_computes() -> None:
    elsewhere = attrs.evolve(
        LAYER, ep_size=2, placement=ExpertPlacement("round_robin"), workloads=Workload(max_tokens=3), prefer=("acme",)
    )
    assert stored_layer(elsewhere) is stored_layer(LAYER)
    for other in (attrs.evolve(LAYER, bias=True), attrs.evolve(LAYER, quant=W8A8_INT8)):
        assert stored_layer(other).tensors.keys() != stored_layer(LAYER).tensors.keys()
    assert not torch.equal(stored_layer(LAYER, 1).tensors["w13"], stored_layer(LAYER).tensors["w13"])


@pytest.mark.parametrize("count", [0, 1, 7])
def test_tokens_are_such_that_faults_show(count: int) -> None:
    hidden, ids, weights = telling_tokens(LAYER, count, seed=3)
    assert hidden.dtype == torch.bfloat16
    assert hidden.shape == (count, 64)
    assert ids.shape == weights.shape == (count, 2)
    assert not (ids == 1).any()
    assert ((weights >= 0.1) & (weights < 0.6)).all()
    if count > 2:
        assert ids[:2].tolist() == [[-1, ids[0, 1].item()], [-1, -1]]
        assert hidden.isnan().all(1).nonzero().tolist() == [[1]]
    # One expert cannot be without a token.
    alone = attrs.evolve(LAYER, num_experts=1, top_k=1)
    assert telling_tokens(alone, 2, seed=0)[1].tolist() == [[0], [0]]
