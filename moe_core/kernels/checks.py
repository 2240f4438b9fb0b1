"""What a forward call checks about its tensors: everything on CPU, what needs no host sync elsewhere."""

from __future__ import annotations

import torch

from moe_core.errors import InputError
from moe_core.payloads import Tensor

_ID_DTYPES = (torch.int32, torch.int64)
#: Where a check can be an error: on the host, or an assertion that a device makes without being waited for. For others
#: torch may compute the assertion on the CPU, a wait in every forward which no graph can capture, or not at all.
ASSERTING = ("cpu", "cuda")


def can_assert(tensor: Tensor) -> bool:
    """Whether a wrong value on this tensor's device can be an error; elsewhere it becomes NaN in what depends on it."""
    return tensor.device.type in ASSERTING


def checked_slots(topk_ids: Tensor, topk_weights: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """The ids and weights with which a dispatcher goes on: every id is in range or -1.

    Where nothing can be asserted an id out of range becomes -1, and all weights of its token NaN; if the token has no
    other it goes to the first slot, since only a row can bring a NaN back.

    Args:
        topk_ids: `[T, K]` int32 or int64.
        topk_weights: `[T, K]` any float dtype.
        num_slots: Slots over all ranks.

    Raises:
        InputError: As `check_ids`.
    """
    if can_assert(topk_ids):
        check_ids(topk_ids, num_slots)
        return topk_ids, topk_weights
    check_id_dtype(topk_ids)
    is_wrong = (topk_ids < -1) | (topk_ids >= num_slots)
    has_wrong, ids = is_wrong.any(1, keepdim=True), torch.where(is_wrong, -1, topk_ids)
    is_lost = has_wrong & (ids < 0).all(1, keepdim=True)
    ids = torch.cat([torch.where(is_lost, 0, ids[:, :1]), ids[:, 1:]], dim=1)
    return ids, torch.where(has_wrong, torch.nan, topk_weights)


def named_once(topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of which no token repeats one: a repetition becomes -1, and all weights of its token NaN.

    For blocks with a row per token, on devices where an overflow cannot be asserted.

    Args:
        topk_ids: `[T, K]` int32 or int64.
        topk_weights: `[T, K]` of any float dtype.
    """
    is_same = (topk_ids[:, :, None] == topk_ids[:, None, :]) & (topk_ids >= 0)[:, :, None]
    is_repeated = is_same.tril(-1).any(2)
    weights = torch.where(is_repeated.any(1, keepdim=True), torch.nan, topk_weights)
    return torch.where(is_repeated, -1, topk_ids), weights


def check_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Every id is -1 (no expert) or in `0..num_experts - 1`; any other negative id is an error, not padding.

    A second spelling of "no expert" would hide a broken id map, so only -1 is taken. On a GPU and under compilation the
    range is a device-side assertion: it stops the stream and never waits for it. For devices that have none see
    `checked_slots`.

    Args:
        topk_ids: `[T, K]`.
        num_experts: Every id is below it.

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
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    hidden_size: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Shapes, dtype and device of one forward's tensors; reads no data.

    Args:
        hidden_states: To be `[T, hidden_size]` in `dtype`.
        topk_ids: To be `[T, top_k]`; its dtype is looked at where its values are.
        topk_weights: To be `[T, top_k]` of any float dtype.
        hidden_size: H.
        top_k: K.
        dtype: The layer's.
        device: Of the layer's weights, and to be that of all three.

    Raises:
        InputError: Names the tensor, what was expected and what came.
    """
    shape = topk_ids.shape
    # One comparison of everything keeps the usual case near a microsecond; the message is made only on failure.
    if (
        len(shape) == 2
        and shape[1] == top_k
        and topk_weights.shape == shape
        and hidden_states.shape == (shape[0], hidden_size)
        and hidden_states.dtype is dtype
        and topk_weights.is_floating_point()
        and hidden_states.device == topk_ids.device == topk_weights.device == device
    ):
        return
    expected = hidden_size, top_k, dtype, device
    raise InputError(_token_fault(hidden_states, topk_ids, topk_weights, *expected))


def _token_fault(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    hidden_size: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    if x.dim() != 2 or x.shape[1] != hidden_size:
        return f"hidden_states: expected shape [T, {hidden_size}], got {list(x.shape)}"
    if x.dtype != dtype:
        return f"hidden_states: expected {dtype}, got {x.dtype}; cast the input or build the layer for that dtype"
    if x.device != device:
        return f"hidden_states: expected device {device} of the weights, got {x.device}"
    for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
        if tensor.shape != (x.shape[0], top_k):
            return f"{name}: expected shape [{x.shape[0]}, {top_k}], got {list(tensor.shape)}"
        if tensor.device != x.device:
            return f"{name}: expected device {x.device} of hidden_states, got {tensor.device}"
    return f"topk_weights: expected a floating dtype, got {weights.dtype}"
