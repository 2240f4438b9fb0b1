"""Whether the numbers are those of the layer, and whether each ingredient is used exactly once and the right way."""

from __future__ import annotations

import math

import attrs
import torch

from moe_core.payloads import TORCH_DTYPES
from moe_core.quant import PER_TENSOR
from moe_core.testing.bench import Bench
from moe_core.testing.compare import APART, Tokens, layer_error, layer_mismatch, require_apart
from moe_core.testing.outcome import NotRun, require
from moe_core.testing.rounding import LARGEST, unrounded
from moe_core.testing.stored import DrawnLayer

#: Size of the values beside an outlier, such that the outlier itself is finite in fp16.
_SMALL = 0.25
#: Size of values of which a gated product exceeds the largest number of fp16, and an exponential that of fp32.
_LARGE = 512.0
#: Distance of neighbouring codes near zero.
_SMALLEST_STEP = {"fp8": 2.0**-9, "int8": 1.0, "int4": 1.0, "fp4": 0.5}


def check_answer(bench: Bench) -> None:
    """The output is the float64 answer, as near as this cell's roundings allow, also with something to do meanwhile."""
    tokens = bench.tokens()
    bench.require(tokens, "random tokens")
    again, calls = bench.tokens(seed=1), []
    output = bench.run(again, overlap=lambda: calls.append(1))
    bench.require(again, "a second forward, which runs something between dispatch and combine", output)
    require(len(calls) == 1, f"what runs between dispatch and combine was called {len(calls)} times")


def check_gate_up_order(bench: Bench) -> None:
    """The gate is the first half of `w13` (even rows if interleaved), on weights where the halves differ."""
    tokens = bench.tokens()
    require_apart(bench.stored, "gate and up rows of w13 are swapped", tokens, bench.tolerance)
    bench.require(tokens, "gate and up of different size")


def check_activation_parameters(bench: Bench) -> None:
    """alpha, limit, beta and clamp are honoured, on values that they change."""
    tokens = bench.tokens()
    require_apart(bench.stored, "alpha, limit and beta are ignored", tokens, bench.tolerance)
    bench.require(tokens, str(bench.cell.activation))


def check_router_weights(bench: Bench) -> None:
    """Router weights are applied exactly once: neither left out nor squared; they are neither one nor sum to one."""
    tokens = bench.tokens()
    for name in ("router weights are not applied", "router weights are applied twice"):
        require_apart(bench.stored, name, tokens, bench.tolerance)
    bench.require(tokens, "router weights that do not sum to one")
    # Half precision weights are used as fp32, not the other way round.
    hidden, ids, weights = tokens
    coarse = (hidden, ids, weights.to(TORCH_DTYPES["bf16"]))
    bench.require(coarse, "router weights in bf16")
    # Scaling factors of routers exceed one, and nothing says that a weight is positive.
    factors = torch.tensor([-1.0, 5.0, 0.0], device=weights.device).repeat(weights.numel())[: weights.numel()]
    bench.require((hidden, ids, weights * factors.view_as(weights)), "router weights below zero, zero and above one")


def check_value_range(bench: Bench) -> None:
    """Tokens of zeros give no NaN, values beyond fp16 no infinity, and a token of NaN spoils no other.

    What fills a batch up, to the size of a graph for example, may hold anything.
    """
    hidden, ids, weights = bench.tokens()
    hidden = hidden.clone()
    hidden[0] = 0.0
    bench.require((hidden, ids, weights), "a token of zeros")
    if bench.request.dtype != "fp16":
        bench.require((hidden * _LARGE, ids, weights), f"tokens {_LARGE:.0f} times as large")
    if not _shares_a_scale(bench):
        _check_isolation(bench, bench.tokens())


def _shares_a_scale(bench: Bench) -> bool:
    """Whether one scale is found from all rows together, so that none is computed by itself."""
    schemes = (bench.request.quant.w13, bench.request.quant.w2)
    return any(s.activation_scaling == "dynamic" and s.activation_group == PER_TENSOR for s in schemes)


def _check_isolation(bench: Bench, tokens: Tokens) -> None:
    hidden, ids, weights = (tensor.clone() for tensor in tokens)
    hidden[1] = torch.nan
    others = torch.arange(len(hidden), device=hidden.device) != 1
    output = bench.run((hidden, ids, weights))[others]
    bench.require((hidden[others], ids[others], weights[others]), "beside a token of NaN", output)


def check_features(bench: Bench) -> None:
    """A declared bias, norm or input weighting is computed, on a layer where leaving it out shows."""
    names = {
        "bias": "biases are ignored",
        "weight_on_input": "router weight is applied to the",
        "post_norm": "norm after each expert is left out",
    }
    tokens = bench.tokens()
    require_apart(bench.stored, names[bench.cell.feature], tokens, bench.tolerance)
    bench.require(tokens, f"a layer with {bench.cell.feature}")


def check_activation_rounding(bench: Bench) -> None:
    """Activations are rounded as the scheme says: beside an outlier in their group, small ones become coarse.

    The weights of the outliers' channels are zero, or their contribution would hide the rest.
    """
    scheme = bench.request.local_quant.w13
    group = scheme.activation_group
    if group == 0 or scheme.zero_point is True:
        raise NotRun(f"{scheme}: no outlier of one channel can be made")
    hidden, ids, weights = bench.tokens()
    width = group if isinstance(group, int) and group > 0 else hidden.shape[1]
    hidden = hidden * _SMALL
    hidden[:, ::width] = _outlier(scheme.activation_dtype)
    tokens = (hidden, ids, weights)
    stored = _without_channels(bench.drawn(0, one_input_scale=True), width, packed=scheme.weight_bits == 4)
    exact = attrs.evolve(stored.reference, round1=unrounded)
    distance = layer_error(exact(*tokens), stored.reference, tokens, bench.tolerance)
    proves = f"this check proves nothing here: rounded and exact activations are {distance:.2g} apart"
    require(distance > APART * bench.tolerance, proves)
    output = bench.run(tokens, bench.bind(bench.prepare(bench.raw(stored))))
    looks_exact = layer_mismatch(output, exact, tokens, bench.tolerance) is None
    require(not looks_exact, f"activations are not rounded to {scheme.activation_dtype}, as {scheme} says they are")
    bench.require(tokens, "activations beside an outlier", output, stored)


def check_activation_scales(bench: Bench) -> None:
    """Calibrated activation scales are those of each expert, on a layer where they differ."""
    if bench.has_one_input_scale:
        raise NotRun("tokens that are rounded before it is known which expert reads them have one scale for all")
    tokens = bench.tokens()
    require_apart(bench.stored, "first expert's activation scale", tokens, bench.tolerance)
    bench.require(tokens, "activation scales that differ by expert")


def _outlier(dtype: str) -> float:
    """A value beside which those of size `_SMALL` are about a step of the format.

    No power of two: a power of two as scale may then be either of two, and all codes of the group with it.
    """
    return 0.75 * 2.0 ** math.floor(math.log2(LARGEST[dtype] / _SMALLEST_STEP[dtype] * _SMALL / 0.6))


def _without_channels(stored: DrawnLayer, width: int, packed: bool) -> DrawnLayer:
    """The layer with zero weights in every `width`-th input channel of `w13`."""
    tensors, values = dict(stored.tensors), stored.reference.w13.clone()
    codes = tensors["w13"].clone().view(torch.uint8)
    if packed:
        codes[:, :, :: width // 2] &= 0xF0
    else:
        codes[:, :, ::width] = 0
    tensors["w13"] = codes.view(stored.tensors["w13"].dtype)
    values[:, :, ::width] = 0
    return attrs.evolve(stored, tensors=tensors, reference=attrs.evolve(stored.reference, w13=values))


def check_output_form(bench: Bench) -> None:
    """Output and rows have the layer's dtype; the output has the input's shape and device and is plain, new memory."""
    tokens = bench.tokens()
    output = bench.run(tokens)
    dtype = TORCH_DTYPES[bench.request.dtype]
    require(output.dtype == dtype, f"the output is {output.dtype}, the layer's dtype is {dtype}")
    require(output.shape == tokens[0].shape, f"the output has shape {list(output.shape)}, not {list(tokens[0].shape)}")
    require(output.device == tokens[0].device, f"the output lies on {output.device}, the input on {tokens[0].device}")
    inputs = {tensor.untyped_storage().data_ptr() for tensor in tokens}
    require(output.untyped_storage().data_ptr() not in inputs, "the output shares memory with an input")
    require(output.is_contiguous(), f"the output {list(output.shape)} has strides {list(output.stride())}")
    require(not output.requires_grad, "the output requires grad, so that every forward's memory would be kept")
    is_locked = output.is_inference() and not torch.is_inference_mode_enabled()
    require(not is_locked, "the output is made in inference mode, so that nobody outside may write to it")
    _check_rows(bench, tokens)


def _check_rows(bench: Bench, tokens: Tokens) -> None:
    """What the experts hand to combine, which may know of no other dtype."""
    route, request = bench.route, bench.request
    if route.dispatch is None or route.experts is None:
        return
    dispatched, _ = route.dispatch(*tokens)
    rows = route.experts(dispatched)
    allowed = [request.dtype]
    if request.dtype == "fp16" and bench.cell.format != "standard":
        # An unweighted row may exceed its largest number.
        allowed.append("fp32")
    fits = rows.dtype in [TORCH_DTYPES[word] for word in allowed]
    require(fits, f"the experts give rows in {rows.dtype} to combine, expected {' or '.join(allowed)}")
