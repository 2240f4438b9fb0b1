"""Dispatchers on the GPUs of one host: whether layers are right, and what they take beside bare calls.

Run: python -m torch.distributed.run --nproc-per-node N benchmarks/bench_ep.py [--only checks|times]

N is 2, 4 or 8: the numbers of ranks that DeepEP's normal mode takes. Times are those of the slowest rank, of everything
beside everything else in one run. What needs no host is timed by replays of a CUDA graph of several calls, and all of
it by a clock around several calls. `ep_contenders` says which dispatchers there are. Without GPUs all but captures of
DeepEP's can be tried out on a small layer, over the emulated libraries of the plugin's tests: put
`plugins/cuda_deepgemm` and its `tests/support` into PYTHONPATH, and for the times the folder of the vendor's `deep_ep`
into MOE_PLUGIN_DEEPEP_VENDOR.
"""

from __future__ import annotations

import argparse
import gc
import os

import attrs
import torch
import torch.distributed as dist

# NVLink's multicast is not used, and not every machine allows it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import ep_checks
from ep_contenders import CONTENDERS, DEEP_EP
from ep_ranks import DECODE, ON_GPU, Bench, join
from ep_sweep import sweep_normal
from ep_times import time_everything
from moe_plugin_deepgemm.deepep_buffers import BUFFERS

from moe_core.backends.triton import peer_memory


def measure(only: str | None) -> int:
    """All of it, checks that cannot hurt others first; how many failed. Whatever holds the group goes with this call.

    Args:
        only: `checks` or `times`; None for both.
    """
    bench = Bench()
    bench.say(f"torch {torch.__version__}, {bench.group.size} ranks, {attrs.asdict(bench.environment)}")
    # As long as one low-latency buffer is there, NVSHMEM stays initialised; the last check does without.
    kept = bench.layer(bench.small(DEEP_EP, workloads=DECODE))
    if only != "times":
        for contender in CONTENDERS:
            for check in ep_checks.CHECKS:
                bench.run(check, contender)
    if only != "checks":
        time_everything(bench)
        bench.run(sweep_normal)
    del kept
    if only != "times":
        bench.run(ep_checks.check_buffers)
    bench.say(f"done: {len(bench.failed)} failed")
    gc.collect()
    for buffers in (BUFFERS, peer_memory.BUFFERS):
        buffers.free_unused(bench.group.require_process_group("the benchmark"))
    return len(bench.failed)


def main() -> None:
    """Between the beginning of the process group and its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("checks", "times"), help="the other half is left out")
    only = parser.parse_args().only
    if not ON_GPU:
        import ep_emulated

        ep_emulated.install()
    join()
    num_failed = measure(only)
    gc.collect()
    dist.destroy_process_group()
    raise SystemExit(num_failed)


if __name__ == "__main__":
    main()
