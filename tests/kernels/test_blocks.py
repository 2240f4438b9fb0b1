"""Blocks of rows whose expert only the device knows: numbers on CPU tensors, static sizes, and no read of data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import oracle
import pytest
import torch
from layers import build, random_tensors, random_tokens, torch_manager
from quantized import QUANTS, random_quantized
from without_data import DEVICE, NothingOfTheHost

from moe_core import LayerRequest, MoELayer, RawWeights, make_plan
from moe_core.activation import ActivationSpec
from moe_core.backends.torch import experts as runner
from moe_core.backends.torch.weights import prepare
from moe_core.bench.memory import held_bytes
from moe_core.bound import BoundExperts, BoundRoute
from moe_core.environment import load_environment
from moe_core.kernels import blocks, expert_weights, experts, linear_op, permute
from moe_core.kernels.activation import activation_function
from moe_core.kernels.blocks import experts_of_blocks, linear_by_block, rows_per_block
from moe_core.kernels.expert_weights import ExpertLinear, Experts, StoredLinear, has_grouped_gemm
from moe_core.kernels.experts import experts_contiguous, experts_masked, experts_standard
from moe_core.kernels.linear import linear_by_expert
from moe_core.kernels.permute import max_rows
from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.quant import SCHEMES, W8A8_INT8, LayerQuant, QuantScheme
from moe_core.testing.allocations import Allocations

_FORMATS = ("standard", "contiguous", "masked")
_FLOATS = ("fp32", "bf16", "fp16")
#: Widths that no group of 32 and no tile of 128 divides.
_BASE = LayerRequest(num_experts=4, top_k=3, hidden_size=72, intermediate_size=48, bias=True)
#: As in the tests of the loop: a code on the other side of a tie changes one of some thousand products.
_TOLERANCE = {"fp32": 2e-3, "bf16": 8e-3, "fp16": 2e-3}


@pytest.fixture
def as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers on this CPU take the way of other devices: blocks, static bounds, no way of one token."""

    def in_blocks(**fields: Any) -> Experts:
        made = Experts(**fields)
        made.takes_blocks = True
        return made

    monkeypatch.setattr(runner, "Experts", in_blocks)
    monkeypatch.setattr(experts, "takes_one_token", lambda *_: False)
    monkeypatch.setattr(permute, "_num_rows", lambda slots, count, alignment, ends: max_rows(slots, count, alignment))


def _request(name: str, **more: Any) -> LayerRequest:
    if name in _FLOATS:
        return attrs.evolve(_BASE, dtype=name, quant=LayerQuant.of(SCHEMES[name]), **more)
    quant = QUANTS[name]
    dtype = "fp32" if quant.w13.is_quantized and quant.w2.is_quantized else "bf16"
    return attrs.evolve(_BASE, quant=quant, dtype=dtype, **more)


def _layer(request: LayerRequest, seed: int = 0) -> tuple[MoELayer, dict[str, Any]]:
    """A layer on the CPU and what its weights mean."""
    if not request.quant.w13.is_quantized and not request.quant.w2.is_quantized:
        tensors = random_tensors(request, seed)
        return build(request, tensors), dict(tensors)
    tensors, meaning = random_quantized(request, seed)
    return build(request, tensors), meaning


def _require_right(layer: MoELayer, meaning: dict[str, Any], tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    request = layer.plan.request
    want = oracle.layer(*tokens, meaning | {"weight_on_input": request.weight_on_input}, request.activation)
    assert oracle.relative_error(layer(*tokens), want) < _TOLERANCE[request.dtype]


@pytest.mark.usefixtures("as_elsewhere")
@pytest.mark.parametrize("mode", _FORMATS)
@pytest.mark.parametrize("name", [*_FLOATS, *QUANTS])
def test_numbers_of_every_scheme_and_format(name: str, mode: str) -> None:
    layer, meaning = _layer(_request(name, a2a_backend=f"none.{mode}"))
    for num_tokens in (9, 1):
        _require_right(layer, meaning, random_tokens(layer.plan.request, num_tokens))


def _idle_experts(ids: Tensor) -> Tensor:
    return torch.where(ids >= 0, ids % 2 + 1, ids)


@pytest.mark.usefixtures("as_elsewhere")
@pytest.mark.parametrize("mode", _FORMATS)
@pytest.mark.parametrize("name", ["fp16", "fp8_block128", "fp8_tensor_dynamic", "fp8_tensor_static"])
@pytest.mark.parametrize(
    ("num_tokens", "routing"),
    [
        pytest.param(0, lambda ids: ids, id="no token"),
        pytest.param(9, torch.zeros_like, id="all at the first expert"),
        pytest.param(9, lambda ids: torch.full_like(ids, 3), id="all at the last expert"),
        pytest.param(9, lambda ids: torch.full_like(ids, -1), id="no expert"),
        pytest.param(33, _idle_experts, id="idle experts at both ends"),
        pytest.param(1, lambda ids: ids.clamp(min=0), id="fewer rows than experts"),
    ],
)
def test_routings(name: str, mode: str, num_tokens: int, routing: Callable[[Tensor], Tensor]) -> None:
    layer, meaning = _layer(_request(name, a2a_backend=f"none.{mode}"))
    x, ids, weights = random_tokens(layer.plan.request, num_tokens)
    _require_right(layer, meaning, (x, routing(ids), weights))


@pytest.mark.usefixtures("as_elsewhere")
@pytest.mark.parametrize("name", [*_FLOATS, "w4a16_int4_g128", "nvfp4"])
def test_router_weights_on_the_input(name: str) -> None:
    layer, meaning = _layer(_request(name, weight_on_input=True))
    x, ids, weights = random_tokens(layer.plan.request, 9)
    # Powers of two: weighting the input in the layer's dtype is then exact.
    _require_right(layer, meaning, (x, ids, torch.exp2(weights.log2().round())))


@pytest.mark.usefixtures("as_elsewhere")
@pytest.mark.parametrize("name", ["fp32", "w8a8_int8"])
@pytest.mark.parametrize("mode", _FORMATS)
def test_ranks_without_experts_add_nothing(name: str, mode: str) -> None:
    layer, _ = _layer(_request(name, a2a_backend=f"none.{mode}"))
    without = layer._bound.routes[0].experts.args[0]
    for linear in (without.w13, without.w2):
        for field in ("weight", "scale", "output_scale", "bias"):
            if getattr(linear, field) is not None:
                setattr(linear, field, getattr(linear, field)[:0])
    x, ids, weights = random_tokens(layer.plan.request, 5)
    if mode == "standard":
        assert torch.equal(experts_standard(x, torch.full_like(ids, -1), weights, without), torch.zeros_like(x))
        return
    none = torch.zeros(0, dtype=torch.int32)
    if mode == "contiguous":
        assert experts_contiguous(x, none, none, without).shape == x.shape
    else:
        assert experts_masked(x.new_empty(0, 3, 72), none, without).shape == (0, 3, 72)


def _plain_experts(params: dict[str, Any]) -> Experts:
    scheme = QuantScheme.from_name({torch.float32: "fp32", torch.bfloat16: "bf16"}.get(params["w13"].dtype, "fp16"))
    made = Experts(
        w13=ExpertLinear.of(scheme, params["w13"], bias=params.get("b13")),
        w2=ExpertLinear.of(scheme, params["w2"], bias=params.get("b2")),
        activation=activation_function(ActivationSpec()),
        post_norm=params.get("post_norm"),
    )
    made.takes_blocks = True
    return made


def test_a_norm_after_the_experts() -> None:
    params = oracle.make_params(4, 32, 16, torch.float32, bias=True)
    params["post_norm"] = lambda y: y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    x, ids, weights = oracle.make_tokens(9, 32, 4, 2, torch.float32)
    got = experts_standard(x, ids, weights, _plain_experts(params))
    assert oracle.relative_error(got, oracle.layer(x, ids, weights, params, ActivationSpec())) < 2e-6


@pytest.mark.parametrize("dtype", list(oracle.TOLERANCE))
def test_idle_experts_full_of_nan_do_not_matter(dtype: torch.dtype) -> None:
    # Blocks past the last group read the last expert.
    params = oracle.make_params(6, 20, 12, dtype, bias=True)
    for tensor in params.values():
        tensor[2:] = torch.nan
    x, _, weights = oracle.make_tokens(13, 20, 6, 2, dtype)
    ids = torch.randint(0, 2, (13, 2))
    ids[5] = -1
    got = experts_standard(x, ids, weights, _plain_experts(params))
    assert oracle.relative_error(got, oracle.layer(x, ids, weights, params, ActivationSpec())) < oracle.TOLERANCE[dtype]


@pytest.mark.parametrize("alignment", [1, 3])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_tensor_dynamic", "mxfp4"])
@pytest.mark.usefixtures("as_elsewhere")
def test_poison_in_padding_reaches_no_row(name: str, alignment: int) -> None:
    layer, _ = _layer(_request(name))
    made, dtype = layer._bound.routes[0].experts.args[0], TORCH_DTYPES[layer.plan.request.dtype]
    counts = torch.tensor([2, 0, 4, 1], dtype=torch.int32)
    ends = (-(-counts // alignment) * alignment).cumsum(0, dtype=torch.int32)
    starts = ends - -(-counts // alignment) * alignment
    real = torch.cat([torch.arange(s, s + c) for s, c in zip(starts.tolist(), counts.tolist(), strict=True)])
    values, tight = torch.randn(7, 72).to(dtype), counts.cumsum(0, dtype=torch.int32)
    want = experts_contiguous(values, counts, tight, made)
    is_real = torch.arange(5) < counts[:, None]
    for poison in (torch.nan, torch.inf, 6e4):
        rows, masked = (torch.full(shape, poison, dtype=dtype) for shape in ((int(ends[-1]) + 5, 72), (4, 5, 72)))
        rows[real], masked[is_real] = values, values
        for got in (experts_contiguous(rows, counts, ends, made)[real], experts_masked(masked, counts, made)[is_real]):
            # Other sizes of blocks add up in another order.
            assert oracle.relative_error(got, want) < _TOLERANCE[layer.plan.request.dtype]


@pytest.fixture
def way_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of fp16 with results of fp32, on CPU."""
    bmm = torch.bmm

    def wide(rows: Tensor, weight: Tensor, *, out: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if rows.dtype == torch.float32:
            # The CPU's own loop, where it has several threads.
            return bmm(rows, weight, out=out)
        assert (rows.dtype, weight.dtype, out_dtype) == (torch.float16, torch.float16, torch.float32)
        return bmm(rows.float(), weight.float(), out=out)

    monkeypatch.setattr(blocks, "_writes_fp32", lambda device: True)
    monkeypatch.setattr(torch, "bmm", wide)


@pytest.mark.usefixtures("way_of_cuda")
def test_the_way_of_cuda_in_fp16_survives_what_fp16_cannot_hold() -> None:
    params = oracle.make_params(2, 64, 64, torch.float16)
    x, ids, weights = (torch.randn(8, 64) * 900).half(), torch.randint(0, 2, (8, 1)), torch.full((8, 1), 2.0**-7)
    hidden = x.double() @ params["w13"][0].double().T
    assert (hidden[:, :64] * hidden[:, 64:]).abs().max() > 10 * torch.finfo(torch.float16).max
    got = experts_standard(x, ids, weights / 64, _plain_experts(params))
    want = oracle.layer(x, ids, weights / 64, params, ActivationSpec())
    assert oracle.relative_error(got, want) < oracle.TOLERANCE[torch.float16]


def _fp16_product(by_blocks: bool, rows: Tensor, weight: Tensor) -> Tensor:
    """Each row times the same weight, by blocks or by the loop, which multiplies single rows as they are stored."""
    linear = StoredLinear(weight=weight.half()[None], weight_dtype="fp16")
    if by_blocks:
        return linear_by_block(rows, None, torch.zeros(len(rows), dtype=torch.int64), linear)
    return torch.cat([linear_by_expert(row[None], None, [(0, 0, 1)], linear) for row in rows])


@pytest.mark.usefixtures("way_of_cuda")
@pytest.mark.parametrize("by_blocks", [True, False])
def test_rows_of_any_size_are_multiplied_as_well_by_fp16(by_blocks: bool) -> None:
    exponents = torch.tensor([-145, -130, -126, -120, -60, -24, -20, -14, -8, 0, 7, 14, 20, 60, 110, 120])
    weight, sizes = torch.randn(24, 40).half() / 8, torch.randn(16, 40).double().clamp(-4, 4)
    rows = (sizes * 2.0 ** exponents[:, None]).float()
    want = rows.double() @ weight.double().T
    error = (_fp16_product(by_blocks, rows, weight).double() - want).abs().amax(1)
    # Rounded to fp16 once or twice, and below fp32's normal numbers to the multiples of 2 ** -149 that there are.
    assert (error <= 2.0**-10 * want.abs().amax(1) + 2.0**-149).all()


@pytest.mark.usefixtures("way_of_cuda")
@pytest.mark.parametrize("by_blocks", [True, False])
def test_zeros_infinities_and_nan_stay_what_they_are_in_fp16(by_blocks: bool) -> None:
    rows, weight = torch.full((4, 8), 2.0**-30), torch.ones(3, 8)
    rows[0], rows[1, 2], rows[2, 3], rows[3, 4] = 0.0, torch.inf, -torch.inf, torch.nan
    rows[1:3, 0] = torch.tensor([-3e38, 3e38])
    want = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])[:, None].expand(4, 3)
    assert torch.equal(_fp16_product(by_blocks, rows, weight).nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.usefixtures("way_of_cuda")
def test_rows_that_fp16_holds_give_the_bits_that_they_gave() -> None:
    rows, weight = torch.randint(-99, 100, (6, 40)).float(), torch.randint(-9, 10, (24, 40)).float()
    # Sums of whole numbers below 2 ** 24 are exact in fp32, whatever power of two they are multiples of.
    assert torch.equal(_fp16_product(True, rows / 64, weight), rows / 64 @ weight.T)


@pytest.mark.parametrize("budget", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("block", [1, 4])
def test_a_step_of_any_size_equals_the_loop(
    block: int, dtype: torch.dtype, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_STEP_BYTES", budget)
    weight = torch.randint(-9, 10, (3, 17, 33)).to(dtype)
    linear = StoredLinear(
        weight=weight.mT.contiguous().mT,
        weight_dtype="int8" if dtype == torch.int8 else "fp32",
        output_scale=2.0 ** torch.randint(-3, 4, (3, 17)),
        bias=torch.randint(-5, 6, (3, 17)).float(),
    )
    table = torch.tensor([0, 2, 2, 1, 0, 2, 1])
    rows, row_scale = torch.randint(-8, 9, (7 * block, 33)).float(), 2.0 ** torch.randint(-3, 4, (7 * block, 1))
    groups = [(expert, index * block, (index + 1) * block) for index, expert in enumerate(table.tolist())]
    # Sums of whole numbers below 2 ** 24 are exact in fp32.
    got = linear_by_block(rows, row_scale, table, linear)
    assert torch.equal(got, linear_by_expert(rows, row_scale, groups, linear))


def test_no_more_weights_are_fetched_than_a_step_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_STEP_BYTES", 1)
    codes = torch.randint(-127, 128, (8, 512, 512), dtype=torch.int8)
    linear, rows, table = StoredLinear(weight=codes, weight_dtype="int8"), torch.randn(16, 512), torch.arange(8)
    # Codes of one expert and their fp32 values, and the results.
    assert held_bytes(lambda: linear_by_block(rows, None, table, linear), "cpu") < 5 * 512 * 512 + 16 * 512 * 4 + 9999


@pytest.mark.parametrize("num_blocks", [4, 14])
@pytest.mark.parametrize("name", [*_FLOATS, *QUANTS])
def test_a_forward_holds_no_more_weights_than_is_stated(
    name: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = attrs.evolve(_request(name), hidden_size=256, intermediate_size=128)
    made = _route_without_data(request).experts.args[0]
    for linear in (made.w13, made.w2):
        per_weight = linear.num_outputs * linear.num_inputs * blocks._operand_dtype(linear).itemsize
        monkeypatch.setattr(blocks, "_STEP_BYTES", 2 * per_weight)
        rows = torch.empty(num_blocks, linear.num_inputs, device=DEVICE)
        table = torch.empty(num_blocks, dtype=torch.int64, device=DEVICE)
        with Allocations() as counted:
            out = linear_by_block(rows, None, table, linear)
        # Three times the results: what was rounded, and products before they are widened.
        assert 2 * per_weight < counted.peak < 1.75 * 2 * per_weight + 3 * out.nbytes


def test_sizes_are_bounded() -> None:
    for num_rows in (*range(1, 40), 1000, 16384):
        for num_experts in (1, 3, 8, 128):
            block = rows_per_block(num_rows, num_experts)
            padded = max_rows(num_rows, num_experts, block)
            assert block * num_experts >= num_rows
            assert padded // block <= min(num_rows, 2 * num_experts)
            assert padded <= 3 * num_rows
    assert rows_per_block(0, 4) == rows_per_block(5, 0) == 1


def test_the_table_of_blocks() -> None:
    ends = torch.tensor([0, 4, 4, 12, 12], dtype=torch.int32)
    assert experts_of_blocks(ends, 20, 4).tolist() == [1, 3, 3, 4, 4]


def test_full_graph_with_routings_and_sizes_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(rows: int, columns: int) -> ExpertLinear:
        codes = torch.randint(-127, 128, (4, rows, columns)).char()
        return ExpertLinear.of(W8A8_INT8, codes, output_scale=torch.rand(4, rows) / 100)

    made = Experts(w13=linear(96, 64), w2=linear(64, 48), activation=activation_function(ActivationSpec()))
    made.takes_blocks = True
    # Reads the sizes of groups.
    monkeypatch.delattr(linear_op, "active_groups")
    compiled = torch.compile(experts_standard, fullgraph=True, backend="aot_eager")
    for num_tokens in (11, 9, 40):
        x, ids, weights = oracle.make_tokens(num_tokens, 64, 4, 2, torch.bfloat16)
        ids[2, 1], ids[5] = -1, -1
        want = experts_standard(x, ids, weights, made)
        assert oracle.relative_error(compiled(x, ids, weights, made), want) < oracle.TOLERANCE[torch.bfloat16]


def _route_without_data(request: LayerRequest) -> BoundRoute:
    quant, manager = request.quant, torch_manager()
    is_quantized = quant.w13.is_quantized or quant.w2.is_quantized
    tensors = random_quantized(request)[0] if is_quantized else random_tensors(request)
    plan, _ = make_plan(manager, request, load_environment("h100"))
    raw = RawWeights(tensors={key: tensor.to(DEVICE) for key, tensor in tensors.items()})
    return BoundExperts(plan, prepare(plan, raw, None), manager).routes[0]


def _run_without_data(name: str, mode: str) -> None:
    request = _request(name, a2a_backend=f"none.{mode}")
    route = _route_without_data(request)
    for num_tokens in (1, 9):
        x = torch.empty(num_tokens, 72, dtype=TORCH_DTYPES[request.dtype], device=DEVICE)
        ids, weights = torch.empty_like(x[:, :3], dtype=torch.int64), torch.empty_like(x[:, :3], dtype=torch.float32)
        with NothingOfTheHost():
            tokens, handle = route.dispatch(x, ids, weights)
            out = route.combine(route.experts(tokens), handle)
        assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)


@pytest.mark.parametrize("mode", _FORMATS)
@pytest.mark.parametrize("name", [*_FLOATS, *QUANTS])
def test_no_forward_on_another_device_reads_data(name: str, mode: str) -> None:
    _run_without_data(name, mode)


@pytest.mark.parametrize("mode", _FORMATS)
@pytest.mark.parametrize("name", ["bf16", "int4_and_bf16"])
def test_grouped_gemms_read_no_data(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_weights, "has_grouped_gemm", lambda device: True)
    _run_without_data(name, mode)


@pytest.mark.parametrize("mode", _FORMATS)
def test_products_of_fp16_with_wide_results_read_no_data(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_writes_fp32", lambda device: True)
    _run_without_data("fp16", mode)


def test_grouped_gemms_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in {(8, 0): False, (9, 0): True, (10, 3): True, (12, 0): False}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert has_grouped_gemm(torch.device("cuda")) is expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not has_grouped_gemm(torch.device("cuda"))
    assert not has_grouped_gemm(torch.device("xpu"))
    assert has_grouped_gemm(torch.device("cpu"))
