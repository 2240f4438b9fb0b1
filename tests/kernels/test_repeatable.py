"""Bitwise repeatability, and full-graph compilation, of the standard format."""

from __future__ import annotations

import oracle
import pytest
import torch
from without_data import DEVICE

from moe_core.activation import SWIGLU_OAI, ActivationSpec
from moe_core.kernels import blocks
from moe_core.kernels.activation import activation_function
from moe_core.kernels.blocks import linear_by_block
from moe_core.kernels.expert_weights import ExpertLinear, Experts, StoredLinear
from moe_core.kernels.experts import experts_contiguous, experts_standard
from moe_core.kernels.permute import gather_rows, permute
from moe_core.payloads import Tensor
from moe_core.quant import W8A8_INT8, QuantScheme

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _make(scheme: str, hidden: int, inner: int, transposed: bool = False, deterministic: bool = False) -> Experts:
    params = oracle.make_params(4, hidden, inner, _DTYPES[scheme], bias=True)
    w13, w2 = (params[n].mT.contiguous().mT if transposed else params[n] for n in ("w13", "w2"))
    return Experts(
        w13=ExpertLinear.of(QuantScheme.from_name(scheme), w13, bias=params["b13"]),
        w2=ExpertLinear.of(QuantScheme.from_name(scheme), w2, bias=params["b2"]),
        activation=activation_function(SWIGLU_OAI),
        deterministic=deterministic,
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scheme", _DTYPES)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 48), (51, 37), (5, 7), (1000, 33), (640, 1100)])
def test_a_tokens_bits_do_not_depend_on_its_batch(scheme: str, hidden: int, inner: int, transposed: bool) -> None:
    experts = _make(scheme, hidden, inner, transposed, deterministic=True)
    x, ids, weights = oracle.make_tokens(23, hidden, 4, 2, _DTYPES[scheme])
    batch = experts_standard(x, ids, weights, experts)
    reverse = experts_standard(x.flip(0), ids.flip(0), weights.flip(0), experts).flip(0)
    alone = torch.cat([experts_standard(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], experts) for t in range(23)])
    assert torch.equal(batch, reverse)
    assert torch.equal(batch, alone)


@pytest.mark.parametrize("scheme", _DTYPES)
def test_deterministic_results_are_right(scheme: str) -> None:
    experts = _make(scheme, 51, 37, deterministic=True)
    x, ids, weights = oracle.make_tokens(9, 51, 4, 2, _DTYPES[scheme])
    params = {"w13": experts.w13.weight, "w2": experts.w2.weight, "b13": experts.w13.bias, "b2": experts.w2.bias}
    want = oracle.layer(x, ids, weights, params, SWIGLU_OAI)
    assert oracle.relative_error(experts_standard(x, ids, weights, experts), want) < oracle.TOLERANCE[_DTYPES[scheme]]


def _compiled_equals_eager(experts: Experts, dtype: torch.dtype) -> None:
    compiled = torch.compile(experts_standard, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        torch.manual_seed(seed)
        x, ids, weights = oracle.make_tokens(11, 64, 4, 2, dtype)
        ids[2, 1], ids[5] = -1, -1
        got, want = compiled(x, ids, weights, experts), experts_standard(x, ids, weights, experts)
        assert got.dtype == want.dtype
        # Both run the same GEMMs; what is around them may be fused.
        assert oracle.relative_error(got, want) < oracle.TOLERANCE[dtype]
        assert torch.equal(got[5], torch.zeros_like(got[5]))


@pytest.mark.parametrize("scheme", _DTYPES)
def test_full_graph_with_routing_that_changes(scheme: str) -> None:
    _compiled_equals_eager(_make(scheme, 64, 48), _DTYPES[scheme])


def test_full_graph_with_quantized_weights_and_a_module_activation() -> None:
    def linear(rows: int, columns: int) -> ExpertLinear:
        codes = torch.randint(-127, 128, (4, rows, columns)).char()
        return ExpertLinear.of(W8A8_INT8, codes, output_scale=torch.rand(4, rows) / 100)

    def gate(h: Tensor) -> Tensor:
        return torch.tanh(h[:, :48]) * h[:, 48:]

    _compiled_equals_eager(Experts(w13=linear(96, 64), w2=linear(64, 48), activation=gate), torch.bfloat16)


def test_inductor_runs_the_whole_layer() -> None:
    experts = _make("bf16", 64, 48)
    experts.activation = activation_function(ActivationSpec(kind="gelu"))
    x, ids, weights = oracle.make_tokens(11, 64, 4, 2, torch.bfloat16)
    got = torch.compile(experts_standard, fullgraph=True)(x, ids, weights, experts)
    want = experts_standard(x, ids, weights, experts)
    assert oracle.relative_error(got, want) < oracle.TOLERANCE[torch.bfloat16]


def test_full_graph_of_padded_rows() -> None:
    experts = _make("fp32", 64, 48)
    x, ids, _ = oracle.make_tokens(11, 64, 4, 2, torch.float32)
    permutation = permute(ids, 4, 8)
    arguments = gather_rows(x, permutation), permutation.num_tokens_per_expert, permutation.group_ends, experts
    got = torch.compile(experts_contiguous, fullgraph=True, backend="aot_eager")(*arguments)
    rows = permutation.row_map.flatten()
    assert oracle.relative_error(got[rows], experts_contiguous(*arguments)[rows]) < 1e-6


def test_products_of_fp16_with_wide_results_compile_for_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_writes_fp32", lambda device: True)
    linear = StoredLinear(weight=torch.empty(4, 48, 64, dtype=torch.float16, device=DEVICE), weight_dtype="fp16")
    compiled = torch.compile(linear_by_block, fullgraph=True, backend="aot_eager")
    for num_blocks in (3, 5):
        table = torch.empty(num_blocks, dtype=torch.int64, device=DEVICE)
        assert compiled(torch.empty(4 * num_blocks, 64, device=DEVICE), None, table, linear).shape[1] == 48
