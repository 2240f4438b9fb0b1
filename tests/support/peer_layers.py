"""Layers whose ranks write into each other's memory, and the jobs that ranks run with them."""

from __future__ import annotations

import gc
import os
import tempfile
from typing import Any

import attrs
import torch
import torch.distributed as dist
from triton_layers import both_manager

from moe_core import ExpertGroup, LayerRequest, MoELayer, RawWeights
from moe_core.backends.triton.peer_memory import BUFFERS
from moe_core.environment import load_environment
from moe_core.errors import PluginError
from moe_core.kernels.triton.peer import buffer, layout, memory


def peer_layer(request: LayerRequest, tensors: dict[str, torch.Tensor], group: ExpertGroup) -> MoELayer:
    """A loaded layer with this rank's share of the experts, planned for an H100."""
    device = "cuda" if dist.get_backend(group.process_group) == "nccl" else "cpu"
    layer = MoELayer(request, environment=load_environment("h100"), manager=both_manager(), group=group, device=device)
    owned = list(layer.local_experts)
    layer.load_weights(RawWeights(tensors={name: tensor[owned].to(device) for name, tensor in tensors.items()}))
    return layer


def _device(layer: MoELayer) -> torch.device:
    """Where its weights lie."""
    return next(iter(layer._bound.weights.tensors.values())).data.device


def poison(layer: MoELayer) -> None:
    """NaN wherever tokens and sums may come to lie, and soon the last forward that has a number of its own.

    On all ranks before any goes on.
    """
    for bound in layer._bound.routes:
        shared = bound.dispatch.__self__._shared.buffer  # type: ignore[union-attr]
        shared.own[: shared.layout.ids_at].fill_(255)
        shared.state[:4] = 2**31 - 2
    if _device(layer).type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def outputs(
    group: ExpertGroup,
    request: LayerRequest,
    tensors: dict[str, torch.Tensor],
    forwards: list[tuple[torch.Tensor, ...]],
) -> torch.Tensor:
    """A rank's job: what one layer makes of one forward's tokens after the other, behind each other."""
    layer = peer_layer(request, tensors, group)
    if request.a2a_backend == "peer_memory.standard":
        poison(layer)
    device = _device(layer)
    return torch.cat([layer(*(tensor.to(device) for tensor in tokens)) for tokens in forwards])


def outputs_in_pieces(
    group: ExpertGroup,
    request: LayerRequest,
    tensors: dict[str, torch.Tensor],
    forwards: list[tuple[torch.Tensor, ...]],
) -> torch.Tensor:
    """As `outputs`, with sums in pieces of two tokens."""
    layout._LEAST_PIECE = 2
    return outputs(group, request, tensors, forwards)


def replays_differ(
    group: ExpertGroup,
    request: LayerRequest,
    tensors: dict[str, torch.Tensor],
    forwards: list[tuple[torch.Tensor, ...]],
) -> list[int]:
    """A rank's job: the forwards whose replay of one graph has other bits than the layer, called again."""
    layer = peer_layer(request, tensors, group)
    forwards = [tuple(tensor.cuda() for tensor in tokens) for tokens in forwards]
    static = tuple(tensor.clone() for tensor in forwards[0])
    layer(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(*static)
    replayed = []
    for tokens in forwards:
        for place, tensor in zip(static, tokens, strict=True):
            place.copy_(tensor)
        graph.replay()
        replayed.append(output.clone())
    return [at for at, tokens in enumerate(forwards) if not torch.equal(layer(*tokens), replayed[at])]


def overlapped(
    group: ExpertGroup, request: LayerRequest, tensors: dict[str, torch.Tensor], tokens: tuple[Any, ...]
) -> bool:
    """A rank's job: whether something that runs meanwhile changes a bit."""
    layer = peer_layer(request, tensors, group)
    done: list[int] = []
    output = layer(*tokens, overlap=lambda: done.append(1))
    return done == [1] and torch.equal(output, layer(*tokens))


def left_midway(
    group: ExpertGroup, request: LayerRequest, tensors: dict[str, torch.Tensor], tokens: tuple[Any, ...]
) -> tuple[list[str], list[float]]:
    """A rank's job: what forwards say after one that raised meanwhile, and how far new layers are from before."""

    def fail() -> None:
        raise ValueError("no memory for you")

    layers = [peer_layer(request, tensors, group) for _ in range(2)]
    tokens = tuple(tensor.to(_device(layers[0])) for tensor in tokens)
    before, said = layers[0](*tokens), []
    for layer, overlap in ((layers[0], fail), (layers[0], None), (layers[1], None)):
        try:
            layer(*tokens, overlap=overlap)
        except (ValueError, PluginError) as error:
            said.append(str(error))
    del layer
    layers.clear()
    gc.collect()
    BUFFERS.free_unused(group.require_process_group("the test"))
    layers.append(peer_layer(request, tensors, group))
    # A capture that failed has marked the buffer and sent nothing.
    layers[0]._bound.routes[0].dispatch.__self__._shared.buffer.is_open = True
    return said, [float((layers[0](*tokens) - before).abs().max()) for _ in range(2)]


def two_layers(
    group: ExpertGroup,
    requests: list[LayerRequest],
    tensors: dict[str, torch.Tensor],
    tokens: list[tuple[Any, ...]],
) -> torch.Tensor:
    """A rank's job: layers in turns, each with its own tokens."""
    layers = [peer_layer(request, tensors, group) for request in requests]
    return torch.cat([layer(*own) for _ in range(2) for layer, own in zip(layers, tokens, strict=True)])


def with_fault(
    group: ExpertGroup, request: LayerRequest, tensors: dict[str, torch.Tensor], fault: str
) -> tuple[str, list[str]]:
    """A rank's job: what a layer says where rank 1 has a fault, and the files that are left."""
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        if group.rank == 1:
            _break(fault)
        try:
            peer_layer(request, tensors, group)
        except PluginError as error:
            return str(error), os.listdir(folder)
    return "", []


def _break(fault: str) -> None:
    def refuse(text: str) -> Any:
        raise OSError(text)

    def fail(text: str) -> Any:
        raise RuntimeError(text)

    if fault == "no compiler":
        buffer.kernels = attrs.make_class("NoKernels", {"try_out": attrs.field(factory=_NotCompiled)})()
    elif fault == "no room":
        buffer.PeerBuffer = lambda **fields: fail("no room for you")
    elif fault == "no library":
        buffer.shared_memory = lambda num_bytes, device: fail("no library for you")
    elif fault == "no memory":
        buffer.shared_memory = lambda num_bytes, device: refuse("no memory for you")
    elif fault == "no way":
        memory._File.open = lambda self, handle: refuse("no way to you")
    else:
        buffer.kernels = attrs.make_class("NoKernels", {"try_out": attrs.field(factory=_Nothing)})()


class _NotCompiled:
    """A kernel that the compiler refuses."""

    def __getitem__(self, grid: object) -> Any:
        def compile_it(*arguments: object, **constants: object) -> None:
            raise RuntimeError("no compiler for you\nand much more")

        return compile_it


class _Nothing:
    """A kernel that writes nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments, **constants: None


def freed(group: ExpertGroup, requests: list[LayerRequest], tensors: dict[str, torch.Tensor]) -> tuple[int, int]:
    """A rank's job: how many buffers are freed while layers live, and afterwards."""
    process_group = group.require_process_group("the test")
    layers = [peer_layer(request, tensors, group) for request in requests]
    before = BUFFERS.free_unused(process_group)
    layers.clear()
    gc.collect()
    return before, BUFFERS.free_unused(process_group)
