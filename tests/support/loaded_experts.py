"""What canonical tensors stand for, and what a rank must have: the other side of `stored_experts`."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from stored_experts import E2M1, Stored, meaning, spread

from moe_core import LayerRequest, RawWeights
from moe_core.payloads import Tensor
from moe_core.quant import FP8_BLOCK128, W4A16_INT4_G32, WHOLE, LayerQuant, QuantScheme, StoredLayer, StoredScheme
from moe_core.weights.expected import check_weights

#: Schemes of which several blocks go into a small layer.
TILES = attrs.evolve(FP8_BLOCK128, weight_block=(32, 32))
INT4_GROUPS = W4A16_INT4_G32
INT4_ZEROS = attrs.evolve(INT4_GROUPS, zero_point=True)


def make_request(scheme: QuantScheme | LayerQuant, inner: int = 96, **more: Any) -> LayerRequest:
    """A small gated layer."""
    return LayerRequest(num_experts=3, top_k=2, hidden_size=64, intermediate_size=inner, quant=scheme, **more)


def stored_layer(request: LayerRequest, storage: str) -> StoredLayer:
    """The request's schemes, both in one storage."""
    return StoredLayer(StoredScheme(request.quant.w13, storage), StoredScheme(request.quant.w2, storage))


def check(weights: RawWeights, request: LayerRequest, wanted: tuple[Tensor, Tensor]) -> None:
    """Names, shapes and dtypes of canonical tensors, and their values: exact but for the last bits of products."""
    check_weights(weights, request, len(wanted[0]))
    for name, values in zip(("w13", "w2"), wanted, strict=True):
        # float64 products of the same factors in another order.
        torch.testing.assert_close(values_of(weights.tensors, request, name), values, rtol=1e-14, atol=0)


def values_of(tensors: dict[str, Tensor], request: LayerRequest, name: str) -> Tensor:
    """Canonical tensors of one projection in float64, `[L, rows, columns]`."""
    scheme = request.local_quant.w13 if name == "w13" else request.local_quant.w2
    weight = tensors[name]
    if not scheme.is_quantized:
        return weight.double()
    if scheme.weight_dtype in ("int4", "fp4"):
        both = torch.stack([weight % 16, weight // 16], dim=-1).flatten(-2).long()
        codes = E2M1[both] if scheme.weight_dtype == "fp4" else torch.where(both > 7, both - 16, both).double()
    else:
        codes = weight.double()
    count, rows, columns = codes.shape
    scale = meaning(tensors[f"{name}_scale"])
    zero = tensors.get(f"{name}_zero_point")
    out = torch.empty_like(codes)

    def by_element(stored: Tensor) -> Tensor:
        if scheme.weight_block == (WHOLE, WHOLE):
            times, alternate = rows // len(stored), request.activation.row_order == "interleaved" and name == "w13"
            return (stored.repeat(times) if alternate else stored.repeat_interleave(times))[:, None]
        return spread(stored[:, None] if stored.dim() == 1 else stored, scheme.weight_block, rows, columns)

    for e in range(count):
        shift = 0.0 if zero is None else by_element(zero[e].double())
        out[e] = (codes[e] - shift) * by_element(scale[e])
    if scheme.global_scale:
        outer = tensors[f"{name}_global_scale"].double().reshape(count, -1)
        out = out * outer.repeat_interleave(rows // outer.shape[1], dim=1)[..., None]
    return out


def wanted_share(
    stored: Stored, request: LayerRequest, experts: tuple[int, ...], tp_rank: int
) -> tuple[Tensor, Tensor]:
    """What rank `tp_rank` must have: gate and up rows each followed by zero rows, columns of w2 by zero columns."""
    size, inner = request.local_intermediate_size, request.intermediate_size
    start = min(tp_rank * size, inner)
    stop = min(start + size, inner)
    pad = size - (stop - start)
    chosen = list(experts)
    halves = [torch.nn.functional.pad(half[chosen, start:stop], (0, 0, 0, pad)) for half in (stored.gate, stored.up)]
    return torch.cat(halves, dim=1), torch.nn.functional.pad(stored.down[chosen][:, :, start:stop], (0, pad))
