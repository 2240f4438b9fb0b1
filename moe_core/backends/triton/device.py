"""What the kernels may use of a device, looked up once."""

from __future__ import annotations

import functools

import attrs
import torch

from moe_core.kernels.triton.launch import has_dependent_launches


@attrs.frozen
class Device:
    """The facts that launches depend on.

    Attributes:
        name: Of the card, as its driver says it.
        shared_bytes: Shared memory that one program may have.
        multiprocessors: How many it has.
        tma: Whether it has a bulk copy engine that reads tensors by descriptors.
        pdl: Whether a launch may start while the one before it ends (programmatic dependent launch): the kernels then
            wait for it themselves before they read anything.
        planes: Whether its matrix instructions take an operand from registers beside one in shared memory, so that
            weights can be decoded in planes (Hopper).
    """

    name: str
    shared_bytes: int
    multiprocessors: int
    tma: bool
    pdl: bool
    planes: bool


#: Under the interpreter: enough for every tile of the table.
_INTERPRETED = Device(name="", shared_bytes=227 << 10, multiprocessors=2, tma=True, pdl=False, planes=True)


@functools.cache
def device_of(device: torch.device) -> Device:
    """The facts of one device; cached, since properties do not change."""
    if device.type == "cpu":
        return _INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    tma, pdl = properties.major >= 9, has_dependent_launches(device)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    planes = properties.major == 9
    return Device(properties.name, shared_bytes, properties.multi_processor_count, tma=tma, pdl=pdl, planes=planes)
