"""Words for dtypes and devices, checked before anything is read."""

from __future__ import annotations

import torch

from moe_core.errors import SpecError, UnknownNameError
from moe_core.payloads import TORCH_DTYPES
from moe_core.probing import probe_environment


def float_dtype(word: str) -> torch.dtype:
    """The float dtype of that word; raises `UnknownNameError` if it is none of `TORCH_DTYPES`."""
    if word not in TORCH_DTYPES:
        raise UnknownNameError("dtype", str(word), TORCH_DTYPES)
    return TORCH_DTYPES[word]


def reachable_device(device: str | torch.device) -> torch.device:
    """The device, for example `cuda` or `cuda:1`.

    Raises:
        SpecError: There is no such type of device, this torch cannot reach one, or there are fewer of them.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SpecError(f"device {device!r} is none that torch knows: expected for example cpu or cuda") from error
    probe_environment(device_type=found.type)
    if found.index and found.type != "meta":
        count = 1 if found.type == "cpu" else torch.accelerator.device_count()
        if found.index >= count:
            raise SpecError(f"device {str(found)!r} was asked for, but torch {torch.__version__} finds {count} of them")
    return found
