"""The blocks behind their common door, in torch and in Triton, against plain loops and float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import activate, relative_error

from moe_core.activation import GEGLU, GEGLU_TANH, RELU2, SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.errors import InputError, SpecError
from moe_core.kernels import ops
from moe_core.kernels.activation_rounding import ActivationRounder
from moe_core.payloads import ContiguousTokens, MaskedTokens, Tensor
from moe_core.quant import SCHEMES
from moe_core.specs import TokenDtype

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = [
    SWIGLU,
    SWIGLU_OAI,
    GEGLU,
    GEGLU_TANH,
    RELU2,
    ActivationSpec(kind="relu", gated=False),
    ActivationSpec(kind="gelu_tanh", row_order="interleaved", limit=1.0, clamp="after"),
]
#: Tokens, top-k, experts: none, one, an odd number, many experts without tokens, few experts, a rank without any.
SIZES = [(0, 2, 3), (1, 8, 8), (7, 3, 5), (5, 2, 70), (40, 3, 2), (3, 2, 0)]
TOKEN_DTYPES = [
    TokenDtype(word, s) for word in ("fp8", "int8") for s in ("row_128", "column_128", "ue8m0_128", "token")
]
_FP8 = TokenDtype("fp8", "row_128")


@pytest.fixture(params=["torch", "triton"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which one the door opens to, whatever the device: Triton's interpreter runs on CPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
    monkeypatch.setattr(ops, "_uses_triton", lambda tensor: request.param == "triton")
    name: str = request.param
    return name


def _ids(size: tuple[int, int, int], routing: str) -> Tensor:
    tokens, top_k, experts = size
    if routing == "one expert":
        return torch.full((tokens, top_k), experts - 1)
    if routing == "none":
        return torch.full((tokens, top_k), -1)
    return torch.randint(-1, experts, (tokens, top_k))


@pytest.mark.parametrize("alignment", [1, 8])
def test_no_more_rows_than_the_caller_says(alignment: int) -> None:
    ids, x = torch.tensor([[0, 2], [2, -1], [-1, 0]]), torch.randn(3, 40).bfloat16()
    ends = {1: [2, 2, 4], 8: [8, 8, 16]}[alignment]
    tokens, row_map = ops.permute_contiguous(
        x.to(DEVICE), ids.to(DEVICE), 3, alignment=alignment, scales=torch.rand(3, 2).to(DEVICE), num_rows=ends[-1]
    )
    assert tokens.group_ends.tolist() == ends
    assert (len(tokens.hidden_states), len(tokens.scales)) == (ends[-1], ends[-1])
    second = 0 if alignment == 1 else 6
    assert row_map.tolist() == [[0, 2 + second], [3 + second, -1], [-1, 1]]
    assert torch.equal(tokens.hidden_states[3 + second].cpu(), x[1])


def _slots(ids: Tensor, expert: int) -> list[tuple[int, int]]:
    return [tuple(slot) for slot in (ids == expert).nonzero().tolist()]


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("routing", ["random", "one expert", "none"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_contiguous_rows_are_their_tokens(size: tuple[int, int, int], routing: str, alignment: int) -> None:
    ids, x = _ids(size, routing), torch.randn(size[0], 40).bfloat16()
    scales = torch.rand(size[0], 3)
    tokens, row_map = ops.permute_contiguous(
        x.to(DEVICE), ids.to(DEVICE), size[2], alignment=alignment, scales=scales.to(DEVICE)
    )
    rows, got_scales, end = tokens.hidden_states.cpu(), tokens.scales.cpu(), 0
    experts = ops.row_experts(tokens.num_tokens_per_expert, tokens.group_ends, len(rows)).cpu()
    for expert in range(size[2]):
        slots = _slots(ids, expert)
        for row, (token, slot) in enumerate(slots, start=end):
            assert row_map[token, slot] == row
            assert torch.equal(rows[row], x[token])
            assert torch.equal(got_scales[row], scales[token])
        first, end = end, end + -(-len(slots) // alignment) * alignment
        assert tokens.num_tokens_per_expert[expert] == len(slots)
        assert tokens.group_ends[expert] == end
        assert experts[first:end].tolist() == [expert] * len(slots) + [-1] * (end - first - len(slots))
    assert (experts[end:] == -1).all()
    assert (row_map.cpu()[ids < 0] == -1).all()
    assert row_map.dtype == tokens.group_ends.dtype == experts.dtype == torch.int32


@pytest.mark.parametrize("routing", ["random", "one expert", "none"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_masked_blocks_hold_each_experts_tokens(size: tuple[int, int, int], routing: str) -> None:
    ids, x = _ids(size, routing), torch.randn(size[0], 40)
    scales, block = torch.randint(0, 255, (size[0], 3), dtype=torch.uint8), size[0] * size[1]
    tokens, row_map = ops.permute_masked(
        x.to(DEVICE), ids.to(DEVICE), size[2], block, scales=scales.to(DEVICE), column_major=True
    )
    assert tokens.hidden_states.shape == (size[2], block, 40)
    for expert in range(size[2]):
        slots = _slots(ids, expert)
        assert tokens.masked_m[expert] == len(slots)
        for row, (token, slot) in enumerate(slots):
            assert row_map[token, slot] == expert * block + row
            assert torch.equal(tokens.hidden_states[expert, row].cpu(), x[token])
            assert torch.equal(tokens.scales[expert, row].cpu(), scales[token])
    assert (row_map.cpu()[ids < 0] == -1).all()


@pytest.mark.parametrize("token_dtype", [one for one in TOKEN_DTYPES if one.scales != "token"], ids=str)
@pytest.mark.parametrize("size", [(0, 2, 3), (7, 3, 5), (3, 2, 0)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_tokens_rounded_on_the_way_are_those_rounded_before(
    size: tuple[int, int, int], token_dtype: TokenDtype, masked: bool
) -> None:
    ids, x = _ids(size, "random").to(DEVICE), torch.randn(size[0], 1100).bfloat16().to(DEVICE)[:, :1090]
    move = (
        partial(ops.permute_masked, x, ids, size[2], 3) if masked else partial(ops.permute_contiguous, x, ids, size[2])
    )
    codes, scales = ops.quantize(x, token_dtype)
    tokens, row_map = move(token_dtype=token_dtype)
    like = ops.quantize(torch.zeros_like(tokens.hidden_states, dtype=x.dtype), token_dtype)[1]
    assert tokens.hidden_states.dtype == codes.dtype
    assert (tokens.scales.dtype, tokens.scales.shape, tokens.scales.stride()) == (like.dtype, like.shape, like.stride())
    rows, row_scales = tokens.hidden_states.flatten(0, -2), tokens.scales.flatten(0, -2)
    for token, slot in (row_map >= 0).nonzero().tolist():
        row = row_map[token, slot]
        assert torch.equal(rows[row].view(torch.int8), codes[token].view(torch.int8))
        assert torch.equal(row_scales[row], scales[token])


def test_a_full_block_takes_no_more_and_says_so() -> None:
    ids, x = torch.tensor([[1, 0], [1, 1], [1, -1]], device=DEVICE), torch.randn(3, 8, device=DEVICE)
    tokens, row_map = ops.permute_masked(x, ids, 2, 2)
    assert tokens.masked_m.tolist() == [1, 4]
    assert row_map.tolist() == [[2, 0], [3, -1], [-1, -1]]
    assert torch.equal(tokens.hidden_states[1], x[:2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("masked", [False, True])
def test_strided_inputs_are_taken_as_they_are(masked: bool, dtype: torch.dtype) -> None:
    ids, x = _ids((9, 4, 6), "random").to(DEVICE, dtype), torch.randn(9, 24, device=DEVICE)
    scales = torch.rand(9, 2, device=DEVICE)
    strided = [tensor.t().contiguous().t() for tensor in (x, ids, scales)]
    move = (lambda x, i, s: ops.permute_masked(x, i, 6, 36, scales=s)) if masked else (
        lambda x, i, s: ops.permute_contiguous(x, i, 6, scales=s)
    )  # fmt: skip
    (want, row_map), (got, strided_map) = move(x, ids, scales), move(*strided)
    assert torch.equal(row_map, strided_map)
    rows = row_map[row_map >= 0].long()
    for name in ("hidden_states", "scales"):
        assert torch.equal(getattr(want, name).flatten(0, -2)[rows], getattr(got, name).flatten(0, -2)[rows])


@pytest.mark.parametrize("strided", [lambda x: x.t().contiguous().t(), lambda x: torch.cat([x, x], 1)[:, : x.shape[1]]])
def test_rows_may_be_strided_too(strided: Callable[[Tensor], Tensor]) -> None:
    rows, token_dtype = torch.randn(6, 256, device=DEVICE), TokenDtype("fp8", "row_128")
    row_map, weights = torch.tensor([[5, 0], [2, -1]], device=DEVICE), torch.rand(2, 2, device=DEVICE)
    real = torch.tensor([0, -1, 1, 1, -1, 2], dtype=torch.int32, device=DEVICE)

    def results(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        some = real.clone() if change is not strided else real.repeat_interleave(2)[::2]
        activated = ops.activate(change(rows), SWIGLU, real=some)[real >= 0]
        codes = ops.quantize(change(rows), token_dtype, real=some)[0].float()[real >= 0]
        return [activated, codes, ops.combine(change(rows), change(row_map), change(weights), torch.float32)]

    for got, want in zip(results(strided), results(torch.clone), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("masked", [False, True])
def test_codes_and_weighted_rows_are_moved(masked: bool) -> None:
    ids, x, weights = torch.tensor([[1, -1], [0, 1], [1, 1]]), torch.randn(3, 16), torch.rand(3, 2)
    extra = (2, 4) if masked else (2,)
    move: Callable[..., tuple[ContiguousTokens | MaskedTokens, Tensor]] = (
        ops.permute_masked if masked else ops.permute_contiguous
    )
    codes = x.to(torch.float8_e4m3fn)
    tokens, row_map = move(codes.to(DEVICE), ids.to(DEVICE), *extra)
    weighted, _ = move(x.bfloat16().to(DEVICE), ids.to(DEVICE), *extra, row_weights=weights.to(DEVICE))
    assert tokens.hidden_states.dtype == torch.float8_e4m3fn
    for token, slot in (ids >= 0).nonzero().tolist():
        row = int(row_map[token, slot])
        assert torch.equal(tokens.hidden_states.flatten(0, -2)[row].float().cpu(), codes[token].float())
        want = (x[token].bfloat16().float() * weights[token, slot]).bfloat16()
        assert torch.equal(weighted.hidden_states.flatten(0, -2)[row].cpu(), want)


@pytest.mark.parametrize("rows", [(9,), (2, 5)], ids=["contiguous", "masked"])
def test_column_major_scales_have_columns_of_16_bytes(rows: tuple[int, ...]) -> None:
    for word, num_words in (("column_128", 3), ("ue8m0_128", 1)):
        _, scales = ops.quantize(torch.randn(*rows, 300, device=DEVICE), TokenDtype("fp8", word))
        padded = -(-rows[-1] // 4) * 4
        assert scales.shape == (*rows, num_words)
        assert scales.stride() == (*[num_words * padded] * (len(rows) - 1), 1, padded)


def _some_rows(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """What says which rows exist, and for each whether it does."""
    if len(shape) == 3:
        counts = torch.randint(0, shape[1] + 1, (shape[0],), dtype=torch.int32)
        return counts, torch.arange(shape[1]) < counts[:, None]
    experts = torch.randint(-1, 3, (shape[0],), dtype=torch.int32)
    return experts, experts >= 0


@pytest.mark.parametrize(
    ("shape", "dtype"), [((13, 80), torch.float32), ((13, 80), torch.bfloat16), ((3, 4, 80), torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_activation_of_the_rows_that_exist(spec: ActivationSpec, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    hidden = (torch.randn(shape) * 2).to(dtype)
    real, there = _some_rows(shape)
    want = activate(hidden.double().flatten(0, -2), spec).view(*shape[:-1], 80 // spec.rows_per_channel)
    hidden[~there] = torch.nan
    got = ops.activate(hidden.to(DEVICE), spec, real=real.to(DEVICE)).cpu()
    assert got.dtype == dtype
    assert got.shape == want.shape
    # fp32 exponentials of GPUs are good to about 1e-6; the only rounding is half a unit of the dtype's last place.
    bound = 2e-6 + (2.0**-8 if dtype == torch.bfloat16 else 0.0)
    assert not there.any() or relative_error(got[there], want[there]) < bound
    everything = ops.activate(hidden.to(DEVICE), spec).cpu()
    assert torch.equal(everything[there], got[there])


@pytest.mark.parametrize("shape", [(13, 80), (3, 4, 80)], ids=str)
def test_rows_that_do_not_exist_are_not_written(implementation: str, shape: tuple[int, ...]) -> None:
    if implementation == "torch" and DEVICE == "cuda":
        pytest.skip("torch would wait for the device to find them")
    rows, (real, there) = torch.randn(shape, device=DEVICE), _some_rows(shape)
    # Fresh memory is NaN here.
    real = real.to(DEVICE)
    written = ops.activate(rows, SWIGLU, real=real), ops.quantize(rows, TOKEN_DTYPES[-1], real=real)[1]
    for result in written:
        assert torch.equal(result.cpu().isnan().view(*shape[:-1], -1).any(-1), ~there)


@pytest.mark.parametrize("rows", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_rows_stay_no_rows(rows: tuple[int, ...]) -> None:
    hidden = torch.empty(*rows, 256, device=DEVICE)
    real = torch.empty(rows[0], dtype=torch.int32, device=DEVICE).fill_(0)
    assert ops.activate(hidden, SWIGLU, real=real).shape == (*rows, 128)
    for token_dtype in TOKEN_DTYPES:
        codes, scales = ops.quantize(hidden, token_dtype, activation=SWIGLU, real=real)
        assert codes.shape == (*rows, 128)
        assert scales.shape == (rows if token_dtype.scales == "token" else (*rows, 1))


def _exact_codes(values: Tensor, token_dtype: TokenDtype) -> tuple[Tensor, Tensor]:
    """Codes as floats `[R, C]` and scales `[R, G]` by the documented formula: divisions in float64, rounded to fp32."""
    largest = 448.0 if token_dtype.dtype == "fp8" else 127.0
    width = values.shape[1]
    group = width if token_dtype.scales == "token" else 128
    padded = torch.nn.functional.pad(values.double(), (0, -width % group)).unflatten(1, (-1, group))
    scales = (padded.abs().amax(-1) / largest).float()
    if token_dtype.scales == "ue8m0_128":
        scales = torch.where(scales == 0, 0.0, 2.0 ** scales.double().log2().ceil()).float()
    divisor = torch.where(scales == 0, 1.0, scales)[..., None].double()
    quotient = (padded / divisor).float().flatten(1)[:, :width].clamp(-largest - (largest == 127), largest)
    return (quotient.to(torch.float8_e4m3fn).float() if largest == 448 else quotient.round()), scales


def _unpacked(scales: Tensor, num_groups: int) -> Tensor:
    """Packed words `[R, W]` -> the powers of two of `num_groups` groups; what is past them must be zero."""
    exponents = torch.stack([(scales >> shift) & 255 for shift in (0, 8, 16, 24)], -1).flatten(1)
    assert not exponents[:, num_groups:].any()
    values = 2.0 ** (exponents[:, :num_groups].double() - 127)
    return torch.where(exponents[:, :num_groups] == 0, 0.0, values).float()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((11, 300), torch.float32), ((3, 5, 640), torch.bfloat16), ((2, 3, 40), torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("token_dtype", TOKEN_DTYPES, ids=str)
def test_codes_and_scales_are_the_formulas(token_dtype: TokenDtype, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = (torch.randn(shape) * 2.0 ** torch.randint(-20, 6, (*shape[:-1], 1))).to(dtype)
    rows.view(-1, shape[-1])[:1] = 0
    real, there = _some_rows(shape)
    want_codes, want_scales = _exact_codes(rows[there], token_dtype)
    rows[~there] = torch.nan
    codes, scales = ops.quantize(rows.to(DEVICE), token_dtype, real=real.to(DEVICE))
    assert codes.shape == rows.shape
    assert codes.is_contiguous()
    found = scales.cpu()[there]
    found = _unpacked(found, want_scales.shape[1]) if token_dtype.scales == "ue8m0_128" else found.view_as(want_scales)
    assert torch.equal(found, want_scales)
    assert torch.equal(codes.cpu()[there].float(), want_codes)


@pytest.mark.parametrize("token_dtype", [TOKEN_DTYPES[0], TOKEN_DTYPES[2], TOKEN_DTYPES[-1]], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_activation_and_quantization_are_one_rounding(spec: ActivationSpec, token_dtype: TokenDtype) -> None:
    hidden = (torch.randn(2, 3, 300 * spec.rows_per_channel) * 2).bfloat16()
    real, there = _some_rows(hidden.shape)
    hidden[~there] = torch.nan
    got = ops.quantize(hidden.to(DEVICE), token_dtype, activation=spec, real=real.to(DEVICE))
    # fp32 is what the activation is computed in, so that nothing is rounded in between here either.
    want = ops.quantize(ops.activate(hidden.float().to(DEVICE), spec), token_dtype)
    for part, wanted in zip(got, want, strict=True):
        assert torch.equal(part.cpu()[there].float(), wanted.cpu()[there].float())
    assert got[0].shape == (2, 3, 300)


@pytest.mark.parametrize("token_dtype", TOKEN_DTYPES, ids=str)
def test_nan_stays_in_its_row_and_is_not_lost(token_dtype: TokenDtype) -> None:
    rows = torch.randn(3, 128)
    rows[1, 5] = torch.nan
    codes, scales = (part.cpu() for part in ops.quantize(rows.to(DEVICE), token_dtype))
    if token_dtype.scales == "ue8m0_128":
        assert scales[1] == 255
    else:
        assert scales[1].isnan().all()
    assert token_dtype.dtype == "fp8" or codes[1, 5] == 0
    clean = ops.quantize(rows[[0, 2]].to(DEVICE), token_dtype)
    assert torch.equal(codes[[0, 2]].float(), clean[0].cpu().float())


def test_tokens_for_the_wire_are_the_values_of_a_block_scheme() -> None:
    x = torch.randn(5, 200)
    codes, scales = (part.cpu() for part in ops.quantize(x.to(DEVICE), TokenDtype("fp8", "row_128")))
    got = codes.float() * scales.repeat_interleave(128, dim=1)[:, :200]
    assert torch.equal(got, ActivationRounder.of(SCHEMES["fp8_block128"])(x)[0])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_combine_weights_scales_and_skips(factor: float, index: torch.dtype) -> None:
    rows, weights = torch.randn(3, 4, 70).bfloat16(), torch.rand(5, 3)
    row_map = torch.randperm(15).view(5, 3)
    row_map[row_map >= 12] = -1
    row_map[4] = -1
    weights[row_map < 0] = torch.nan
    flat = rows.view(12, 70)
    want = torch.zeros(5, 70, dtype=torch.float64)
    for token, slot in (row_map >= 0).nonzero().tolist():
        want[token] += flat[row_map[token, slot]].double() * weights[token, slot].double()
    unused = sorted(set(range(12)) - set(row_map.flatten().tolist()))
    flat[unused] = torch.nan
    arguments = rows.to(DEVICE), row_map.to(DEVICE, index), weights.to(DEVICE)
    got = ops.combine(*arguments, torch.float32, scaling_factor=factor).cpu()
    # Two fp32 roundings per slot and one of the factor.
    torch.testing.assert_close(got.double(), want * factor, rtol=4e-7, atol=4e-7)
    narrow = ops.combine(*arguments, torch.bfloat16, scaling_factor=factor).cpu()
    assert torch.equal(narrow, got.bfloat16())
    assert (narrow[4] == 0).all()


def test_combine_of_no_tokens_and_of_weighted_rows() -> None:
    rows = torch.randn(4, 6, device=DEVICE)
    none = torch.empty(0, 2, dtype=torch.int32, device=DEVICE)
    assert ops.combine(rows, none, none.float(), torch.bfloat16).shape == (0, 6)
    row_map = torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE)
    assert torch.equal(ops.combine(rows, row_map, None, torch.float32)[0], rows[3] + rows[1])


@pytest.mark.error_path
def test_what_no_kernel_writes_is_refused() -> None:
    rows = torch.zeros(2, 128, device=DEVICE)
    with pytest.raises(SpecError, match=r"cannot be quantized to nvfp4/block_16; known: fp8, int8 with scales row_128"):
        ops.quantize(rows, TokenDtype("nvfp4", "block_16"))
    for call in (ops.activate, lambda x, spec: ops.quantize(x, TOKEN_DTYPES[0], activation=spec)):
        with pytest.raises(SpecError, match="'module'"):
            call(rows, ActivationSpec(kind="module"))


@pytest.mark.error_path
def test_codes_cannot_be_weighted() -> None:
    codes = torch.zeros(2, 128, dtype=torch.int8, device=DEVICE)
    ids = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    for move in (ops.permute_contiguous, lambda *a, **k: ops.permute_masked(*a, 2, **k)):
        with pytest.raises(InputError, match=r"row_weights multiply float tokens, got torch\.int8"):
            move(codes, ids, 1, row_weights=torch.ones(2, 1, device=DEVICE))


@pytest.mark.error_path
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int32])
def test_codes_are_not_rounded_as_if_they_were_values(dtype: torch.dtype) -> None:
    codes = torch.ones(2, 128).to(dtype).to(DEVICE)
    ids = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    for call in (
        lambda: ops.permute_contiguous(codes, ids, 1, token_dtype=_FP8),
        lambda: ops.permute_masked(codes, ids, 1, 2, token_dtype=_FP8),
        lambda: ops.quantize(codes, _FP8),
        lambda: ops.activate(codes, SWIGLU),
        lambda: ops.permute_contiguous(codes, ids, 1, row_weights=torch.ones(2, 1, device=DEVICE)),
    ):
        with pytest.raises(InputError, match=f"float.*got {re.escape(str(dtype))}"):
            call()


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, ids, w: ops.permute_contiguous(x, ids[:2], 3), "topk_ids: expected [3, K] for 3 tokens, got [2, 2]"),
        (lambda x, ids, w: ops.permute_masked(x[:2], ids, 3, 4), "topk_ids: expected [2, K] for 2 tokens, got [3, 2]"),
        (lambda x, ids, w: ops.permute_contiguous(x, ids[:, 0], 3), "topk_ids: expected [3, K]"),
        (lambda x, ids, w: ops.permute_contiguous(x, ids, 3, row_weights=w[:, :1]), "row_weights: expected [3, 2]"),
        (lambda x, ids, w: ops.permute_masked(x, ids, 3, 4, scales=w[0]), "scales: expected [3, G], got [2]"),
        (lambda x, ids, w: ops.permute_masked(x, ids, 3, 4, scales=w[:2]), "scales: expected [3, G], got [2, 2]"),
        (
            lambda x, ids, w: ops.permute_contiguous(x, ids, 3, token_dtype=TokenDtype("int8", "token")),
            "scales of groups",
        ),
        (lambda x, ids, w: ops.permute_masked(x, ids, 3, 4, scales=w, token_dtype=_FP8), "token_dtype: float tokens"),
        (lambda x, ids, w: ops.permute_contiguous(x, ids, 3, row_weights=w, token_dtype=_FP8), "`quantize` the rows"),
        (lambda x, ids, w: ops.permute_masked(x[:, :0], ids, 3, 4), "hidden_states: expected [T, H] with H >= 1"),
        (lambda x, ids, w: ops.permute_contiguous(x[:, :0], ids, 3, token_dtype=_FP8), "got [3, 0]"),
        (
            lambda x, ids, w: ops.permute_contiguous(x[:, 0], ids, 3),
            "hidden_states: expected [T, H] with H >= 1, got [3]",
        ),
        (lambda x, ids, w: ops.quantize(x[:, :0], _FP8), "rows: expected [R, C] or [L, M, C] with C >= 1, got [3, 0]"),
        (lambda x, ids, w: ops.quantize(x[0], _FP8), "rows: expected [R, C] or [L, M, C] with C >= 1, got [5]"),
        (lambda x, ids, w: ops.activate(x[:, :0], SWIGLU), "with C >= 1, got [3, 0]"),
        (
            lambda x, ids, w: ops.permute_contiguous(x, ids, 3, column_major=True, token_dtype=_FP8),
            "column_major: fp8/row_128 says how its scales lie",
        ),
        (
            lambda x, ids, w: ops.permute_masked(
                x, ids, 3, 4, column_major=True, token_dtype=TokenDtype("int8", "column_128")
            ),
            "column_major: int8/column_128 says how its scales lie",
        ),
        (lambda x, ids, w: ops.combine(x, ids, w[:, :1], torch.float32), "topk_weights: expected [3, 2] of row_map"),
        (lambda x, ids, w: ops.activate(x, SWIGLU), "expected [.., 2 I], got [3, 5]"),
        (lambda x, ids, w: ops.activate(x[:, :4], SWIGLU, real=ids[:2, 0]), "real: expected [3] for rows [3, 4]"),
        (lambda x, ids, w: ops.quantize(x, TokenDtype("int8", "token"), activation=SWIGLU), "got [3, 5]"),
        (lambda x, ids, w: ops.quantize(x, TokenDtype("int8", "token"), real=ids), "real: expected [3]"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        call(torch.ones(3, 5), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2))
