"""Run a job on real processes of one group, one per rank, with a limit on the time.

Processes are forked from a server that has imported torch once, so that a group starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from moe_core.payloads import ExpertGroup

#: A group that takes longer hangs.
TIMEOUT_SECONDS = 60.0
#: How long a rank waits for another inside a collective.
COLLECTIVE_SECONDS = 20

#: How long a rank that has answered may take to end.
_ENDING_SECONDS = 5

_PRELOADED = ["torch", "torch.distributed", "moe_core.layer"]


@attrs.frozen
class RankError:
    """What a rank raised: class and text."""

    text: str


def run_on_ranks(
    job: Callable[..., Any],
    per_rank: Sequence[tuple[Any, ...]],
    backend: str = "gloo",
    seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """`job(group, *arguments)` on every rank; its result or `RankError`, in the order of ranks.

    Ranks end with the process that started them, however that ends.

    Args:
        job: A function that child processes can import by name. It returns a tensor (which arrives on the CPU in
            float64) or anything that can be pickled and holds no tensor.
        per_rank: Arguments of each rank; their number is the size of the group.
        backend: Of torch.distributed; every other than gloo gives each rank an accelerator.
        seconds: How long a rank may take for an answer, from that of the one before.

    Raises:
        TimeoutError: A rank gave no answer in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
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
            by_rank = dict(_answer(answers, size, seconds) for _ in range(size))
            for process in processes:
                process.join(_ENDING_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [by_rank[rank] for rank in range(size)]


def _answer(answers: Any, size: int, seconds: float) -> tuple[int, Any]:
    try:
        rank, kind, value = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"not all of {size} ranks answered within {seconds:g} s") from None
    if kind == "error":
        return rank, RankError(value)
    return rank, torch.from_numpy(value) if kind == "tensor" else value


def _rank(
    rank: int,
    size: int,
    transport: tuple[str, str],
    job: Callable[..., Any],
    arguments: tuple[Any, ...],
    answers: Any,
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    try:
        if transport[0] != "gloo":
            torch.accelerator.set_device_index(rank)
        dist.init_process_group(*transport, timeout, world_size=size, rank=rank)
        group = ExpertGroup(rank=rank, size=size, process_group=dist.group.WORLD)
        value = job(group, *arguments)
        # Arrays travel through a pipe; tensors would need shared memory that outlives this process.
        is_tensor = isinstance(value, torch.Tensor)
        answers.put((rank, "tensor", value.double().cpu().numpy()) if is_tensor else (rank, "value", value))
    except Exception as error:
        answers.put((rank, "error", f"{type(error).__name__}: {error}"))
        return
    # Others may still read from this rank; whether they come in time is no part of the answer.
    with contextlib.suppress(RuntimeError, ValueError):
        dist.barrier()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
