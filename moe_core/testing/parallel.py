"""Run the cases of a kit in several processes, each with one thread: the layers are too small for more."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor

import torch

from moe_core.environment import Environment
from moe_core.testing.kit import Kit
from moe_core.testing.memory import restore_variables
from moe_core.testing.outcome import Case, Result

#: Cases that a process takes at a time.
_CHUNK = 32


def run_cases(kit: Kit, jobs: int = 1) -> Iterator[Result]:
    """The results of all cases, in their order, as they come.

    Args:
        kit: What to run. One process runs everything on an accelerator, and for a plugin without an import name.
        jobs: Processes.
    """
    backend = kit.backend
    if jobs < 2 or backend.device != "cpu" or not backend.is_importable:
        yield from (case.run() for case in kit.cases())
        return
    module, companions = backend.names
    arguments = (module, companions, backend.environment, backend.device, backend.variables, kit.quick)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, context, _begin, arguments) as pool:
        yield from pool.map(_run, range(len(kit.cases())), chunksize=_CHUNK)


_cases: list[Case] = []


def _begin(
    module: str,
    companions: tuple[str, ...],
    environment: Environment,
    device: str,
    variables: Mapping[str, str],
    quick: bool,
) -> None:
    """In each process: the same cases in the same order."""
    restore_variables(variables)
    torch.set_num_threads(1)
    kit = Kit(module, environment=environment, device=device, companions=companions, quick=quick)
    _cases[:] = kit.cases()


def _run(index: int) -> Result:
    return _cases[index].run()
