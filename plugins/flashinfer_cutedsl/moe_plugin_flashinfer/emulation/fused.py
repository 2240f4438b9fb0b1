"""The kernels behind the library's whole MoE layer: one operator, from packed tokens to the weighted sum of slots.

Letters: `T` tokens, `K` slots, `H` hidden, `I` intermediate size, `L` local experts. Operands are raw memory: `x` bytes
`[T, H/2]` with linear block scales `[T, H/16]`, `w1` bytes `[L, 2I, H/2]` whose rows alternate in chunks of 64, up
first, `w2` bytes `[L, H, I/2]`, block scales of both in tiles, expert by expert.
"""

from __future__ import annotations

import attrs
import torch
from torch.nn import functional

from moe_core.payloads import Tensor
from moe_plugin_flashinfer.emulation import nvfp4
from moe_plugin_flashinfer.emulation.memory import BLOCK, at_address, swizzled_shape, unswizzled
from moe_plugin_flashinfer.emulation.operators import operator

#: Rows of the up half that lie together, then as many of the gate half.
CHUNK = 64


@attrs.define
class Atomics:
    """In which order the slots of a token are added to the output; on a device it differs from call to call.

    Attributes:
        calls: Calls so far, where the order moves on with each; None for the order of the slots.
    """

    calls: int | None = None

    def order(self, num_slots: int) -> list[int]:
        """Slots in the order of this call."""
        if self.calls is None:
            return list(range(num_slots))
        self.calls += 1
        start = self.calls % max(1, num_slots)
        return [*range(start, num_slots), *range(start)]


ATOMICS = Atomics()


@attrs.frozen(eq=False)
class _Weights:
    """A weight of all local experts: bytes `[L, N, K/2]` and scales in tiles."""

    packed: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, weight: Tensor, scales: Tensor, experts: int, rows: int, channels: int) -> _Weights:
        """What lies where the kernel looks."""
        return cls(
            at_address(weight, torch.uint8, (experts, rows, channels // 2), align=32),
            at_address(scales, torch.float8_e4m3fn, (experts, *swizzled_shape(rows, channels))),
        )

    def values(self, expert: int) -> Tensor:
        """fp32 `[N, K]` of one expert."""
        packed = self.packed[expert]
        return nvfp4.values(packed, unswizzled(self.tiles[expert], packed.shape[0], 2 * packed.shape[1]))


@operator(
    "fused_moe(Tensor x, Tensor x_scale, Tensor ids, Tensor weights, Tensor w1, Tensor w1_scale, Tensor w1_alpha, "
    "Tensor inner_scale, Tensor w2, Tensor w2_scale, Tensor w2_alpha, Tensor(out!) out, int[] sizes, bool atomic) -> ()"
)
def _fused_moe(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w1_alpha: Tensor,
    inner_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_alpha: Tensor,
    out: Tensor,
    sizes: list[int],
    atomic: bool,
) -> None:
    first, experts, hidden, inner = sizes
    num_tokens, top_k = ids.shape
    tokens = at_address(x, torch.uint8, (num_tokens, hidden // 2), align=32)
    token_scales = at_address(x_scale, torch.float8_e4m3fn, (num_tokens, hidden // BLOCK))
    up_gate = _Weights.of(w1, w1_scale, experts, 2 * inner, hidden)
    down = _Weights.of(w2, w2_scale, experts, hidden, inner)
    alphas = [at_address(alpha, torch.float32, (experts,), align=4).tolist() for alpha in (w1_alpha, w2_alpha)]
    scale = at_address(inner_scale, torch.float32, (1,), align=4)
    rows = torch.zeros((num_tokens, top_k, hidden))
    for expert in range(experts):
        token, slot = (ids == first + expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        sums = nvfp4.values(tokens[token], token_scales[token]) @ up_gate.values(expert).T * alphas[0][expert]
        up, gate = sums.unflatten(1, (-1, 2, CHUNK)).unbind(2)
        # From fp32: nothing is rounded to bf16 on the way.
        inside = nvfp4.values(*nvfp4.quantize(functional.silu(gate.flatten(1)) * up.flatten(1), scale))
        rows[token, slot] = inside @ down.values(expert).T * alphas[1][expert]
    by_slot = at_address(weights, torch.float32, (num_tokens, top_k), align=4)[..., None]
    is_here = ((ids >= first) & (ids < first + experts))[..., None]
    written = at_address(out, torch.bfloat16, (num_tokens, hidden))
    if not atomic:
        written.copy_(torch.where(is_here, rows.bfloat16().float() * by_slot, 0.0).sum(1))
        return
    products = torch.where(is_here, rows * by_slot, 0.0).bfloat16()
    written.zero_()
    for slot_now in ATOMICS.order(top_k):
        # Each sum is one of bf16.
        written += products[:, slot_now]


FUSED_MOE = torch.ops.emulated_flashinfer.fused_moe
