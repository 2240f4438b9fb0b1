"""Forwards of tensors that have a shape and no data, as if all of them lay on an accelerator that nobody waits for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Whoever asks for a number of its tensors, or a shape that depends on one, fails.
DEVICE = torch.device("meta")


class NothingOfTheHost(TorchDispatchMode):
    """Inside, an operation that takes or makes a tensor of the host is an error: it would be moved to the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = dict(kwargs or {})
        if function is torch.ops.aten.bmm.dtype_out:
            # torch has it without data from 2.13 on.
            out = arguments.pop("out")
            result = out.copy_(torch.ops.aten.bmm.dtype(*args, **arguments))
        else:
            result = function(*args, **arguments)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device != DEVICE for tensor in tensors):
            raise AssertionError(f"{function} has tensors on {[str(tensor.device) for tensor in tensors]}")
        return result
