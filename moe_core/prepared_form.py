"""Whether what a preparation answers has the form of prepared weights, before anything reads it."""

from __future__ import annotations

import torch

from moe_core.payloads import PreparedTensor, PreparedWeights


def fault_of(prepared: object) -> str:
    """What is expected of a preparation's answer and what was found instead; "" if it holds tensors under names."""
    if not isinstance(prepared, PreparedWeights):
        return f"expected PreparedWeights, got {type(prepared).__name__}"
    # Whatever the annotations say.
    tensors: object = prepared.tensors
    if not isinstance(tensors, dict):
        return f"expected a dict of PreparedTensor, got {type(tensors).__name__}"
    strangers = [name for name, tensor in tensors.items() if not _is_prepared(name, tensor)]
    if strangers or not tensors:
        found = f"not under {strangers}" if strangers else "there are none"
        return f"expected PreparedTensor objects of dense tensors under plain names, {found}"
    return ""


def fault_of_load(prepared: PreparedWeights, num_experts: int, most_experts: int, devices: set[torch.device]) -> str:
    """In what the tensors of a first load are not as it says of them; "" if they are.

    Args:
        prepared: The answer, of the right form.
        num_experts: Local experts.
        most_experts: Those of the rank that has most; memory may be for as many.
        devices: Where the raw tensors lie.
    """
    for name, tensor in prepared.tensors.items():
        found = f"{name} {list(tensor.data.shape)}"
        if not _counts(tensor, (num_experts, most_experts)):
            return f"{found}: expert_axis {tensor.expert_axis!r} does not count the {num_experts} local experts"
        if tensor.expert_axis is not None and tensor.data.device not in devices:
            return f"{found} lies on {tensor.data.device}, the raw weights on {', '.join(map(str, devices))}"
    if prepared.token_scale is not None and prepared.token_scale not in prepared.tensors:
        return f"token_scale names {prepared.token_scale!r}, expected one of {', '.join(prepared.tensors)}"
    return ""


def _is_prepared(name: object, tensor: object) -> bool:
    if not isinstance(tensor, PreparedTensor) or not isinstance(tensor.data, torch.Tensor):
        return False
    return isinstance(name, str) and name.isidentifier() and tensor.data.layout is torch.strided


def _counts(tensor: PreparedTensor, experts: tuple[int, int]) -> bool:
    axis: object = tensor.expert_axis
    shape = tensor.data.shape
    return axis is None or (isinstance(axis, int) and -len(shape) <= axis < len(shape) and shape[axis] in experts)
