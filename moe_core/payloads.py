"""The objects that hold tensors: tokens between dispatch and combine, and weights before and after preparation.

Shapes: `T` tokens of this rank, `K` top-k, `H` hidden, `I` intermediate (of this rank), `L` local experts,
`R` dispatched rows, `M` padded rows per expert. Canonical weights are `w13 [L, 2I, H]` with rows **[gate; up]**
(`[L, I, H]` when not gated) and `w2 [L, H, I]`, so that `y = x @ W.T`: this is the one place that says so.

Two things are called slots. A *token's slot* is one of its `K` choices, an id and a weight. An *expert's slot* is a
place for an expert on some rank (`placement`): by its number dispatchers know experts, copies included.

Objects made during a forward are not frozen: frozen construction breaks full-graph compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch

from moe_core.errors import InputError

Tensor: TypeAlias = torch.Tensor
#: The project's word for a float dtype -> torch's.
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: `[rows, 2I]` (or `[rows, I]`) after GEMM1 -> `[rows, I]`, in the layer's dtype or fp32, which fp16 layers give.
ActivationFn: TypeAlias = Callable[[Tensor], Tensor]
#: `[rows, H]` -> `[rows, H]` after GEMM2, before the top-k weights.
PostNormFn: TypeAlias = Callable[[Tensor], Tensor]


@attrs.define(eq=False, kw_only=True)
class StandardTokens:
    """Tokens as they came. The runner applies the top-k weights and sums over K.

    Attributes:
        hidden_states: `[T, H]` in the route's dispatch dtype.
        topk_ids: `[T, K]` int32 or int64, **local** expert ids, -1 = no expert here (the slot contributes nothing
            and its token must not be read through it).
        topk_weights: `[T, K]`, used as fp32.
        scales: Scales of quantized tokens, None otherwise.
        expected_m: Typical rows of each expert, a tuning hint only; None = as if every slot had an expert here.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    scales: Tensor | None = None
    expected_m: int | None = None


@attrs.define(eq=False, kw_only=True)
class ContiguousTokens:
    """Rows grouped by local expert, back to back. Combine applies the top-k weights.

    Attributes:
        hidden_states: `[R, H]` in the route's dispatch dtype; rows between an expert's count and the end of its
            group, and rows past the last group, are undefined memory.
        num_tokens_per_expert: `[L]` int32, real rows of each expert.
        group_ends: `[L]` int32, row after each expert's group (its real rows padded to the route's alignment).
        scales: Scales of quantized tokens, None otherwise.
    """

    hidden_states: Tensor
    num_tokens_per_expert: Tensor
    group_ends: Tensor
    scales: Tensor | None = None


@attrs.define(eq=False, kw_only=True)
class DownGemmOverlap:
    """How combine learns, while the second projection of an expert's rows still runs, which experts are done.

    The dispatcher makes it for one forward of a route with `down_gemm_overlap`; its combine waits for the signals.

    Attributes:
        signals: `[L]` int32 zeros; each multiprocessor adds one to an expert's as soon as it has written its share of
            that expert's rows.
        num_multiprocessors: How many the second projection is to run on, so that others are left for combine: the
            signal of an expert that is done.
        start: To be called before the second projection is launched; combine waits for nothing later than that.
    """

    signals: Tensor
    num_multiprocessors: int
    start: Callable[[], None]


@attrs.define(eq=False, kw_only=True)
class MaskedTokens:
    """One block of rows per local expert. Combine applies the top-k weights.

    Attributes:
        hidden_states: `[L, M, H]` in the route's dispatch dtype.
        masked_m: `[L]` int32, valid rows of each expert; rows beyond are undefined memory and are never read.
        expected_m: Typical `masked_m`, a tuning hint only.
        scales: Scales of quantized tokens, None otherwise.
        down_gemm_overlap: On a route with `down_gemm_overlap`, None on any other.
    """

    hidden_states: Tensor
    masked_m: Tensor
    expected_m: int = 1
    scales: Tensor | None = None
    down_gemm_overlap: DownGemmOverlap | None = None


Dispatched: TypeAlias = StandardTokens | ContiguousTokens | MaskedTokens
#: `(hidden_states, topk_ids, topk_weights) -> (dispatched, handle)`; inputs have any strides and stay as they are; the
#: handle goes to the combine of this dispatch, which a layer calls before it dispatches again.
#: The ids are slots: expert-parallel rank r owns those of `LayerRequest.local_slots(r)`, whatever the placement.
DispatchFn: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Dispatched, Any]]
#: The first half of a dispatch, for a forward that has something to do meanwhile: arguments and handle as in
#: `DispatchFn`, but in place of the tokens a function that waits for them, to be called once.
SendFn: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Callable[[], Dispatched], Any]]
#: `(rows, handle) -> hidden_states [T, H]` in the layer's dtype, contiguous and nobody else's memory; takes all that an
#: `ExpertsFn` may give.
CombineFn: TypeAlias = Callable[[Tensor, Any], Tensor]
#: `dispatched -> rows`: `[T, H]` (standard, weighted and summed), `[R, H]` or `[L, M, H]` (unweighted), in the layer's
#: dtype; unweighted rows have any strides, and may be fp32 in an fp16 layer, as they may exceed its largest number. It
#: is given the one of `Dispatched` that is its spec's format and may be written for that alone, hence `Any`.
ExpertsFn: TypeAlias = Callable[[Any], Tensor]
#: A fused route: `(hidden_states, topk_ids, topk_weights) -> hidden_states`; inputs as in `DispatchFn`, output as in
#: `CombineFn`.
FusedFn: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


@attrs.frozen(kw_only=True)
class ExpertGroup:
    """This process's place among the expert-parallel ranks.

    Attributes:
        rank: 0 .. size - 1.
        size: Expert-parallel ranks.
        process_group: The `torch.distributed` group; None where nothing is sent (one rank, or replicated tokens).
        device: Where the layer's weights lie and its tokens will come. The core says it to who is bound, whatever
            was given, so that what a forward reads can be there before it; None for the CPU.
    """

    rank: int = 0
    size: int = 1
    process_group: torch.distributed.ProcessGroup | None = None
    device: torch.device | None = None

    def require_process_group(self, user: str) -> torch.distributed.ProcessGroup:
        """The group to send through; `InputError` where there is none, which names `user` as who needs it."""
        if self.process_group is None:
            raise InputError(
                f"{user} needs ExpertGroup.process_group; this group has none: pass "
                "ExpertGroup(rank=..., size=..., process_group=...) after torch.distributed.init_process_group"
            )
        return self.process_group


#: Every tensor that canonical weights may have; the first axis of each is the local expert.
WEIGHT_NAMES = (
    "w13",
    "w2",
    "b13",
    "b2",
    "w13_scale",
    "w2_scale",
    "w13_zero_point",
    "w2_zero_point",
    "w13_global_scale",
    "w2_global_scale",
    "w13_input_scale",
    "w2_input_scale",
)


def bias_name(projection: str) -> str:
    """`b13` for `w13`, `b2` for `w2`."""
    return f"b{projection.removeprefix('w')}"


@attrs.define(eq=False, kw_only=True)
class RawWeights:
    """Canonical weights of one layer on this rank, as loaded. Preparation reads them and never writes them.

    Attributes:
        tensors: Name in `WEIGHT_NAMES` -> tensor with the local expert as first axis, any strides. Quantized
            weights are in their stored form (fp4 and int4: uint8, two elements per byte along the last axis, the
            first in the low nibble; int4 as two's complement, zero points shifted alike). Scales: `[L, N]` per row,
            `[L, 2]` (gate, up) or `[L, 1]` per tensor, else `[L, N / block rows, K / block columns]`, rounded up.
        activation: The callable of an activation of kind `module`.
        post_norm: The callable after each expert's down projection, for layers that have one.
        handed_over: Whether the receiver may keep these tensors instead of copying them.
        release: Called once with each local expert id as soon as nothing reads its raw memory any more, by whoever
            copied it: a preparation that makes its own tensors (a reload always does), or the layer for tensors that
            were borrowed.
    """

    tensors: dict[str, Tensor]
    activation: ActivationFn | None = None
    post_norm: PostNormFn | None = None
    handed_over: bool = False
    release: Callable[[int], None] | None = None


@attrs.define(eq=False, kw_only=True)
class PreparedTensor:
    """One tensor in the form a runner reads.

    Attributes:
        data: The tensor, dense; with an expert axis, on the device of the raw ones.
        expert_axis: Axis that counts local experts, None for a tensor shared by all; rebalancing moves along it.
        owned: False where `data` is a raw tensor, or a view of it, that still belongs to the model.
    """

    data: Tensor
    expert_axis: int | None = 0
    owned: bool = True


@attrs.define(eq=False, kw_only=True)
class PreparedWeights:
    """Weights in one runner's layout; a runner refuses another's tag when it is bound.

    Attributes:
        layout: The tag that the runner's spec declares.
        tensors: Name -> prepared tensor; **every** per-expert tensor is here.
        activation: As in `RawWeights`.
        post_norm: As in `RawWeights`.
        token_scale: For runners that read tokens with a calibrated scale: name of the fp32 tensor by whose elements,
            all equal, a dispatcher multiplies tokens before it rounds them.
    """

    layout: str
    tensors: dict[str, PreparedTensor]
    activation: ActivationFn | None = None
    post_norm: PostNormFn | None = None
    token_scale: str | None = None

    def get(self, name: str) -> Tensor | None:
        """The tensor called `name`, or None."""
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.data

    def __getitem__(self, name: str) -> Tensor:
        """The tensor called `name`."""
        return self.tensors[name].data
