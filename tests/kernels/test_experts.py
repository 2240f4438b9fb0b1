"""The experts on every format against the float64 layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch

from moe_core.activation import ActivationSpec
from moe_core.kernels.activation import activation_function
from moe_core.kernels.combine import combine
from moe_core.kernels.expert_weights import ExpertLinear, Experts, StoredLinear
from moe_core.kernels.experts import experts_contiguous, experts_masked, experts_standard
from moe_core.kernels.linear import linear_by_expert
from moe_core.kernels.permute import gather_masked, gather_rows, masked_row_map, permute
from moe_core.payloads import Tensor
from moe_core.quant import QuantScheme

_SWIGLU = ActivationSpec()
_DTYPES = list(oracle.TOLERANCE)
_VARIANTS = [
    _SWIGLU,
    ActivationSpec(kind="gelu_tanh", row_order="interleaved"),
    ActivationSpec(kind="relu2", gated=False),
    ActivationSpec(alpha=1.702, limit=0.9, beta=1.0, row_order="interleaved"),
]


def _experts(params: dict[str, Any], spec: ActivationSpec, *, deterministic: bool = False) -> Experts:
    scheme = QuantScheme.from_name({torch.float32: "fp32", torch.bfloat16: "bf16"}.get(params["w13"].dtype, "fp16"))
    return Experts(
        w13=ExpertLinear.of(scheme, params["w13"], bias=params.get("b13")),
        w2=ExpertLinear.of(scheme, params["w2"], bias=params.get("b2")),
        activation=activation_function(spec),
        post_norm=params.get("post_norm"),
        weight_on_input=params.get("weight_on_input", False),
        deterministic=deterministic,
    )


def _check(params: dict[str, Any], tokens: tuple[Tensor, Tensor, Tensor], spec: ActivationSpec = _SWIGLU) -> Tensor:
    x, ids, weights = tokens
    before = [tensor.clone() for tensor in tokens]
    got = experts_standard(x, ids, weights, _experts(params, spec))
    assert got.dtype == x.dtype
    assert oracle.relative_error(got, oracle.layer(x, ids, weights, params, spec)) < oracle.TOLERANCE[x.dtype]
    assert all(torch.equal(old, new) for old, new in zip(before, tokens, strict=True))
    return got


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spec", _VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_layer_equals_its_definition(dtype: torch.dtype, spec: ActivationSpec, bias: bool) -> None:
    params = oracle.make_params(6, 32, 24, dtype, gated=spec.gated, bias=bias)
    _check(params, oracle.make_tokens(19, 32, 6, 3, dtype), spec)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "inner", "experts", "top_k"), [
    (0, 8, 8, 4, 2), (1, 8, 8, 4, 1), (2, 7, 5, 3, 3), (33, 51, 37, 9, 2), (70, 65, 3, 2, 1), (5, 1, 1, 2, 2),
])  # fmt: skip
def test_odd_sizes(dtype: torch.dtype, tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> None:
    _check(oracle.make_params(experts, hidden, inner, dtype), oracle.make_tokens(tokens, hidden, experts, top_k, dtype))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_weights_of_more_than_one_block(dtype: torch.dtype) -> None:
    # 1100 rows of 1000 fp32 values exceed one thread's block, and do not divide into blocks.
    _check(oracle.make_params(2, 1000, 550, dtype), oracle.make_tokens(6, 1000, 2, 1, dtype))


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 140])
@pytest.mark.parametrize("outputs_per_thread", [16, 1100, 2048])
def test_blocks_are_divided_among_threads(
    threads: int, outputs_per_thread: int, num_rows: int, transposed: bool
) -> None:
    weight = torch.randint(-128, 128, (1, outputs_per_thread * threads, 1000), dtype=torch.int8)
    weight = weight.mT.contiguous().mT if transposed else weight
    rows = torch.randint(-8, 9, (num_rows, 1000)).float()
    got = linear_by_expert(rows, None, [(0, 0, num_rows)], StoredLinear(weight=weight, weight_dtype="int8"))
    # Sums of whole numbers below 2 ** 24 are exact in fp32.
    assert torch.equal(got.double(), rows.double() @ weight[0].double().T)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("on_input", [False, True])
def test_second_bias_and_router_weight(dtype: torch.dtype, on_input: bool) -> None:
    params = oracle.make_params(4, 32, 16, dtype, bias=True) | {"weight_on_input": on_input}
    x, ids, _ = oracle.make_tokens(9, 32, 4, 2, dtype)
    # Powers of two: weighting the input in the layer's dtype is then exact.
    _check(params, (x, ids, 2.0 ** torch.randint(-2, 2, (9, 2))))


def test_post_norm_comes_after_the_bias_and_before_the_router_weight() -> None:
    params = oracle.make_params(4, 32, 16, torch.float32, bias=True)
    params["post_norm"] = lambda y: y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    _check(params, oracle.make_tokens(9, 32, 4, 2, torch.float32))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("tokens", [2, 40])
def test_transposed_weights_are_read_in_place(dtype: torch.dtype, tokens: int) -> None:
    params = oracle.make_params(4, 32, 24, dtype)
    params = {name: weight.mT.contiguous().mT for name, weight in params.items()}
    _check(params, oracle.make_tokens(tokens, 32, 4, 2, dtype))


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_missing_duplicate_and_strided_ids(id_dtype: torch.dtype) -> None:
    params = oracle.make_params(5, 16, 8, torch.float32)
    x, ids, weights = oracle.make_tokens(6, 16, 5, 3, torch.float32)
    ids[0, 1], ids[1], ids[2, :2] = -1, -1, 4
    x[1] = torch.nan
    ids = ids.to(id_dtype).t().contiguous().t()
    got = experts_standard(x, ids, weights, _experts(params, _SWIGLU))
    want = oracle.layer(x, ids, weights, params, _SWIGLU)
    assert torch.equal(got[1], torch.zeros(16))
    assert oracle.relative_error(got, want) < oracle.TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("tokens", [2, 30])
def test_idle_experts_are_not_touched(tokens: int, dtype: torch.dtype) -> None:
    params = oracle.make_params(6, 16, 8, dtype, bias=True)
    for tensor in params.values():
        tensor[2:] = torch.nan
    x, _, weights = oracle.make_tokens(tokens, 16, 6, 2, dtype)
    _check(params, (x, torch.randint(0, 2, (tokens, 2)), weights))


@pytest.mark.parametrize("rows", [1, 8])
def test_fp16_survives_a_raw_expert_output_beyond_its_range(rows: int) -> None:
    params = oracle.make_params(2, 64, 64, torch.float16)
    params["w2"] = (params["w2"] * 20).half()
    x = (torch.randn(rows, 64) * 60).half()
    ids, weights = torch.zeros(rows, 1).long(), torch.full((rows, 1), 2.0**-6)
    raw = oracle.layer(x, ids, torch.ones(rows, 1), params, _SWIGLU)
    assert raw.abs().max() > torch.finfo(torch.float16).max
    _check(params, (x, ids, weights))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("alignment", [1, 4])
def test_padded_formats_give_each_slots_row(dtype: torch.dtype, alignment: int) -> None:
    params = oracle.make_params(6, 16, 8, dtype, bias=True)
    x, ids, weights = oracle.make_tokens(9, 16, 6, 2, dtype)
    ids[3], ids[ids == 5] = -1, 0
    want, experts = oracle.layer(x, ids, weights, params, _SWIGLU), _experts(params, _SWIGLU)
    permutation = permute(ids, 6, alignment)
    rows = gather_rows(x, permutation)
    rows[[r for r in range(rows.shape[0]) if r not in permutation.row_map.flatten().tolist()]] = torch.nan
    out = experts_contiguous(rows, permutation.num_tokens_per_expert, permutation.group_ends, experts)
    assert out.shape == rows.shape
    got = combine(out, permutation.row_map, weights, dtype)
    assert oracle.relative_error(got, want) < oracle.TOLERANCE[dtype]
    row_map, masked_m = masked_row_map(ids, 6, 18)
    out = experts_masked(gather_masked(x, row_map, 6, 18), masked_m, experts)
    got = combine(out.view(-1, 16), row_map, weights, dtype)
    assert oracle.relative_error(got, want) < oracle.TOLERANCE[dtype]


def test_module_activation_is_called_with_whole_rows() -> None:
    params = oracle.make_params(3, 16, 8, torch.float32)
    experts = _experts(params, _SWIGLU)
    experts.activation = lambda h: torch.tanh(h[:, :8]) + h[:, 8:]
    x, ids, weights = oracle.make_tokens(5, 16, 3, 1, torch.float32)
    got = experts_standard(x, ids, weights, experts)
    h = torch.stack([params["w13"][e].double() @ x[t].double() for t, e in enumerate(ids[:, 0].tolist())])
    rows = torch.tanh(h[:, :8]) + h[:, 8:]
    want = torch.stack([params["w2"][e].double() @ rows[t] for t, e in enumerate(ids[:, 0].tolist())]) * weights
    assert oracle.relative_error(got, want) < oracle.TOLERANCE[torch.float32]


def test_parameters_that_require_grad_are_accepted() -> None:
    params = {n: w.requires_grad_() for n, w in oracle.make_params(3, 16, 8, torch.float32).items()}
    x, ids, weights = oracle.make_tokens(5, 16, 3, 2, torch.float32)
    assert not experts_standard(x, ids, weights, _experts(params, _SWIGLU)).requires_grad
