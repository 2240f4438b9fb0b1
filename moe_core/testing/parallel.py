"""Run the cases of a kit in several processes, each with one thread: the layers are too small for more."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Generator, Mapping
from concurrent.futures import ProcessPoolExecutor

import torch

from moe_core.environment import Environment
from moe_core.testing.kit import Kit
from moe_core.testing.memory import restore_variables
from moe_core.testing.outcome import Case, Result

#: Cases that a process takes at a time: few, as results come when all of them are done.
_CHUNK = 8


def run_cases(kit: Kit, jobs: int = 1) -> Generator[Result, None, None]:
    """The results of all cases, in their order, as they come; closed early, it leaves no processes behind.

    Args:
        kit: What to run. One process runs everything on an accelerator, and for a plugin without an import name.
        jobs: Processes.
    """
    backend = kit.backend
    if jobs < 2 or backend.device != "cpu" or not backend.is_importable:
        yield from (case.run() for case in kit.cases())
        return
    module, companions = backend.names
    context, before = multiprocessing.get_context("forkserver"), multiprocessing.active_children()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (module, companions, backend.environment, backend.device, backend.variables, kit.quick, folder)
        with ProcessPoolExecutor(jobs, context, _begin, arguments) as pool:
            # Not by its `map`, which cancels what is left, so that the pool cannot tell it of processes that are gone.
            total = len(kit.cases())
            chunks = [pool.submit(_run, first, min(first + _CHUNK, total)) for first in range(0, total, _CHUNK)]
            try:
                for chunk in chunks:
                    yield from chunk.result()
            except BaseException:
                # They would go on with the cases that they have taken, for minutes.
                for process in multiprocessing.active_children():
                    if process not in before:
                        process.kill()
                raise


_cases: list[Case] = []


def _begin(
    module: str,
    companions: tuple[str, ...],
    environment: Environment,
    device: str,
    variables: Mapping[str, str],
    quick: bool,
    folder: str,
) -> None:
    """In each process: the same cases in the same order."""
    restore_variables(variables)
    # One that is killed leaves its files there.
    tempfile.tempdir = folder
    torch.set_num_threads(1)
    kit = Kit(module, environment=environment, device=device, companions=companions, quick=quick)
    _cases[:] = kit.cases()


def _run(first: int, end: int) -> list[Result]:
    return [case.run() for case in _cases[first:end]]
