"""The first collectives of a layer: all ranks of a group compare what must be equal, with a timeout."""

from __future__ import annotations

import datetime
import hashlib
import json

import torch
import torch.distributed as dist

from moe_core.errors import PlanMismatchError, WeightsError
from moe_core.payloads import ExpertGroup, Tensor
from moe_core.plan import MoEPlan

#: How long a rank waits for the others' plans.
TIMEOUT = datetime.timedelta(seconds=60)
_ADVICE = "give all of them equal requests, equal measurements, and plugins of equal versions"


def check_agreement(
    plan: MoEPlan, group: ExpertGroup, device: torch.device, timeout: datetime.timedelta = TIMEOUT
) -> None:
    """Raise unless every rank of `group` made the same plan; does nothing without a process group.

    Ranks that disagree would wait for each other inside a kernel, or read each other's tokens wrongly.

    Args:
        plan: This rank's plan.
        group: Its place in the expert-parallel group.
        device: Where the group's backend takes tensors.
        timeout: How long to wait for the other ranks.

    Raises:
        PlanMismatchError: Plans differ (names the first differing field and each rank's value), the group has
            another size than the plan, or some rank did not answer in time.
    """
    if group.process_group is None:
        return
    size = dist.get_world_size(group.process_group)
    if size != plan.request.ep_size:
        raise PlanMismatchError(f"the plan is for ep_size {plan.request.ep_size}, the process group has {size} ranks")
    mine = plan.canonical()
    digests = _gather_digests(mine, group, size, device, timeout)
    if all(torch.equal(digest, digests[0]) for digest in digests):
        return
    plans: list[dict[str, str]] = [{} for _ in range(size)]
    dist.all_gather_object(plans, mine, group=group.process_group)
    raise PlanMismatchError(_first_difference(plans))


def check_token_scale(scale: Tensor, group: ExpertGroup, timeout: datetime.timedelta = TIMEOUT) -> None:
    """Raise unless every rank of `group` rounds tokens with one scale; does nothing without a process group.

    The rank that sends a token rounds it with its scale, and the one whose expert reads it scales back with its own.

    Args:
        scale: One fp32 element where the group's backend takes tensors; zero on a rank that has none.
        group: This rank's place in the expert-parallel group.
        timeout: How long to wait for the other ranks.

    Raises:
        WeightsError: Scales differ; names each rank's.
        PlanMismatchError: Some rank did not answer in time.
    """
    if group.process_group is None:
        return
    gathered = _gather(scale.reshape(1), group, group.size, "scale of tokens", timeout)
    values = [float(value) for value in gathered]
    if len(set(values)) == 1:
        return
    listed = ", ".join(f"rank {rank}: {value:.9g}" for rank, value in enumerate(values))
    remedy = (
        "calibrated input scales must be the largest over all experts of the layer, on every rank, as load_experts "
        "gives them"
    )
    if len({value for value in values if value}) == 1:
        remedy = "a rank without experts has none: use fewer ranks, or pin dispatch_dtype='bf16'"
    raise WeightsError(f"ranks would round tokens with different scales ({listed}): {remedy}")


def _gather_digests(
    canonical: dict[str, str], group: ExpertGroup, size: int, device: torch.device, timeout: datetime.timedelta
) -> list[torch.Tensor]:
    digest = hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    return _gather(own, group, size, "plan", timeout)


def _gather(own: Tensor, group: ExpertGroup, size: int, what: str, timeout: datetime.timedelta) -> list[Tensor]:
    gathered = [torch.empty_like(own) for _ in range(size)]
    try:
        work = dist.all_gather(gathered, own, group=group.process_group, async_op=True)
        if work is not None:
            work.wait(timeout)
    except RuntimeError as error:
        waited = f"{timeout.total_seconds():g} s"
        raise PlanMismatchError(
            f"rank {group.rank} of {size}: not every rank sent its {what} within {waited} ({error})"
        ) from error
    return gathered


def _first_difference(plans: list[dict[str, str]]) -> str:
    for field in sorted(set().union(*plans)):
        values = [plan.get(field, "absent") for plan in plans]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            return f"ranks made different plans; field {field!r}: {listed}; {_ADVICE}"
    return f"ranks made different plans; {_ADVICE}"
