"""Run a job on real processes of one group, one per rank, with a limit on the time."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from moe_core import ExpertGroup

#: A group that takes longer hangs.
TIMEOUT_SECONDS = 60.0
#: How long a rank waits for another inside a collective.
COLLECTIVE_SECONDS = 20


@attrs.frozen
class RankError:
    """What a rank raised: class and text."""

    text: str


def run_on_ranks(
    job: Callable[..., torch.Tensor], per_rank: Sequence[tuple[Any, ...]], backend: str = "gloo"
) -> list[torch.Tensor | RankError]:
    """`job(group, *arguments)` on every rank; its result or error, in the order of ranks.

    Args:
        job: A function that child processes can import by name.
        per_rank: Arguments of each rank; their number is the size of the group.
        backend: Of torch.distributed; `nccl` gives every rank a GPU.

    Raises:
        TimeoutError: A rank gave no answer in time.
    """
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        size = len(per_rank)
        processes = [
            context.Process(target=_rank, args=(rank, size, (backend, store), job, arguments, answers), daemon=True)
            for rank, arguments in enumerate(per_rank)
        ]
        for process in processes:
            process.start()
        try:
            by_rank = dict(_answer(answers, size) for _ in range(size))
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    return [by_rank[rank] for rank in range(size)]


def _answer(answers: Any, size: int) -> tuple[int, torch.Tensor | RankError]:
    try:
        rank, value = answers.get(timeout=TIMEOUT_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"not all of {size} ranks answered within {TIMEOUT_SECONDS:g} s") from None
    return rank, RankError(value) if isinstance(value, str) else torch.from_numpy(value)


def _rank(
    rank: int,
    size: int,
    transport: tuple[str, str],
    job: Callable[..., torch.Tensor],
    arguments: tuple[Any, ...],
    answers: Any,
) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    try:
        if transport[0] == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(*transport, timeout, world_size=size, rank=rank)
        group = ExpertGroup(rank=rank, size=size, process_group=dist.group.WORLD)
        # Arrays travel through a pipe; tensors would need shared memory that outlives this process.
        answers.put((rank, job(group, *arguments).double().cpu().numpy()))
        dist.barrier()
    except Exception as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
