"""The masked grouped GEMM of the library (`gemm.grouped_gemm_nt_masked`), for NVFP4 operands.

Letters: `l` experts, `m` rows of each, `n` outputs, `k` inputs. `A` is given as `(m, k/2, l)` over memory
`[l, m, k/2]`, `B` as `(n, k/2, l)` over `[l, n, k/2]`, block scales as any view of whole tiles, expert by expert, the
output as `(m, n, l)` over `[l, m, n]`. Sizes come from the shapes of `A` and `B`, numbers from where each begins.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_core.payloads import Tensor
from moe_plugin_flashinfer.emulation import nvfp4
from moe_plugin_flashinfer.emulation.memory import BLOCK, at_address, swizzled_shape, unswizzled
from moe_plugin_flashinfer.emulation.operators import operator
from moe_plugin_flashinfer.emulation.signatures import refuse_others

_DTYPES = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": BLOCK}
#: The most experts whose signals the kernel counts.
_MOST_SIGNALS = 8


def grouped_gemm_nt_masked(
    lhs: tuple[Tensor, Tensor],
    rhs: tuple[Tensor, Tensor],
    out: Tensor,
    masked_m: Tensor,
    *,
    ab_dtype: str,
    sf_dtype: str,
    c_dtype: str,
    sf_vec_size: int,
    dst_signals: Tensor | None = None,
    sm_count: int | None = None,
    alpha: Tensor | None = None,
    alpha_dtype: str | None = None,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] = (1, 1),
    **others: Any,
) -> Tensor:
    """`out[e, :masked_m[e]] = bf16(alpha[e] * A[e] @ B[e].T)` in fp32; further rows stay as they are.

    Args:
        lhs: `A` and its block scales.
        rhs: `B` and its block scales.
        out: Is written and returned.
        masked_m: int32 `[l]`.
        ab_dtype: And further words of the library for the dtypes; those of NVFP4 are emulated.
        sf_dtype: Of block scales.
        c_dtype: Of the output.
        sf_vec_size: Elements of a block.
        dst_signals: uint32 `[l]`; an element grows by one for each multiprocessor that is done with its expert.
        sm_count: Multiprocessors to use.
        alpha: fp32 `[l]`, by its memory.
        alpha_dtype: Word for it.
        mma_tiler_mn: Sizes of the kernel's tiles; the result is the same.
        cluster_shape_mn: Likewise.
        **others: What the library knows and this does not.
    """
    refuse_others("grouped_gemm_nt_masked", **others)
    given = {"ab_dtype": ab_dtype, "sf_dtype": sf_dtype, "c_dtype": c_dtype, "sf_vec_size": sf_vec_size}
    if given != _DTYPES:
        raise TypeError(f"of MaskedBatchedMatmulCuteDSL {_DTYPES} are emulated, not {given}")
    (m, half, l), n = lhs[0].shape, rhs[0].shape[0]  # noqa: E741 - the library's name
    if half * 2 % 32 or n % 8 or not set(mma_tiler_mn) <= {128, 256} or not set(cluster_shape_mn) <= {1, 2, 4}:
        raise TypeError(
            f"MaskedBatchedMatmulCuteDSL: unsupported {m, n, half * 2, l}, {mma_tiler_mn}, {cluster_shape_mn}"
        )
    if alpha is not None and alpha_dtype != "float32":
        raise TypeError(f"alpha_dtype of alpha is {alpha_dtype!r}, emulated is 'float32'")
    if dst_signals is not None and l > _MOST_SIGNALS:
        raise AssertionError("need to be packable into a u64")
    _MASKED_GEMM(*lhs, *rhs, out, masked_m, alpha, dst_signals, [l, m, n, half * 2, sm_count or 1])
    return out


@operator(
    "masked_gemm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(out!) out, Tensor masked_m, "
    "Tensor? alpha, Tensor(signals!)? signals, int[] sizes) -> ()"
)
def _masked_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    masked_m: Tensor,
    alpha: Tensor | None,
    signals: Tensor | None,
    sizes: list[int],
) -> None:
    l, m, n, k, num_workers = sizes  # noqa: E741 - the library's name
    rows, a_tiles = at_address(a, torch.uint8, (l, m, k // 2)), _tiles(a_scale, l, m, k)
    matrices, b_tiles = at_address(b, torch.uint8, (l, n, k // 2)), _tiles(b_scale, l, n, k)
    written = at_address(out, torch.bfloat16, (l, m, n))
    factors = [1.0] * l if alpha is None else at_address(alpha, torch.float32, (l,)).tolist()
    for expert, count in enumerate(at_address(masked_m, torch.int32, (l,)).tolist()):
        count = min(count, m)
        if count > 0:
            left = nvfp4.values(rows[expert, :count], unswizzled(a_tiles[expert], m, k)[:count])
            right = nvfp4.values(matrices[expert], unswizzled(b_tiles[expert], n, k))
            written[expert, :count] = (left @ right.T * factors[expert]).bfloat16()
    if signals is not None:
        at_address(signals, torch.int32, (l,)).add_(num_workers)


def _tiles(scales: Tensor, experts: int, rows: int, channels: int) -> Tensor:
    return at_address(scales, torch.float8_e4m3fn, (experts, *swizzled_shape(rows, channels)))


_MASKED_GEMM = torch.ops.emulated_flashinfer.masked_gemm
