"""Torch and Triton give the same bits, for whatever sizes and contents come to mind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core.kernels import combine, permute, quantize
from moe_core.payloads import Tensor
from moe_core.specs import TokenDtype

pytest.importorskip("triton", reason="needs triton")
from moe_core.kernels.triton import combine as triton_combine
from moe_core.kernels.triton import permute as triton_permute
from moe_core.kernels.triton import quantize as triton_quantize
from moe_core.kernels.triton import sort

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_QUICK = settings(max_examples=25, deadline=None, derandomize=True)
_TOKEN_DTYPES = [
    TokenDtype(word, scales)
    for word in ("fp8", "int8")
    for scales in ("row_128", "column_128", "ue8m0_128", "token")
]  # fmt: skip


def _same(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got.cpu().float(), want.float())


@st.composite
def _routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    experts = draw(st.integers(1, 40))
    tokens, top_k = draw(st.integers(0, 20)), draw(st.integers(1, 6))
    torch.manual_seed(draw(st.integers(0, 1 << 20)))
    # Few of the experts: duplicates and empty ones.
    ids = torch.randint(-1, draw(st.integers(1, experts)), (tokens, top_k))
    return ids.to(draw(st.sampled_from([torch.int32, torch.int64]))), experts


@_QUICK
@given(_routings(), st.sampled_from([1, 2, 16, 128]), st.booleans(), st.integers(1, 70))
def test_permutations(routing: tuple[Tensor, int], alignment: int, column_major: bool, width: int) -> None:
    ids, experts = routing
    x, scales = torch.randn(len(ids), width).bfloat16(), torch.rand(len(ids), 1 + width // 16)
    options = {"alignment": alignment, "column_major": column_major}
    want, want_map = permute.permute_contiguous(x, ids, experts, scales=scales, **options)
    got, row_map = triton_permute.permute_contiguous(
        x.to(DEVICE), ids.to(DEVICE), experts, scales=scales.to(DEVICE), **options
    )
    assert _same(row_map, want_map)
    assert _same(got.num_tokens_per_expert, want.num_tokens_per_expert)
    assert _same(got.group_ends, want.group_ends)
    num_rows = want.hidden_states.shape[0]
    of_rows = permute.row_experts(want.num_tokens_per_expert, want.group_ends, num_rows)
    assert _same(triton_permute.row_experts(got.num_tokens_per_expert, got.group_ends, num_rows), of_rows)
    rows = want_map[want_map >= 0].long()
    assert _same(got.hidden_states[rows], want.hidden_states[rows])
    assert _same(got.scales[rows], want.scales[rows])


@_QUICK
@given(_routings(), st.integers(1, 40), st.booleans())
def test_blocks_also_when_they_are_full(routing: tuple[Tensor, int], block: int, pairwise: bool) -> None:
    ids, experts = routing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sort, "_PAIRWISE_SLOTS", 8192 if pairwise else 0)
        got, counts = sort.masked_row_map(ids.to(DEVICE), experts, block)
    want, want_counts = permute.masked_row_map(ids, experts, block)
    assert _same(got, want)
    assert _same(counts, want_counts)


@_QUICK
@given(st.sampled_from(_TOKEN_DTYPES), st.integers(1, 300), st.integers(1, 9), st.integers(-60, 40), st.integers(0, 99))
def test_codes(token_dtype: TokenDtype, width: int, num_rows: int, exponent: int, seed: int) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(num_rows, width) * 2.0**exponent
    # Ties of the codes, and zeros.
    rows[0] = torch.randint(-9, 9, (width,)) * 0.5
    rows[-1, ::2] = 0
    want = quantize.quantize(rows, token_dtype)
    got = triton_quantize.quantize(rows.to(DEVICE), token_dtype)
    assert all(map(_same, got, want))
    assert got[1].stride() == want[1].stride()


@_QUICK
@given(_routings(), st.integers(1, 70), st.sampled_from([1.0, 0.3]), st.booleans())
def test_sums(routing: tuple[Tensor, int], width: int, factor: float, weighted: bool) -> None:
    # Any integers are rows here.
    row_map, num_rows = routing
    rows, weights = torch.randn(num_rows, width).half(), torch.randn(row_map.shape)
    want = combine.combine(rows, row_map, weights if weighted else None, torch.float32, scaling_factor=factor)
    got = triton_combine.combine(
        rows.to(DEVICE),
        row_map.to(DEVICE),
        weights.to(DEVICE) if weighted else None,
        torch.float32,
        scaling_factor=factor,
    )
    assert _same(got, want)
