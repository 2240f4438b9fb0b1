"""The first collectives of a layer and of a reload: all ranks of a group compare what must be equal, with a timeout."""

from __future__ import annotations

import contextlib
import datetime
import enum
import hashlib
import json
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from moe_core.errors import PlanMismatchError, WeightsError, counted
from moe_core.payloads import ExpertGroup, Tensor
from moe_core.plan import MoEPlan

#: How long a rank waits for the others.
TIMEOUT = datetime.timedelta(seconds=60)
_ADVICE = "give all of them equal requests, equal measurements, and plugins of equal versions"


class Compared(enum.Enum):
    """What ranks compare.

    Attributes:
        word: What it is called in errors.
        num_elements: Of the tensor that a rank sends; one more says whether it refuses.
        dtype: Of that tensor.
        outcome: How a layer stands that one of the ranks refuses.
    """

    PLAN = "plan", hashlib.sha256().digest_size, torch.uint8, "no rank has loaded this layer"
    TOKEN_SCALE = "scale of tokens", 1, torch.float32, "nothing was written on any rank"

    def __init__(self, word: str, num_elements: int, dtype: torch.dtype, outcome: str) -> None:
        """Name the parts of a member."""
        self.word, self.num_elements, self.dtype, self.outcome = word, num_elements, dtype, outcome


@contextlib.contextmanager
def telling_other_ranks(compared: Compared, group: ExpertGroup, device: torch.device) -> Iterator[None]:
    """Around what a rank checks before a comparison: if it raises, the other ranks raise in the comparison at once.

    Otherwise they would wait for it, and a collective that ran into its timeout leaves a group nobody can use.

    Args:
        compared: What the other ranks compare next.
        group: This rank's place in the expert-parallel group.
        device: Where the group's backend takes tensors.

    Raises whatever is raised inside; a note says if the other ranks could not be told.
    """
    try:
        yield
    except Exception as error:
        if group.process_group is not None:
            try:
                refusal = torch.ones(compared.num_elements + 1, dtype=compared.dtype, device=device)
                _exchange(refusal, compared, group, group.size, TIMEOUT)
            except Exception as failure:
                error.add_note(f"the other ranks could not be told: {failure}")
        raise


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
        WeightsError: Another rank refused its weights.
    """
    if group.process_group is None:
        return
    size = dist.get_world_size(group.process_group)
    if size != plan.request.ep_size:
        raise PlanMismatchError(
            f"the plan is for ep_size {plan.request.ep_size}, the process group has {counted(size, 'rank')}"
        )
    mine = plan.canonical()
    digests = _gather_digests(mine, group, size, device, timeout)
    if all(torch.equal(digest, digests[0]) for digest in digests):
        return
    plans: list[dict[str, str]] = [{} for _ in range(size)]
    dist.all_gather_object(plans, mine, group=group.process_group)
    raise PlanMismatchError(_first_difference(plans))


def check_token_scale(scale: Tensor, group: ExpertGroup) -> None:
    """Raise unless every rank of `group` rounds tokens with one scale; does nothing without a process group.

    The rank that sends a token rounds it with its scale, and the one whose expert reads it scales back with its own.

    Args:
        scale: One fp32 element where the group's backend takes tensors; zero on a rank that has none.
        group: This rank's place in the expert-parallel group.

    Raises:
        WeightsError: Scales differ (names each rank's), or another rank refused its weights.
        PlanMismatchError: Some rank did not answer in time.
    """
    if group.process_group is None:
        return
    gathered = _gather(scale.reshape(1), Compared.TOKEN_SCALE, group, group.size, TIMEOUT)
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
    return _gather(own, Compared.PLAN, group, size, timeout)


def _gather(
    own: Tensor, compared: Compared, group: ExpertGroup, size: int, timeout: datetime.timedelta
) -> list[Tensor]:
    """Every rank's part, unless one of them has none; the last element that travels says so."""
    gathered = _exchange(torch.cat([own, own.new_zeros(1)]), compared, group, size, timeout)
    refusing = [str(rank) for rank, part in enumerate(gathered) if part[-1]]
    if refusing:
        who = (
            f"rank{'s' * (len(refusing) > 1)} {', '.join(refusing)} refused {'its' if len(refusing) == 1 else 'their'}"
        )
        raise WeightsError(f"{who} weights: {compared.outcome}; the reason is in the error there")
    return [part[:-1] for part in gathered]


def _exchange(
    own: Tensor, compared: Compared, group: ExpertGroup, size: int, timeout: datetime.timedelta
) -> list[Tensor]:
    gathered = [torch.empty_like(own) for _ in range(size)]
    start = time.monotonic()
    try:
        work = dist.all_gather(gathered, own, group=group.process_group, async_op=True)
        if work is not None:
            work.wait(timeout)
    except RuntimeError as error:
        raise PlanMismatchError(
            f"rank {group.rank} of {size}: not every rank sent its {compared.word}, given up after "
            f"{time.monotonic() - start:.1f} s ({error}); this process group cannot be used any more: make a new one "
            "on every rank, or start the processes again"
        ) from error
    return gathered


def _first_difference(plans: list[dict[str, str]]) -> str:
    for field in sorted(set().union(*plans)):
        values = [plan.get(field, "absent") for plan in plans]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            return f"ranks made different plans; field {field!r}: {listed}; {_ADVICE}"
    return f"ranks made different plans; {_ADVICE}"
