"""Implementations of others: that they are called as they are meant to be, and who takes part."""

from __future__ import annotations

import attrs
import pytest
import torch

from moe_core.activation import GEGLU
from moe_core.bench import peers
from moe_core.bench.peers import PEERS, find_peers
from moe_core.bench.transformers_experts import gathered_bytes
from moe_core.errors import MoeCoreError, UnknownNameError
from moe_core.quant import FP8_BLOCK128
from moe_core.tuning.layers import Batches, random_weights
from moe_core.tuning.reference import Reference
from moe_core.tuning.shapes import LayerShape

SHAPE = LayerShape(6, 2, 64, 48)
ON_CPU = [peer for peer in PEERS if not peer.devices]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_tokens", [1, 19])
@pytest.mark.parametrize("peer", ON_CPU, ids=lambda peer: peer.name)
def test_peers_compute_the_layer(peer, dtype, num_tokens):
    if peer.version is None:
        pytest.skip(f"{peer.module} is not installed")
    request = SHAPE.request(dtype=dtype)
    weights = random_weights(request, "cpu")
    batches = Batches.random(request, num_tokens, "cpu", num_sets=2)
    adapted = peer.adapt(batches, dtype)
    assert adapted.topk_ids.dtype == peer.id_dtype
    layer = peer.bind(request, weights)
    for index in range(2):
        output = layer(*adapted.one(index))
        assert output.dtype == batches.hidden_states.dtype
        Reference(request, weights, batches.one(index)).check(output)


@pytest.mark.parametrize(
    "fields", [{"quant": FP8_BLOCK128}, {"activation": GEGLU}, {"bias": True}, {"weight_on_input": True}]
)
def test_peers_refuse_what_they_would_compute_otherwise(fields):
    request = LayerShape(4, 2, 128, 128).request(**fields)
    assert all("plain SwiGLU" in peer.refusal(request, "cuda") for peer in PEERS)
    assert not any(peer.refusal(SHAPE.request(), "cuda") for peer in PEERS)


def test_kernels_for_gpus_are_refused_on_a_cpu():
    refused = {peer.name for peer in PEERS if peer.refusal(SHAPE.request(), "cpu")}
    assert refused == {"liger-kernel", "moe-ops"}


def test_gathered_weights_are_those_of_every_routed_row():
    request = SHAPE.request()
    weights = random_weights(request, "cpu")
    one_expert = sum(tensor[0].nbytes for tensor in weights.values())
    assert gathered_bytes(request, 5) == 5 * 2 * one_expert


def test_all_that_are_installed_and_run_here_take_part(monkeypatch):
    installed = {"torch": "2.0", "moe_ops": "0.1"}
    monkeypatch.setattr(peers, "installed_version", installed.get)
    assert [peer.name for peer in find_peers((), "cpu")] == ["torch grouped_mm"]
    assert [peer.name for peer in find_peers((), "cuda")] == ["torch grouped_mm", "moe-ops"]
    assert [peer.name for peer in find_peers(("moe-ops", "moe-ops"), "cpu")] == ["moe-ops"]


@pytest.mark.error_path
def test_a_peer_that_is_unknown_or_missing_is_an_error(monkeypatch):
    with pytest.raises(UnknownNameError, match="did you mean 'liger-kernel'"):
        find_peers(("liger-kernl",), "cuda")
    monkeypatch.setattr(peers, "installed_version", lambda module: None)
    with pytest.raises(MoeCoreError, match="not installed here; pip install liger-kernel"):
        find_peers(("liger-kernel",), "cuda")


def test_inputs_are_adapted_outside_the_measured_call():
    peer = attrs.evolve(PEERS[0], id_dtype=torch.int32, router_dtype="")
    batches = Batches.random(SHAPE.request(), 3, "cpu", num_sets=1)
    adapted = peer.adapt(batches, "bf16")
    assert (adapted.topk_ids.dtype, adapted.topk_weights.dtype) == (torch.int32, torch.bfloat16)
    assert adapted.hidden_states is batches.hidden_states
