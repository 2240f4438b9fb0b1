"""Layers to be timed: random weights in any scheme, and tokens with several routings."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch

from moe_core.errors import MoeCoreError
from moe_core.kernels.number_formats import E4M3_MAX, LARGEST_CODE
from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.quant import QuantScheme
from moe_core.request import LayerRequest
from moe_core.tuning.ceilings import Ceilings, operands_of
from moe_core.tuning.timing import Call
from moe_core.weights.expected import Expected, expected_tensors

#: `(hidden_states [T, H], topk_ids [T, K], topk_weights [T, K]) -> [T, H]`: a whole layer.
LayerCall = Callable[[Tensor, Tensor, Tensor], Any]
#: Draws values into a tensor of any shape.
_Filler: TypeAlias = Callable[[Tensor, torch.Generator], object]

#: Root mean square of the drawn codes: uniform ones, and for fp8 the normal draws that are rounded.
_CODE_RMS = {"fp8": 64.0, "int8": 73.6, "int4": 4.6, "fp4": 3.0}
#: Largest activation before each product that static scales are made for.
_CALIBRATED = {"w13": 4.0, "w2": 12.0}
#: How far apart in one row of draws the values of two neighbouring experts begin. A prime: columns move too, where rows
#: alone would be the same channels in another order.
_SHIFT = 4099
#: How much larger the up half of unquantized weights is: a runner that swaps the halves shows.
_UP_FACTOR = 1.7


def random_weights(
    request: LayerRequest, device: str, seed: int = 0, told: Callable[[int, int], None] | None = None
) -> dict[str, Tensor]:
    """Canonical weights of all experts of a layer, whose values have the size of a trained layer's.

    Codes and scales are drawn as a checkpoint would hold them: no quantizer is needed. Experts differ, so do scales: a
    large one has mostly the values of others, at places that have nothing to do with each other.

    Args:
        request: The layer; a tensor-parallel one as its first rank has it.
        device: Where they lie.
        seed: Of the draw.
        told: Called with (bytes that are drawn, bytes in all) after each expert's part of a tensor; what it raises
            ends the draw.

    Raises:
        MoeCoreError: A CPU has too little memory for them: the system would end the process instead of saying so.
    """
    generator = torch.Generator(device).manual_seed(seed)
    wanted = expected_tensors(request, request.num_experts)
    size, done = _num_bytes(wanted), 0
    if device == "cpu":
        _refuse_too_large(size)
    tensors = {}
    for name, expected in wanted.items():
        tensor = torch.empty(expected.shape, dtype=expected.dtypes[0], device=device)
        experts = tensor.view(request.num_experts, -1)
        fill = _filler(name, expected, request)
        for expert, values in zip(experts, _windows(experts, fill, generator), strict=True):
            expert.copy_(values)
            done += expert.nbytes
            if told is not None:
                told(done, size)
        tensors[name] = tensor
    if not request.quant.w13.is_quantized and request.activation.gated:
        interleaved = request.activation.row_order == "interleaved"
        up = slice(1, None, 2) if interleaved else slice(request.local_intermediate_size, None)
        tensors["w13"][:, up].mul_(_UP_FACTOR)
    return tensors


def _windows(experts: Tensor, fill: _Filler, generator: torch.Generator) -> Iterator[Tensor]:
    """The values of each of `experts [L, N]`: windows onto one row of draws, of which each begins `_SHIFT` further on.

    To draw is several times slower than to copy. Up to `_SHIFT` values windows have none in common.
    """
    num_experts, length = experts.shape
    shift = min(length, _SHIFT)
    pool = torch.empty(length + (num_experts - 1) * shift, dtype=experts.dtype, device=experts.device)
    fill(pool, generator)
    return (pool[index * shift :][:length] for index in range(num_experts))


def _num_bytes(wanted: Mapping[str, Expected]) -> int:
    return sum(math.prod(expected.shape) * expected.dtypes[0].itemsize for expected in wanted.values())


def _refuse_too_large(size: int) -> None:
    free = _free_host_bytes()
    if free is not None and size > free:
        raise MoeCoreError(f"the layer's weights take {size / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free")


def _free_host_bytes() -> int | None:
    """Memory that programs may still take, as Linux says (`MemAvailable` of proc(5)); None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _filler(name: str, expected: Expected, request: LayerRequest) -> _Filler:
    """What draws values for the tensor called `name`."""
    projection, _, part = name.partition("_")
    scheme: QuantScheme = getattr(request.local_quant, "w2" if projection in ("w2", "b2") else "w13")
    fan_in = request.hidden_size if projection == "w13" else request.local_intermediate_size
    step = fan_in**-0.5 / _CODE_RMS.get(scheme.weight_dtype, 1.0)
    if projection in ("b13", "b2"):
        return lambda values, generator: values.normal_(std=0.1, generator=generator)
    if not part:
        return lambda values, generator: _draw_codes(values, scheme.weight_dtype, fan_in**-0.5, generator)
    if part == "zero_point":
        return lambda values, generator: values.random_(-2, 3, generator=generator)
    if part == "global_scale":
        return lambda values, generator: values.fill_(step)
    if part == "input_scale":
        # NVFP4 has fp8 scales below the global one.
        largest = LARGEST_CODE.get(scheme.activation_dtype, 1.0) * (E4M3_MAX if scheme.global_scale else 1.0)
        return lambda values, generator: values.fill_(_CALIBRATED[projection] / largest)
    return lambda values, generator: _draw_scales(values, 1.0 if scheme.global_scale else step, generator)


def _draw_codes(values: Tensor, weight_dtype: str, std: float, generator: torch.Generator) -> None:
    if weight_dtype in TORCH_DTYPES:
        values.normal_(std=std, generator=generator)
    elif weight_dtype == "fp8":
        # Rounded draws: some of the bytes themselves are NaN.
        drawn = torch.empty(values.shape, device=values.device).normal_(std=_CODE_RMS["fp8"], generator=generator)
        values.copy_(drawn.clamp_(-E4M3_MAX, E4M3_MAX))
    elif weight_dtype == "int8":
        values.random_(-127, 128, generator=generator)
    else:
        values.random_(0, 256, generator=generator)


def _draw_scales(values: Tensor, size: float, generator: torch.Generator) -> None:
    factor = torch.empty(values.shape, device=values.device).uniform_(0.5, 1.5, generator=generator)
    if values.dtype == torch.uint8:
        # Exponents of e8m0, biased by 127.
        values.copy_((factor * size).log2().round() + 127)
    else:
        values.copy_(factor * size)


def release_memory(device: str) -> None:
    """Give back what torch keeps of the layers before: the weights of two need not fit."""
    gc.collect()
    if device != "cpu":
        torch.accelerator.memory.empty_cache()


def bytes_per_expert(tensors: Mapping[str, Tensor]) -> float:
    """Stored bytes of one expert, scales included."""
    first = next(iter(tensors.values()))
    return sum(tensor.nbytes for tensor in tensors.values()) / first.shape[0]


@attrs.frozen(eq=False, kw_only=True)
class Batches:
    """Several inputs of one size, each with tokens and a routing of its own.

    Attributes:
        hidden_states: `[S, T, H]` in the layer's dtype.
        topk_ids: `[S, T, K]` int64, distinct in each row; uniform over the experts.
        topk_weights: `[S, T, K]` fp32; neither one nor summing to one.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    @classmethod
    def random(
        cls, request: LayerRequest, num_tokens: int, device: str, num_sets: int | None = None, seed: int = 0
    ) -> Batches:
        """Random inputs.

        Args:
            request: The layer.
            num_tokens: T.
            device: Where they lie.
            num_sets: S; default: the fewer experts one call reads, the more.
            seed: Of the draw.
        """
        sets = num_sets or (16 if num_tokens == 1 else 4 if num_tokens <= 256 else 2)
        # Of its own: a capture that fails can leave the default one unusable.
        generator = torch.Generator(device).manual_seed(seed + 1)
        hidden = torch.empty(sets, num_tokens, request.hidden_size, device=device).normal_(generator=generator)
        scores = torch.rand(sets, num_tokens, request.num_experts, device=device, generator=generator)
        return cls(
            hidden_states=hidden.to(TORCH_DTYPES[request.dtype]),
            topk_ids=scores.topk(request.top_k, dim=-1).indices,
            topk_weights=torch.rand(sets, num_tokens, request.top_k, device=device, generator=generator) + 0.1,
        )

    @property
    def num_sets(self) -> int:
        """S."""
        return self.topk_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.topk_ids.shape[1]

    @property
    def active_experts(self) -> float:
        """Experts that a call reads, on average."""
        return sum(len(ids.unique()) for ids in self.topk_ids) / self.num_sets

    def one(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of one call."""
        return self.hidden_states[index], self.topk_ids[index], self.topk_weights[index]

    def calls(self, layer: LayerCall) -> list[Call]:
        """One call of `layer` for each set."""
        return [_bound(layer, self.one(index)) for index in range(self.num_sets)]


def _bound(layer: LayerCall, arguments: tuple[Tensor, Tensor, Tensor]) -> Call:
    return lambda: layer(*arguments)


def layer_floor(request: LayerRequest, batches: Batches, expert_bytes: float, ceilings: Ceilings) -> float:
    """Microseconds that no implementation of this layer can be much below.

    The larger of reading the active experts once and multiplying every routed row.
    """
    matrices = request.activation.rows_per_channel + 1
    flops = 2 * batches.num_tokens * request.top_k * matrices * request.hidden_size * request.local_intermediate_size
    return ceilings.floor(batches.active_experts * expert_bytes, flops, operands_of(request))
