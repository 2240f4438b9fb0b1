"""Implementations of others that can be timed beside ours, each as its users call it, found by their import names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import attrs
import torch

from moe_core.activation import SWIGLU
from moe_core.bench import grouped_mm, other_kernels, transformers_experts
from moe_core.errors import MoeCoreError, UnknownNameError
from moe_core.installed import installed_version
from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.request import LayerRequest
from moe_core.tuning.layers import Batches, LayerCall

#: `(request, canonical weights) -> layer`.
BindFn: TypeAlias = Callable[[LayerRequest, Mapping[str, Tensor]], LayerCall]


def _no_extra(request: LayerRequest, num_tokens: int) -> int:
    return 0


@attrs.frozen(kw_only=True)
class Peer:
    """One implementation of others. Float experts with plain SwiGLU, no more: what all of them compute.

    Attributes:
        name: How it is called in tables and asked for.
        module: Import name of its package.
        install: What to type to get it.
        bind: Takes weights as they are, without a copy.
        not_captured: Why its calls cannot be captured into a graph; "" where they can.
        id_dtype: Dtype in which it wants expert ids; given so from the start, as a router would.
        router_dtype: Word of the dtype in which its models bring router weights; "" for the layer's.
        extra_bytes: Memory of a forward that grows faster than its rows.
        devices: Device types that it runs on; empty for any.
        note: What to know about its figures.
    """

    name: str
    module: str
    install: str
    bind: BindFn
    not_captured: str = ""
    id_dtype: torch.dtype = torch.int64
    router_dtype: str = "fp32"
    extra_bytes: Callable[[LayerRequest, int], int] = _no_extra
    devices: tuple[str, ...] = ()
    note: str = ""

    @property
    def version(self) -> str | None:
        """Of its package: "" if unknown, None if it is not installed."""
        return installed_version(self.module)

    def refusal(self, request: LayerRequest, device: str) -> str:
        """Why it cannot compute this layer on that type of device, "" if it can."""
        if self.devices and device not in self.devices:
            return f"runs on {', '.join(self.devices)} alone"
        plain = not (request.bias or request.weight_on_input or request.post_norm)
        if request.quant.is_quantized or request.activation != SWIGLU or not plain:
            return "takes float weights and plain SwiGLU without biases"
        return ""

    def adapt(self, batches: Batches, dtype: str) -> Batches:
        """The same inputs in the dtypes that it wants, for a layer of this dtype."""
        return attrs.evolve(
            batches,
            topk_ids=batches.topk_ids.to(self.id_dtype),
            topk_weights=batches.topk_weights.to(TORCH_DTYPES[self.router_dtype or dtype]),
        )


def _transformers(name: str, **fields: Any) -> Peer:
    return Peer(
        name=f"transformers {name}",
        module="transformers",
        install="pip install transformers",
        bind=transformers_experts.binder(name),
        router_dtype="",
        **fields,
    )


_TUNED_ONCE = "tunes itself once, at the first number of tokens: here the largest"

PEERS: tuple[Peer, ...] = (
    Peer(name="torch grouped_mm", module="torch", install="pip install torch", bind=grouped_mm.bind),
    _transformers("eager", not_captured="looks up on the host which experts have rows"),
    _transformers(
        "batched_mm",
        extra_bytes=transformers_experts.gathered_bytes,
        note="copies the weights of every routed row",
    ),
    _transformers("grouped_mm"),
    Peer(
        name="liger-kernel",
        module="liger_kernel",
        install="pip install liger-kernel",
        bind=other_kernels.bind_liger,
        not_captured="reads the number of tiles back to the host",
        id_dtype=torch.int32,
        devices=("cuda",),
        note=_TUNED_ONCE,
    ),
    Peer(
        name="moe-ops",
        module="moe_ops",
        install="pip install moe-ops",
        bind=other_kernels.bind_moe_ops,
        id_dtype=torch.int32,
        devices=("cuda",),
        note=_TUNED_ONCE,
    ),
)


def find_peers(names: Iterable[str], device: str) -> tuple[Peer, ...]:
    """The peers of these names; of none: all that are installed and run on that type of device.

    Raises:
        UnknownNameError: A name is none of a peer.
        MoeCoreError: One that was named is not installed.
    """
    by_name = {peer.name: peer for peer in PEERS}
    asked = tuple(dict.fromkeys(names))
    for name in asked:
        if name not in by_name:
            raise UnknownNameError("peer", name, by_name)
        if by_name[name].version is None:
            raise MoeCoreError(f"peer {name!r} is not installed here; {by_name[name].install}")
    if asked:
        return tuple(by_name[name] for name in asked)
    return tuple(p for p in PEERS if p.version is not None and (not p.devices or device in p.devices))
