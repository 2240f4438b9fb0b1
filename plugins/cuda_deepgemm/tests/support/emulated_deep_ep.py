"""DeepEP on CPUs: the vendor's own Python over a compiled layer that really exchanges values, over any transport.

Where a wheel is unpacked (`make deepgemm-vendor`), its Python files check every call and call what is here instead of
their compiled module. Where none is, a class with the same functions stands in, and what was promised of signatures was
not checked.

Every rank shows everything to all ranks of the whole world, and each picks what is its own. What the library leaves
undefined is poisoned, rows are in another order than tokens, and nothing is there before it was waited for.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

#: Variable with the folder of the unpacked wheel, "" or unset for none.
VENDOR = "MOE_PLUGIN_DEEPEP_VENDOR"
Tensor = torch.Tensor
#: Largest code of e4m3, and the least amax that the library divides by.
_LARGEST, _LEAST = 448.0, 1e-4
_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_SHARED_BYTES = 8192


class VendorRule(RuntimeError):
    """What the compiled layer asserts."""


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise VendorRule(f"Assertion error: {rule}")


def _every_rank(mine: Any) -> list[Any]:
    shown: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shown, mine)
    return shown


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that nobody wrote: NaN, or a number far from any that is right."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan).to(dtype)
    return torch.full(shape, 99991, dtype=dtype)


class Config:
    """Sizes of the chunks in which the normal mode sends.

    Attributes:
        seen: Multiprocessors of every dispatch and combine.
    """

    seen: ClassVar[list[int]] = []

    def __init__(self, num_sms: int, send: int, receive: int, *rdma: int) -> None:
        _require(num_sms > 0 and 0 < send < receive, "what is sent fits into what is received")
        self.num_sms, self.receive = num_sms, receive

    def channels(self, row_bytes: int, num_ranks: int, num_bytes: int) -> int:
        """Of a call, two multiprocessors each."""
        _require(self.num_sms % 2 == 0, "multiprocessors are even")
        _require(self.get_nvl_buffer_size_hint(row_bytes, num_ranks) <= num_bytes, "the buffer is large enough")
        self.seen.append(self.num_sms)
        return self.num_sms // 2

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms // 2 * num_ranks * self.receive * (hidden_bytes + 4096) // 128 * 128


class EventHandle:
    """Something that is done when the current stream waits for it."""

    def __init__(self, finish: Callable[[], None] = lambda: None) -> None:
        self._finish = finish

    def current_stream_wait(self) -> None:
        self._finish()


def low_latency_bytes(num_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Two buffers for messages out and two for messages in, of the larger of dispatch and combine."""
    groups = hidden // 128
    out = 16 + max(2 * hidden, hidden + 4 * groups)
    back = 4 * groups + 2 * hidden
    sent = max(num_tokens * out, num_experts * num_tokens * back)
    received = num_experts * num_tokens * max(out, back)
    total = 2 * sent + 2 * received + 2 * (-(-4 * num_experts // 128) * 128)
    return (total + 128) // 128 * 128


class Runtime:
    """The compiled `Buffer`: its methods take their arguments by position, as the vendor's Python gives them.

    Attributes:
        alive: Those that were made and not destroyed.
        settings: What each low-latency one found in the environment when it was made.
        sent: Bytes of a token and its scales, of each dispatch.
    """

    alive: ClassVar[list[Runtime]] = []
    settings: ClassVar[list[dict[str, str]]] = []
    sent: ClassVar[list[int]] = []

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        num_nvl_bytes: int,
        num_rdma_bytes: int,
        low_latency_mode: bool,
        explicitly_destroy: bool,
        enable_shrink: bool = False,
        use_fabric: bool = False,
    ) -> None:
        _require(num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0, "bytes are multiples of 128")
        _require(num_rdma_bytes == 0 or low_latency_mode, "one host needs no RDMA")
        self.rank, self.num_ranks, self.low_latency_mode = rank, num_ranks, low_latency_mode
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self._available = False

    def get_local_device_id(self) -> int:
        return self.rank

    def get_local_ipc_handle(self) -> bytearray:
        return bytearray(64)

    def get_num_rdma_ranks(self) -> int:
        return 1

    def get_local_nvshmem_unique_id(self) -> bytearray:
        return bytearray(b"id")

    def is_available(self) -> bool:
        return self._available

    def sync(self, device_ids: Any, ipc_handles: Any, root_unique_id: Any) -> None:
        _require(len(device_ids) == self.num_ranks, "one device for each rank")
        if self.low_latency_mode:
            _require(root_unique_id == bytearray(b"id"), "the id of NVSHMEM")
            self.settings.append({name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")})
        self._available = True
        self.alive.append(self)

    def destroy(self) -> None:
        """All ranks destroy the same one together."""
        _require(self._available, "not destroyed yet")
        sizes = _every_rank((self.num_nvl_bytes, self.num_rdma_bytes))
        _require(len(set(sizes)) == 1, "the ranks destroy different buffers")
        self.alive.remove(self)
        self._available = False

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: Any, async_finish: bool, on_comm_stream: bool
    ) -> tuple[Any, ...]:
        _check_ids(topk_idx)
        names = topk_idx[..., None] == torch.arange(num_experts)
        in_rank = names.any(1).view(-1, self.num_ranks, num_experts // self.num_ranks).any(2)
        return in_rank.sum(0).int(), None, names.sum((0, 1)).int(), in_rank, EventHandle()

    def intranode_dispatch(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        topk_idx: Tensor,
        topk_weights: Tensor,
        per_rank: Tensor,
        in_rank: Tensor,
        per_expert: Tensor,
        cached_rows: int,
        cached_ranks: Any,
        cached_channels: Any,
        alignment: int,
        num_worst_tokens: int,
        config: Config,
        previous_event: Any,
        async_finish: bool,
        on_comm_stream: bool,
    ) -> tuple[Any, ...]:
        """The rows of this rank with their local ids; counts rounded up to the alignment."""
        _require(self.num_nvl_bytes > 0, "a buffer for the normal mode")
        _require(x.dim() == 2 and x.is_contiguous() and x.dtype in (torch.bfloat16, torch.float8_e4m3fn), "x")
        _require((x.dtype == torch.bfloat16) == (x_scales is None), "scales go with codes")
        row_bytes = x.shape[1] * x.itemsize
        _require(row_bytes % 32 == 0 and row_bytes // 2 + 8 <= _SHARED_BYTES, "half a token fits")
        num_channels = config.channels(row_bytes, self.num_ranks, self.num_nvl_bytes)
        _check_ids(topk_idx)
        _require(topk_weights.dtype == torch.float32 and topk_weights.is_contiguous(), "topk_weights")
        local = per_expert.numel() // self.num_ranks
        _require(local * self.num_ranks == per_expert.numel() and local <= 128, "experts per rank")
        scales = x[:, :0].float() if x_scales is None else x_scales
        self.sent.append(_token_bytes(x, scales))
        shown = _every_rank((_bytes(x), _bytes(scales), topk_idx, topk_weights, in_rank))
        first = self.rank * local
        rows, words, ids, weights, sources, counts = [], [], [], [], [], torch.zeros(local, dtype=torch.int64)
        for tokens, row_scales, names, factors, wanted in shown:
            # Chunks of a rank arrive in no order of tokens.
            token = wanted[:, self.rank].nonzero().flatten().flip(0)
            here = names[token] - first
            here = torch.where((here >= 0) & (here < local), here, -1)
            counts += torch.bincount(here.flatten() + 1, minlength=local + 1)[1:]
            rows.append(tokens[token])
            words.append(row_scales[token])
            ids.append(here)
            weights.append(torch.where(here >= 0, factors[token], 0.0))
            sources.append(token.int())
        ends = torch.tensor([len(part) for part in sources]).cumsum(0)
        prefix = torch.zeros(self.num_ranks, self.num_ranks, dtype=torch.int64)
        prefix[:, self.rank] = ends
        aligned = [-(-count // alignment) * alignment for count in counts.tolist()]
        finished = (
            torch.cat(rows).view(x.dtype),
            None if x_scales is None else torch.cat(words).view(scales.dtype),
            torch.cat(ids),
            torch.cat(weights),
        )
        received, event = _later(finished, async_finish)
        head = torch.where(in_rank, 0, -1)
        channels = torch.zeros(self.num_ranks, num_channels, dtype=torch.int32)
        return (*received, aligned, prefix, channels, channels, torch.cat(sources), head, event)

    def intranode_combine(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        bias_0: Any,
        bias_1: Any,
        sources: Tensor,
        prefix: Tensor,
        channels: Tensor,
        head: Tensor,
        config: Config,
        previous_event: Any,
        async_finish: bool,
        on_comm_stream: bool,
    ) -> tuple[Any, ...]:
        """Sums over the ranks, without weights."""
        _require(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x")
        _require(len(x) == len(sources), "a row for each that was received")
        num_channels = config.channels(2 * x.shape[1], self.num_ranks, self.num_nvl_bytes)
        _require(channels.shape == (self.num_ranks, num_channels), "the way back of the way there")
        total = torch.zeros(len(head), x.shape[1])
        for rank, (rows, tokens, ends) in enumerate(_every_rank((x, sources, prefix[:, self.rank]))):
            start = int(ends[self.rank - 1]) if self.rank else 0
            mine = slice(start, int(ends[self.rank]))
            _require(bool((head[tokens[mine].long(), rank] >= 0).all()), "only what was sent comes back")
            total[tokens[mine].long()] += rows[mine].float()
        return total.bfloat16(), None, EventHandle()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        stats: Any,
        waits: Any,
        capacity: int,
        num_experts: int,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[Any, ...]:
        """Blocks of rows per local expert; counts on the device."""
        hidden, share = x.shape[1], num_experts // self.num_ranks
        _require(self.low_latency_mode, "a buffer for the low-latency mode")
        _require(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x")
        _require(hidden in _HIDDEN_SIZES, "Unsupported hidden")
        _check_ids(topk_idx)
        _require(len(x) == len(topk_idx) <= capacity and topk_idx.shape[1] <= 11, "as many tokens and slots as fit")
        _require(share * self.num_ranks == num_experts, "experts per rank")
        _require(self.num_ranks * capacity % 4 == 0, "rows are multiples of 4")
        _require(low_latency_bytes(capacity, hidden, self.num_ranks, num_experts) <= self.num_rdma_bytes, "the buffer")
        _require(not (async_finish and return_recv_hook), "a hook or an event")
        _require(round_scale or not use_ue8m0, "powers of two are rounded")
        block = self.num_ranks * capacity
        values, scales = _rounded(x, round_scale, use_ue8m0) if use_fp8 else (x, None)
        self.sent.append(_token_bytes(values, scales))
        shown = _every_rank((_bytes(values), None if scales is None else _bytes(scales), topk_idx))
        rows = _poison((share, block, hidden), values.dtype)
        words = None if scales is None else _poison((share, scales.shape[1], block), scales.dtype).mT
        info, ranges = _poison((share, block), torch.int32), torch.zeros(share, self.num_ranks, dtype=torch.int64)
        counts = torch.zeros(share, dtype=torch.int32)
        for expert in range(share):
            for rank in reversed(range(self.num_ranks)):
                tokens, row_scales, names = shown[rank]
                token = (names == self.rank * share + expert).any(1).nonzero().flatten().flip(0)
                start = int(counts[expert])
                place = slice(start, start + len(token))
                rows[expert, place] = tokens[token].view(values.dtype)
                if words is not None and scales is not None:
                    words[expert, place] = row_scales[token].view(scales.dtype)
                info[expert, place] = token.int()
                ranges[expert, rank] = start << 32 | len(token)
                counts[expert] += len(token)
        received, event = _later((rows, words, counts), return_recv_hook)
        return (*received, info, ranges, event, event.current_stream_wait)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        info: Tensor,
        ranges: Tensor,
        waits: Any,
        capacity: int,
        num_experts: int,
        use_logfmt: bool,
        zero_copy: bool,
        async_finish: bool,
        return_recv_hook: bool,
        out: Tensor | None,
    ) -> tuple[Any, ...]:
        """Sums with weights, in the order of the slots."""
        share = num_experts // self.num_ranks
        _require(x.shape[:2] == (share, self.num_ranks * capacity), "blocks for every expert")
        _require(x.is_contiguous() and x.dtype == torch.bfloat16, "x")
        _require(not (use_logfmt or zero_copy), "nothing is rounded on the way")
        _require(topk_weights.dtype == torch.float32 and topk_weights.is_contiguous(), "topk_weights")
        _check_ids(topk_idx)
        back: dict[tuple[int, int], Tensor] = {}
        # What is shown is only what was received: the rest of a block is large and nobody's.
        for rank, parts in enumerate(_every_rank([_part(x, info, int(word), e) for e, word in _mine(ranges)])):
            for expert, owner, tokens, rows in parts:
                if owner == self.rank:
                    back.update(((rank * share + expert, int(t)), row) for t, row in zip(tokens, rows, strict=True))
        total = torch.zeros(len(topk_idx), x.shape[2])
        for slot in range(topk_idx.shape[1]):
            for token, expert in enumerate(topk_idx[:, slot].tolist()):
                if expert >= 0:
                    total[token] += back[expert, token].float() * topk_weights[token, slot]
        (combined,), event = _later((total.bfloat16(),), return_recv_hook)
        return combined, event, event.current_stream_wait


def _mine(ranges: Tensor) -> list[tuple[tuple[int, int], Tensor]]:
    return [((e, rank), ranges[e, rank]) for e in range(ranges.shape[0]) for rank in range(ranges.shape[1])]


def _part(x: Tensor, info: Tensor, word: int, place: tuple[int, int]) -> tuple[int, int, list[int], Tensor]:
    """What one expert gives back to one rank: expert, rank, its tokens, and their rows."""
    rows = slice(word >> 32, (word >> 32) + (word & 0xFFFFFFFF))
    return *place, info[place[0], rows].tolist(), x[place[0], rows].clone()


def _later(finished: tuple[Tensor | None, ...], is_later: bool) -> tuple[tuple[Tensor | None, ...], EventHandle]:
    """The tensors, written when the event is waited for, poisoned until then; at once unless `is_later`."""
    if not is_later:
        return finished, EventHandle()
    tensors = tuple(None if t is None else torch.empty_like(t).copy_(_poison((), t.dtype)) for t in finished)

    def finish() -> None:
        for tensor, value in zip(tensors, finished, strict=True):
            if tensor is not None and value is not None:
                tensor.copy_(value)

    return tensors, EventHandle(finish)


def _bytes(values: Tensor) -> Tensor:
    """Codes as bytes, which every transport takes."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def _token_bytes(values: Tensor, scales: Tensor | None) -> int:
    """Of one token with its scales."""
    return sum(tensor.shape[1] * tensor.itemsize for tensor in (values, scales) if tensor is not None)


def _rounded(x: Tensor, to_powers: bool, packed: bool) -> tuple[Tensor, Tensor]:
    """e4m3 codes `[T, H]`, and scales `[T, H / 128]` fp32 or four exponents in a word."""
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(2).clamp(min=_LEAST) / _LARGEST
    if to_powers:
        scales = torch.exp2(scales.log2().ceil())
    codes = (groups / scales[..., None]).flatten(1).to(torch.float8_e4m3fn)
    if packed:
        exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
        scales = exponents.contiguous().view(torch.int32)
    return codes, scales


def _check_ids(topk_idx: Tensor) -> None:
    _require(topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64, "topk_idx")


def install() -> types.ModuleType:
    """`deep_ep` in this process, once: the wheel's in the folder `VENDOR`, else a stand-in.

    The fakes stay in `sys.modules`, and the name of the GPU that the wheel asks for stays made up.
    """
    if "deep_ep" not in sys.modules:
        compiled = types.ModuleType("deep_ep_cpp")
        compiled.Buffer, compiled.Config, compiled.EventHandle = Runtime, Config, EventHandle  # type: ignore[attr-defined]
        compiled.topk_idx_t = torch.int64  # type: ignore[attr-defined]
        compiled.get_low_latency_rdma_size_hint = low_latency_bytes  # type: ignore[attr-defined]
        sys.modules["deep_ep_cpp"] = compiled
        torch.cuda.get_device_name = lambda device=None: "NVIDIA H100"
        site = os.environ.get(VENDOR)
        if site and Path(site, "deep_ep").is_dir():
            sys.path.insert(0, site)
            try:
                importlib.import_module("deep_ep")
            finally:
                sys.path.remove(site)
        else:
            sys.modules["deep_ep"] = _stand_in()
    return sys.modules["deep_ep"]


def _stand_in() -> types.ModuleType:
    import stand_in_deep_ep

    module = types.ModuleType("deep_ep")
    module.Buffer, module.Config, module.__version__ = stand_in_deep_ep.Buffer, Config, "0"  # type: ignore[attr-defined]
    return module
