"""From canonical weights to what the grouped GEMMs read, one expert after the other.

Every expert is brought into tiles by itself and copied into its place: tiles stay within the last two axes, so an
expert is one piece of memory. A matrix exists three times meanwhile: as it is laid out, in tiles, and in its place. The
order of the steps is such that this needs, beside the source and the finished tensors, no more than the memory of one
expert; a reload, whose places are all there from the beginning, needs four thirds where its source stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs
import torch

from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights, Tensor, bias_name
from moe_core.plan import MoEPlan
from moe_plugin_ascend.layouts import int4_columns, scale_bias, scale_bits, transposed
from moe_plugin_ascend.operators import empty_nz, require_operators, to_nz
from moe_plugin_ascend.steps import Steps


@attrs.frozen(eq=False)
class Made:
    """What one expert's projection becomes.

    Nothing of it is raw memory any more.

    Attributes:
        weight: The matrix, in rows and columns as they lie in memory.
        others: Suffix of the name -> tensor without an axis for experts.
    """

    weight: Tensor
    others: dict[str, Tensor]


#: (name of a projection, one expert's raw tensors) -> what it becomes.
Maker: TypeAlias = Callable[[str, dict[str, Tensor]], Made]


def prepare(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """The weights of a layer in the layout of its runner; with `out`, refilled in place."""
    layout = plan.routes[0].runner.spec.weight_layout
    steps = Steps.of(plan.request)
    makers = {"w13": _maker(steps.first, steps.keeps_sums), "w2": _maker(steps.second, keeps_sums=False)}
    count = weights.tensors["w13"].shape[0]
    return lay_out(weights, out, layout, makers, count=count, is_tiled=layout.endswith("_nz"))


def lay_out(
    weights: RawWeights,
    out: PreparedWeights | None,
    layout: str,
    makers: Mapping[str, Maker],
    *,
    count: int,
    is_tiled: bool,
) -> PreparedWeights:
    """Bring every expert of `weights` into its place.

    Args:
        weights: The source.
        out: What to refill, or None.
        layout: The tag of what is made.
        makers: Name of a projection -> what makes it of one expert's raw tensors.
        count: Experts to have memory for, at least those of `weights`.
        is_tiled: Whether matrices lie in tiles.
    """
    require_operators()
    places = Places(
        count=count,
        is_tiled=is_tiled,
        tensors={} if out is None else {name: tensor.data for name, tensor in out.tensors.items()},
    )
    if weights.release is None:
        _place(weights, makers, places)
    else:
        _place_and_release(weights, weights.release, makers, places)
    if out is None:
        tensors = {name: PreparedTensor(data=tensor) for name, tensor in places.tensors.items()}
        out = PreparedWeights(layout=layout, tensors=tensors)
    out.activation, out.post_norm = weights.activation, weights.post_norm
    return out


def _experts(weights: RawWeights) -> range:
    return range(weights.tensors["w13"].shape[0])


def _raw(weights: RawWeights, expert: int) -> dict[str, Tensor]:
    return {name: tensor[expert] for name, tensor in weights.tensors.items()}


def _place(weights: RawWeights, makers: Mapping[str, Maker], places: Places) -> None:
    """One projection after the other: while the larger one is made, the other has no memory yet."""
    for name, make in makers.items():
        for expert in _experts(weights):
            places.put(expert, name, make(name, _raw(weights, expert)))


def _place_and_release(
    weights: RawWeights, release: Callable[[int], None], makers: Mapping[str, Maker], places: Places
) -> None:
    """One expert after the other: its raw memory is given back before tiles are made, which need as much again."""
    for expert in _experts(weights):
        made = {name: make(name, _raw(weights, expert)) for name, make in makers.items()}
        release(expert)
        for name in makers:
            places.put(expert, name, made.pop(name))


@attrs.define(eq=False)
class Places:
    """The finished tensors, made when the first expert shows their shapes.

    Attributes:
        count: Local experts.
        is_tiled: Whether matrices lie in tiles.
        tensors: Name -> tensor with the expert as first axis.
    """

    count: int
    is_tiled: bool
    tensors: dict[str, Tensor]

    def put(self, expert: int, name: str, made: Made) -> None:
        """Copy what was made of one expert's projection into its place."""
        matrix = to_nz(made.weight) if self.is_tiled else made.weight
        for key, part in {name: matrix, **{name + suffix: other for suffix, other in made.others.items()}}.items():
            if key not in self.tensors:
                shape, in_tiles = (self.count, *part.shape), self.is_tiled and key == name
                self.tensors[key] = empty_nz(shape, part.dtype, part.device) if in_tiles else part.new_empty(shape)
            self.tensors[key][expert].copy_(part)


def _maker(kernel: str, keeps_sums: bool) -> Maker:
    if kernel == "w8a8":
        return _int8_sums if keeps_sums else _int8
    return {"bf16": _bf16, "w4a8": _int4_split, "w4a4": _int4}[kernel]


def _bf16(name: str, raw: dict[str, Tensor]) -> Made:
    """`[N, K]` as it is: the call reads the transposed view. A bias is added in fp32."""
    bias = raw.get(bias_name(name))
    return Made(
        raw[name].clone(memory_format=torch.contiguous_format),
        {} if bias is None else {"_bias": bias.to(torch.float32, copy=True)},
    )


def _int8(name: str, raw: dict[str, Tensor]) -> Made:
    """`[K, N]`, scales rounded to bf16: what the GEMM takes for a bf16 result."""
    return Made(transposed(raw[name]), {"_scale": raw[f"{name}_scale"].to(torch.bfloat16)})


def _int8_sums(name: str, raw: dict[str, Tensor]) -> Made:
    """`[K, N]`, scales in fp32 for the operator that takes the GEMM's int32 sums."""
    return Made(transposed(raw[name]), {"_scale": raw[f"{name}_scale"].to(torch.float32, copy=True)})


def _int4(name: str, raw: dict[str, Tensor]) -> Made:
    """Bytes `[K, N / 2]`, bits of scales `[N]`."""
    return Made(int4_columns(raw[name]), {"_scale": scale_bits(raw[f"{name}_scale"])})


def _int4_split(name: str, raw: dict[str, Tensor]) -> Made:
    """Bytes `[K, N / 2]`, bits of scales `[1, N]`, and what the operator adds for the nibbles it shifted."""
    scale = raw[f"{name}_scale"]
    bias = scale_bias(raw[name], scale)
    return Made(int4_columns(raw[name]), {"_scale": scale_bits(scale)[None], "_bias": bias})
