"""Which tensors a layer's weights consist of, and one error that lists everything wrong with those given."""

from __future__ import annotations

import attrs
import torch

from moe_core.errors import WeightsError, counted
from moe_core.payloads import TORCH_DTYPES, RawWeights
from moe_core.quant import QuantScheme
from moe_core.request import LayerRequest
from moe_core.weights.element_types import SCALES, WEIGHTS


@attrs.frozen
class Expected:
    """Shape and allowed dtypes of one tensor."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    def problem(self, name: str, tensor: torch.Tensor) -> str | None:
        """What is wrong with `tensor`, or None."""
        if tuple(tensor.shape) != self.shape or tensor.dtype not in self.dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            found = str(tensor.dtype).removeprefix("torch.")
            return f"{name}: expected {list(self.shape)} {wanted}, got {list(tensor.shape)} {found}"
        return None


def expected_tensors(request: LayerRequest, num_local_experts: int) -> dict[str, Expected]:
    """Name -> shape and dtypes of every tensor that one rank's weights must have, no more and no less."""
    experts, hidden, inner = num_local_experts, request.hidden_size, request.local_intermediate_size
    rows = request.activation.rows_per_channel * inner
    expected = {
        **_projection("w13", request.local_quant.w13, experts, rows, hidden, request.activation.rows_per_channel),
        **_projection("w2", request.local_quant.w2, experts, hidden, inner, 1),
    }
    if request.bias:
        # Biases stay in float whatever the weights are; checkpoints keep them in either of these.
        floats = (TORCH_DTYPES[request.dtype], torch.float32)
        expected["b13"] = Expected((experts, rows), floats)
        expected["b2"] = Expected((experts, hidden), floats)
    return expected


def _projection(
    name: str, scheme: QuantScheme, experts: int, rows: int, columns: int, halves: int
) -> dict[str, Expected]:
    shape: tuple[int, ...] = (experts, rows, columns // 2 if scheme.weight_bits == 4 else columns)
    found = {name: Expected(shape, (WEIGHTS[scheme.weight_dtype],))}
    if scheme.weight_block is not None:
        shape = _scale_shape(scheme, experts, rows, columns, halves)
        found[f"{name}_scale"] = Expected(shape, SCALES[scheme.weight_scale])
        if scheme.zero_point:
            found[f"{name}_zero_point"] = Expected(shape, (torch.int8,))
    if scheme.global_scale:
        per_half: tuple[int, ...] = (experts, 2) if halves == 2 else (experts,)
        found[f"{name}_global_scale"] = Expected(per_half, (torch.float32,))
    if scheme.activation_scaling == "static":
        found[f"{name}_input_scale"] = Expected((experts,), (torch.float32,))
    return found


def _scale_shape(scheme: QuantScheme, experts: int, rows: int, columns: int, halves: int) -> tuple[int, ...]:
    """One axis per cut of the block; per tensor, gate and up still have a scale each."""
    if scheme.scales_whole_rows:
        return (experts, halves if scheme.is_per_tensor else rows)
    across, along = scheme.block_of(rows, columns)
    return (experts, -(-rows // across), -(-columns // along))


def _is_data(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "meta" and value.layout == torch.strided


def _what(value: object) -> str:
    """What came in place of a tensor with data."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"one without data (device {value.device}, {str(value.layout).removeprefix('torch.')})"


def _scale_problem(name: str, tensor: torch.Tensor) -> str | None:
    """A calibrated scale that is zero, negative or not finite would turn its experts into zeros or NaN."""
    if not name.endswith(("_global_scale", "_input_scale")) or not tensor.is_floating_point():
        return None
    bad = ~(tensor.isfinite() & (tensor > 0))
    experts = sorted(set(bad.nonzero()[:, 0].tolist()))
    return f"{name}: zero, negative or not finite for local experts {experts}" if experts else None


def check_weights(weights: RawWeights, request: LayerRequest, num_local_experts: int) -> None:
    """Raise `WeightsError` listing every missing, unknown, misshapen and mistyped tensor at once.

    Args:
        weights: What was loaded.
        request: The layer it is for.
        num_local_experts: Experts of this rank.
    """
    expected = expected_tensors(request, num_local_experts)
    given = weights.tensors
    strangers = [f"{name}: expected a tensor, got {_what(t)}" for name, t in given.items() if not _is_data(t)]
    if strangers:
        raise WeightsError.listing("weights are not tensors with data; nothing was loaded:", strangers)
    problems = [f"{name}: missing, expected {list(expected[name].shape)}" for name in expected if name not in given]
    problems += [f"{name}: unknown; this layer has {', '.join(expected)}" for name in given if name not in expected]
    problems += [
        problem
        for name, tensor in given.items()
        if name in expected and (problem := expected[name].problem(name, tensor)) is not None
    ]
    problems += [problem for name in given if (problem := _scale_problem(name, given[name])) is not None]
    devices = sorted({str(tensor.device) for tensor in given.values()})
    if len(devices) > 1:
        problems.append(f"tensors lie on several devices: {', '.join(devices)}")
    if (weights.activation is not None) != (request.activation.kind == "module"):
        problems.append(f"activation: a callable goes with kind 'module', the layer has {request.activation}")
    if (weights.post_norm is not None) != request.post_norm:
        problems.append(f"post_norm: the layer says {request.post_norm}, the weights bring {weights.post_norm!r}")
    if problems:
        title = (
            f"weights of a layer with {counted(num_local_experts, 'local expert')} ({request.local_quant}) do not fit"
        )
        raise WeightsError.listing(f"{title}; nothing was loaded:", problems)
