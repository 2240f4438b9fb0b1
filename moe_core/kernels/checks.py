"""What a forward call checks about its tensors: everything on CPU, what needs no host sync elsewhere."""

from __future__ import annotations

import torch

from moe_core.errors import InputError
from moe_core.payloads import Tensor

_ID_DTYPES = (torch.int32, torch.int64)


def check_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Every id is -1 (no expert) or in `0..num_experts - 1`; any other negative id is an error, not padding.

    A second spelling of "no expert" would hide a broken id map, so only -1 is taken. On accelerators and under
    compilation the range is a device-side assertion: it stops the stream and never waits for it, where the device type
    has one. Where it has none (`npu`), torch computes the assertion on the CPU and waits in every call: a dispatcher
    for such devices looks by itself, for example by making the output of a token with a wrong id NaN.

    Raises:
        InputError: `topk_ids` is not int32 or int64, or (on CPU) names an id out of range.
    """
    check_id_dtype(topk_ids)
    if torch.compiler.is_compiling() or topk_ids.device.type != "cpu":
        in_range = ((topk_ids >= -1) & (topk_ids < num_experts)).all()
        torch._assert_async(in_range, f"topk_ids: an expert id is outside -1..{num_experts - 1}")
        return
    if topk_ids.numel() == 0:
        return
    low, high = topk_ids.aminmax()
    smallest, largest = int(low), int(high)
    if smallest < -1 or largest >= num_experts:
        bad = largest if largest >= num_experts else smallest
        raise InputError(
            f"topk_ids: expert id {bad} is out of range; num_experts is {num_experts}, "
            f"so ids are 0..{num_experts - 1}, or -1 for a slot without expert"
        )


def check_id_dtype(topk_ids: Tensor) -> None:
    """Raise `InputError` unless the ids are int32 or int64."""
    if topk_ids.dtype not in _ID_DTYPES:
        raise InputError(f"topk_ids: expected int32 or int64, got {topk_ids.dtype}")


def checked_ids(topk_ids: Tensor, num_slots: int, table: Tensor | None = None) -> Tensor:
    """As `ops.checked_ids`, in torch."""
    check_ids(topk_ids, num_slots)
    return renumbered(topk_ids.long().contiguous(), table)


def renumbered(ids: Tensor, table: Tensor | None) -> Tensor:
    """What `table` (`[num_slots]` int64, None for nothing new) says of each id in range, -1 as it is."""
    return ids if table is None else torch.where(ids < 0, -1, table[ids.clamp(min=0)])


def check_tokens(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, hidden_size: int, top_k: int, dtype: torch.dtype
) -> None:
    """Shapes, dtype and device of one forward's tensors; reads no data.

    Raises:
        InputError: Names the tensor, what was expected and what came.
    """
    ids_shape = topk_ids.shape
    # One comparison of everything keeps the usual case near a microsecond; the message is made only on failure.
    if (
        hidden_states.shape == (ids_shape[0] if ids_shape else -1, hidden_size)
        and ids_shape[1:] == (top_k,)
        and topk_weights.shape == ids_shape
        and hidden_states.dtype is dtype
        and topk_weights.is_floating_point()
        and hidden_states.device == topk_ids.device == topk_weights.device
    ):
        return
    raise InputError(_token_fault(hidden_states, topk_ids, topk_weights, hidden_size, top_k, dtype))


def _token_fault(x: Tensor, ids: Tensor, weights: Tensor, hidden_size: int, top_k: int, dtype: torch.dtype) -> str:
    if x.dim() != 2 or x.shape[1] != hidden_size:
        return f"hidden_states: expected shape [T, {hidden_size}], got {list(x.shape)}"
    if x.dtype != dtype:
        return f"hidden_states: expected {dtype}, got {x.dtype}; cast the input or build the layer for that dtype"
    for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
        if tensor.shape != (x.shape[0], top_k):
            return f"{name}: expected shape [{x.shape[0]}, {top_k}], got {list(tensor.shape)}"
        if tensor.device != x.device:
            return f"{name}: expected device {x.device} of hidden_states, got {tensor.device}"
    return f"topk_weights: expected a floating dtype, got {weights.dtype}"
