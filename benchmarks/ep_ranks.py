"""One rank of the benchmark of dispatchers: its layers and tokens, and what the ranks tell each other."""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, TypeAlias

import moe_plugin_deepgemm.plugin as deepgemm
import torch
import torch.distributed as dist
from ep_contenders import Contender

import moe_core.backends.torch.plugin as torch_plugin
import moe_core.backends.triton.plugin as triton_plugin
from moe_core import ExpertGroup, LayerRequest, MoELayer, Workload
from moe_core.environment import PRESETS, Environment
from moe_core.manager import BackendManager
from moe_core.testing.stored import draw_layer
from moe_core.tuning.timing import CaptureError, issue_microseconds, prepare

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
#: Hidden states, ids and weights.
Tokens: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: A check that takes longer hangs, and a collective.
SECONDS, COLLECTIVE_SECONDS = 120, 60
#: Calls in a sample, and samples; of the many settings of a sweep.
CALLS, SAMPLES = (20, 9) if ON_GPU else (1, 1)
SWEEP_CALLS, SWEEP_SAMPLES = (8, 5) if ON_GPU else (1, 1)
#: Calls that the host issues without waiting.
ISSUED = 500 if ON_GPU else 2
DECODE = Workload(phase="decode", max_tokens=128, graph_capture=ON_GPU)
PREFILL = Workload(phase="prefill", max_tokens=4096)
#: Experts of each rank of the layer that is timed, and its other sizes: on eight ranks those of a large model's layer.
TIMED_SHARE, TIMED = 32, {"top_k": 8, "hidden_size": 7168, "intermediate_size": 2048}
#: Tokens per rank in decode, and in prefill.
FEW_TOKENS, MANY_TOKENS = (1, 16, 64, 128), (1024, 4096)
if not ON_GPU:
    TIMED_SHARE, TIMED = 2, {"top_k": 2, "hidden_size": 2048, "intermediate_size": 128}
    FEW_TOKENS, MANY_TOKENS = (1, 16), (24,)


def manager() -> BackendManager:
    """The plugin beside the built-in ones, whether installed or not."""
    made = BackendManager()
    for name, plugin in (("torch", torch_plugin), ("triton", triton_plugin), ("cuda_deepgemm", deepgemm)):
        made.register(name, plugin)
    return made


def environment() -> Environment:
    """This machine, or the one that is emulated."""
    return manager().probe() if ON_GPU else PRESETS["h100"]


class Wrong(Exception):
    """A check failed on some rank, and all ranks know it."""


def join() -> None:
    """Begin the process group of all ranks."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if ON_GPU:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if ON_GPU else None
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS), device_id=device
    )


class Bench:
    """This rank."""

    def __init__(self) -> None:
        """Find its place among the others."""
        self.rank = dist.get_rank()
        self.group = ExpertGroup(rank=self.rank, size=dist.get_world_size(), process_group=dist.group.WORLD)
        self.manager, self.environment = manager(), environment()
        self.stored: dict[LayerRequest, Any] = {}
        self.failed: list[str] = []
        self.started = time.perf_counter()

    def say(self, text: str) -> None:
        """From one rank, with the seconds since the start."""
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", flush=True)

    def request(self, contender: Contender, **fields: Any) -> LayerRequest:
        """A layer over all ranks; `fields` are said last."""
        common = {"workloads": (DECODE, PREFILL), "ep_size": self.group.size}
        return LayerRequest(**(common | contender.pins | fields))

    def small(self, contender: Contender, **fields: Any) -> LayerRequest:
        """A layer for checks: experts do not divide by the ranks, and some of a token's may be of one rank."""
        size = self.group.size
        sizes = {"num_experts": 2 * size + 1, "top_k": size, "hidden_size": 2048, "intermediate_size": 256}
        return self.request(contender, **(sizes | fields))

    def timed(self, contender: Contender) -> LayerRequest:
        """The layer that is timed."""
        return self.request(contender, **TIMED, num_experts=TIMED_SHARE * self.group.size)

    def layer(self, request: LayerRequest) -> MoELayer:
        """A layer with random weights."""
        made = MoELayer(request, environment=self.environment, manager=self.manager, group=self.group)
        self.stored[request] = self.stored.get(request) or draw_layer(request)
        made.load_weights(self.stored[request].raw(made.local_experts, DEVICE))
        return made

    def tokens(self, request: LayerRequest, count: int, seed: int, spared: Collection[int] = ()) -> Tokens:
        """Other tokens on every rank; a slot without expert, and a token without any.

        Args:
            request: The layer.
            count: Tokens.
            seed: Of their values.
            spared: Ranks whose experts none of them names.
        """
        generator = torch.Generator().manual_seed(100 * seed + self.rank)
        hidden = torch.randn(count, request.hidden_size, generator=generator).bfloat16()
        scores = torch.rand(count, request.num_experts, generator=generator)
        scores[:, [expert for rank in spared for expert in request.local_experts(rank)]] = -1
        ids = scores.topk(request.top_k, dim=1).indices
        if count > 2:
            ids[0, 0], ids[1] = -1, -1
        weights = torch.rand(count, request.top_k, generator=generator) / 2 + 0.1
        return hidden.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)

    def routed(self, count: int) -> Tokens:
        """Tokens of the timed layer, made on the device."""
        generator = torch.Generator(DEVICE).manual_seed(self.rank)
        hidden = torch.randn(count, TIMED["hidden_size"], device=DEVICE, generator=generator).bfloat16()
        scores = torch.rand(count, TIMED_SHARE * self.group.size, device=DEVICE, generator=generator)
        weights, ids = scores.topk(TIMED["top_k"], dim=1)
        return hidden, ids, weights

    def error(self, request: LayerRequest, output: torch.Tensor, tokens: Any) -> float:
        """Relative error, the largest of the ranks; 0 for no tokens."""
        answer = self.stored[request].reference(*(tensor.cpu() for tensor in tokens))
        found = float((output.cpu().double() - answer).norm() / answer.norm()) if len(answer) else 0.0
        return max(self.every_rank(found))

    def every_rank(self, mine: Any) -> list[Any]:
        """What each rank has."""
        shown: list[Any] = [None] * self.group.size
        dist.all_gather_object(shown, mine)
        return shown

    def require(self, condition: bool, what: str) -> None:
        """All ranks give a check up together if one is wrong."""
        wrong = [rank for rank, is_right in enumerate(self.every_rank(bool(condition))) if not is_right]
        if wrong:
            raise Wrong(f"WRONG on ranks {wrong}: {what}")

    def run(self, check: Callable[..., None], *arguments: Any) -> None:
        """A check or a measurement; the next one follows whatever it finds."""
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            check(self, *arguments)
        except Wrong as error:
            self.say(str(error))
            self.failed.append(str(error))
        finally:
            faulthandler.cancel_dump_traceback_later()
        gc.collect()

    def time(self, call: Callable[[], Any], *, capture: bool, calls: int = CALLS, samples: int = SAMPLES) -> float:
        """Median microseconds of the slowest rank; NaN for what cannot be captured."""
        try:
            ready = prepare([call] * calls, DEVICE, capture=capture)
        except CaptureError as error:
            self.say(str(error))
            return math.nan
        taken = []
        for _ in range(samples):
            dist.barrier()
            taken.append(ready.sample())
        return max(self.every_rank(statistics.median(taken)))

    def issue(self, call: Callable[[], Any]) -> float:
        """Microseconds of the slowest rank's host, for a call that nothing waits for."""
        dist.barrier()
        return max(self.every_rank(issue_microseconds(call, DEVICE, ISSUED)))

    def compare(self, what: str, calls: Mapping[str, Callable[[], Any]], timer: Callable[..., float]) -> None:
        """Times of several calls, said in one line."""
        self.say(f"{what}: " + "; ".join(f"{name} {timer(call):.1f} us" for name, call in calls.items()))
