"""Random layers with a float64 answer, and the jobs that ranks run with them."""

from __future__ import annotations

import datetime
import importlib
import time
from typing import Any

import attrs
import torch
import torch.distributed as dist
from reference_moe import moe

from moe_core import BackendManager, ExpertGroup, LayerRequest, MoELayer, RawWeights, make_plan
from moe_core.agreement import check_agreement, check_token_scale
from moe_core.backends.torch.alltoall import bind_standard
from moe_core.discovery import Found
from moe_core.kernels import checks
from moe_core.payloads import TORCH_DTYPES
from moe_core.probing import probe_environment
from moe_core.specs import TokenDtype

TORCH_PLUGIN = "moe_core.backends.torch.plugin"


def torch_manager() -> BackendManager:
    """A manager with the built-in plugin alone, whatever else is installed."""
    manager = BackendManager()
    manager.load([Found(name="torch", load=lambda: importlib.import_module(TORCH_PLUGIN), value=TORCH_PLUGIN)])
    return manager


def random_tensors(request: LayerRequest, seed: int = 0) -> dict[str, torch.Tensor]:
    """Canonical weights of all experts; gate and up differ in size, so that a swap shows."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    experts, hidden, inner = request.num_experts, request.hidden_size, request.intermediate_size
    w13 = draw(experts, request.activation.rows_per_channel * inner, hidden) / hidden**0.5
    w13[:, :inner] *= 2.0
    tensors = {"w13": w13, "w2": draw(experts, hidden, inner) / inner**0.5}
    if request.bias:
        tensors |= {"b13": draw(*w13.shape[:2]) / 4, "b2": draw(experts, hidden) / 4}
    return {name: tensor.to(TORCH_DTYPES[request.dtype]) for name, tensor in tensors.items()}


def random_tokens(
    request: LayerRequest, num_tokens: int, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, ids (some -1, some repeated) and weights that do not sum to one."""
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(num_tokens, request.hidden_size, generator=generator).to(TORCH_DTYPES[request.dtype])
    topk_ids = torch.randint(-1, request.num_experts, (num_tokens, request.top_k), generator=generator)
    topk_weights = torch.rand(num_tokens, request.top_k, generator=generator) + 0.25
    return hidden_states, topk_ids, topk_weights


def exact(
    request: LayerRequest, tensors: dict[str, torch.Tensor], tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The float64 answer of a SwiGLU layer."""
    hidden_states, topk_ids, topk_weights = tokens
    biases = {name: tensors[name].double() for name in ("b13", "b2") if name in tensors}
    return moe(
        hidden_states.double(),
        tensors["w13"].double(),
        tensors["w2"].double(),
        topk_ids,
        topk_weights.double(),
        weight_on_input=request.weight_on_input,
        **biases,
    )


def build(
    request: LayerRequest, tensors: dict[str, torch.Tensor], group: ExpertGroup | None = None, device: str = "cpu"
) -> MoELayer:
    """A loaded layer with this rank's share of the experts."""
    manager = torch_manager()
    environment = probe_environment(manager.modules_required(), device)
    layer = MoELayer(request, environment=environment, manager=manager, group=group)
    owned = list(layer.local_experts)
    layer.load_weights(RawWeights(tensors={name: tensor[owned].to(device) for name, tensor in tensors.items()}))
    return layer


def layer_output(
    group: ExpertGroup,
    request: LayerRequest,
    tensors: dict[str, torch.Tensor],
    tokens: tuple[Any, ...],
    phase: str | None = None,
) -> torch.Tensor:
    """A rank's job: build, load, run twice (buffers must not leak from one forward to the next)."""
    device = "cuda" if dist.get_backend(group.process_group) == "nccl" else "cpu"
    layer = build(request, tensors, group, device)
    tokens = tuple(tensor.to(device) for tensor in tokens)
    layer(*tokens, phase=phase)
    return layer(*tokens, phase=phase)


def layer_outputs(
    group: ExpertGroup,
    requests: list[LayerRequest],
    tensors: dict[str, torch.Tensor],
    tokens: tuple[Any, ...],
) -> torch.Tensor:
    """A rank's job: the outputs of several requests over the same weights, stacked."""
    return torch.stack([layer_output(group, request, tensors, tokens) for request in requests])


def outputs_without_assertions(
    group: ExpertGroup, requests: list[LayerRequest], tensors: dict[str, torch.Tensor], tokens: tuple[Any, ...]
) -> torch.Tensor:
    """As `layer_outputs`, as if this were a device that can raise nothing."""
    checks.ASSERTING = ()
    return layer_outputs(group, requests, tensors, tokens)


def fp8_tokens(group: ExpertGroup, request: LayerRequest, tokens: tuple[Any, ...]) -> torch.Tensor:
    """A rank's job: what it receives over an fp8 route, dequantized, with each row's local ids beside it."""
    plan, _ = make_plan(torch_manager(), request, probe_environment((), "cpu"))
    route = attrs.evolve(plan.routes[0], token_dtype=TokenDtype("fp8", "row_128"))
    dispatch, _ = bind_standard(plan, route, group)
    received, _ = dispatch(*tokens)
    if received.hidden_states.dtype != torch.float8_e4m3fn or received.scales is None:
        raise TypeError(f"expected fp8 tokens with scales, got {received.hidden_states.dtype}")
    scales = received.scales.repeat_interleave(128, dim=1)[:, : request.hidden_size]
    return torch.cat([received.hidden_states.float() * scales, received.topk_ids.float()], dim=1)


def rows_told(group: ExpertGroup, request: LayerRequest, tokens: tuple[Any, ...]) -> torch.Tensor:
    """A rank's job: the rows per expert that its runner is told, and those that there are."""
    plan, _ = make_plan(torch_manager(), request, probe_environment((), "cpu"))
    dispatch, _ = bind_standard(plan, plan.routes[0], group)
    received, _ = dispatch(*tokens)
    rows = (received.topk_ids >= 0).sum() / len(request.local_slots(group.rank))
    return torch.tensor([received.expected_m, float(rows)])


def scales_compared(group: ExpertGroup, scale: float) -> torch.Tensor:
    """A rank's job: compare scales of tokens."""
    check_token_scale(torch.tensor(scale), group)
    return torch.zeros(1)


def scale_of_one(group: ExpertGroup) -> torch.Tensor:
    """A rank's job: compare scales of tokens, or give up the group."""
    if group.rank == 0:
        check_token_scale(torch.tensor(2.0), group)
    else:
        torch.distributed.destroy_process_group()
    return torch.zeros(1)


def agree_or_time_out(group: ExpertGroup, request: LayerRequest, takes_part: bool) -> torch.Tensor:
    """A rank's job: compare plans, or stay away until the other has given up."""
    plan, _ = make_plan(torch_manager(), request, probe_environment((), "cpu"))
    if takes_part:
        check_agreement(plan, group, torch.device("cpu"), datetime.timedelta(seconds=2))
    else:
        time.sleep(6)
    return torch.zeros(1)
