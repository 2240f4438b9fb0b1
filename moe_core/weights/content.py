"""What the values of a stored tensor must be, whatever layer they are for; all raise `WeightsError` with the name."""

from __future__ import annotations

import torch

from moe_core.errors import WeightsError
from moe_core.payloads import Tensor
from moe_core.weights.reads import Read


def check_groups(values: Tensor, read: Read) -> None:
    """A group index `[columns]` must say that neighbours share a group."""
    wanted = torch.arange(read.shape.columns, device=values.device) // read.shape.block[1]
    if not torch.equal(values.flatten().long(), wanted):
        raise WeightsError(
            f"{read.name}: the groups follow the order of activations (act-order, desc_act): input channels of one "
            "group are not neighbours; such weights are not read. Quantize without act-order"
        )


def check_offsets(values: Tensor, read: Read) -> None:
    """Offsets that nothing reads must be zero."""
    if bool((values != 0).any()):
        raise WeightsError(f"{read.name}: offsets that are not zero are not read by any scheme")


def check_zero_points(points: Tensor, read: Read) -> None:
    """Zero points that the scheme does not have must be zero, shifted as codes are."""
    if bool((points != 0).any()):
        other = "; a storage of the other GPTQ format?" if bool((points.abs() == 1).all()) else ""
        raise WeightsError(f"{read.name}: the scheme has no zero points, these are not all zero{other}")


def check_factors(factors: Tensor, values: Tensor, read: Read, *, may_be_zero: bool) -> None:
    """Multipliers must be finite and positive: others would make their experts zeros or NaN.

    Args:
        factors: fp32, as they multiply.
        values: As stored.
        read: What they are.
        may_be_zero: Whether zero is allowed, as for the scale of a matrix of zeros.
    """
    fine = factors.isfinite() & ((factors >= 0) if may_be_zero else (factors > 0))
    if not bool(fine.all()):
        stored = ", ".join(f"{value:g}" for value in values.double().flatten().tolist())
        raise WeightsError(f"{read.name}: expert {read.expert} has {stored}; expected finite numbers above zero")
