"""The first collective of a layer: all ranks of a group compare their plans, with a timeout."""

from __future__ import annotations

import datetime
import hashlib
import json

import torch
import torch.distributed as dist

from moe_core.errors import PlanMismatchError
from moe_core.payloads import ExpertGroup
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


def _gather_digests(
    canonical: dict[str, str], group: ExpertGroup, size: int, device: torch.device, timeout: datetime.timedelta
) -> list[torch.Tensor]:
    digest = hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(own) for _ in range(size)]
    try:
        work = dist.all_gather(gathered, own, group=group.process_group, async_op=True)
        if work is not None:
            work.wait(timeout)
    except RuntimeError as error:
        raise PlanMismatchError(
            f"rank {group.rank} of {size}: not every rank sent its plan within {timeout.total_seconds():g} s ({error})"
        ) from error
    return gathered


def _first_difference(plans: list[dict[str, str]]) -> str:
    for field in sorted(set().union(*plans)):
        values = [plan.get(field, "absent") for plan in plans]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            return f"ranks made different plans; field {field!r}: {listed}; {_ADVICE}"
    return f"ranks made different plans; {_ADVICE}"
