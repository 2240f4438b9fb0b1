"""Run one case on real processes of a gloo group, one per rank."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_core import ExpertGroup

#: A rank that takes longer hangs.
TIMEOUT_SECONDS = 60.0


def run_on_ranks(per_rank: list[dict[str, torch.Tensor]], ep: int, spec: dict[str, Any]) -> list[torch.Tensor]:
    """Outputs of every rank, in order; raises the first rank's error, after all ranks have ended."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes = [
            context.Process(target=_rank, args=(rank, ep, store, per_rank[rank], spec, results), daemon=True)
            for rank in range(ep)
        ]
        for process in processes:
            process.start()
        answers = _collect(results, ep)
        for process in processes:
            process.join(5)
            process.kill()
    errors = [answers[rank] for rank in sorted(answers) if isinstance(answers[rank], str)]
    if errors or len(answers) < ep:
        # The rank that refused first explains why the others lost their connection.
        own = [error for error in errors if "Error: " in error and "onnection" not in error]
        raise RuntimeError((own or errors or [f"only {len(answers)} of {ep} ranks answered"])[0])
    return [torch.from_numpy(answers[rank]) for rank in range(ep)]


def _collect(results: Any, ep: int) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    try:
        while len(answers) < ep:
            rank, answer = results.get(timeout=TIMEOUT_SECONDS)
            answers[rank] = answer
    except queue.Empty:
        pass
    return answers


def _rank(rank: int, ep: int, store: str, inputs: dict[str, torch.Tensor], spec: dict[str, Any], results: Any) -> None:
    from adapter import BuiltLayer

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store, timedelta(seconds=30), world_size=ep, rank=rank)
        group = ExpertGroup(rank=rank, size=ep, process_group=dist.group.WORLD)
        built = BuiltLayer({**spec, **inputs}, group, ep_size=ep)
        output = built.forward(inputs["x"], inputs["ids"], inputs["wts"])
        results.put((rank, output.double().numpy()))
        dist.barrier()
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
