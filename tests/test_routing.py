"""Routing against the float64 oracle, against the routers of transformers, and on bad input."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import attrs
import pytest
import torch
from reference_moe import route as oracle_route

from moe_core.errors import InputError, SpecError
from moe_core.kernels import checks
from moe_core.routing import SCORINGS, RoutingSpec, route

# Logits reach about +-8 here. An exponential turns their fp32 rounding (6e-8 relative) into up to 8 x 6e-8, and two
# or three of those meet in a weight.
RTOL = 3e-6

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def dense(topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """`[T, E]` float64 weights: compares routings whatever the order of their slots."""
    zeros = torch.zeros(len(topk_ids), num_experts, dtype=torch.float64)
    return zeros.scatter_add(1, topk_ids, topk_weights.double())


def oracle(logits: torch.Tensor, spec: RoutingSpec, **tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return oracle_route(
        logits,
        spec.top_k,
        scoring=spec.scoring,
        renormalize=spec.renormalize,
        n_group=spec.n_group,
        topk_group=spec.topk_group,
        scale=spec.routed_scaling_factor,
        bias=tensors.get("correction_bias"),
        valid=tensors.get("valid"),
    )


def test_fp64_logits_keep_their_precision() -> None:
    # Scores whose differences vanish in fp32 beside the bias.
    logits = 1e-7 * torch.randperm(64, generator=torch.Generator().manual_seed(1))[None].double()
    spec, bias = RoutingSpec(top_k=4, scoring="sigmoid"), torch.full((64,), 7.0)
    topk_ids, topk_weights = route(logits, spec, correction_bias=bias)
    assert topk_ids.tolist() == oracle(logits, spec, correction_bias=bias)[0].tolist()
    assert topk_weights.dtype == torch.float32


@pytest.mark.parametrize("num_experts", [6, 64, 300, 512])
@pytest.mark.parametrize("with_bias", [False, True], ids=["unbiased", "biased"])
@pytest.mark.parametrize(
    "spec",
    [
        RoutingSpec(top_k=2),
        RoutingSpec(top_k=6, renormalize=False, routed_scaling_factor=2.5),
        RoutingSpec(top_k=4, scoring="sigmoid", routed_scaling_factor=2.5),
        RoutingSpec(top_k=1, scoring="sigmoid", renormalize=False),
        RoutingSpec(top_k=3, scoring="sigmoid", n_group=2, topk_group=1),
        RoutingSpec(top_k=3, n_group=2, topk_group=2, renormalize=False),
        RoutingSpec(top_k=4, scoring="topk_softmax", routed_scaling_factor=0.5),
    ],
    ids=str,
)
def test_equals_the_oracle(spec: RoutingSpec, with_bias: bool, num_experts: int) -> None:
    logits = random_logits(33, num_experts, seed=num_experts)
    bias = random_logits(num_experts, seed=1) / 8 if with_bias else None
    topk_ids, topk_weights = route(logits, spec, correction_bias=bias)
    expected_ids, expected_weights = oracle(logits, spec, correction_bias=bias)
    assert (topk_ids.dtype, topk_weights.dtype) == (torch.int64, torch.float32)
    assert torch.equal(topk_ids, expected_ids)
    torch.testing.assert_close(topk_weights.double(), expected_weights, rtol=RTOL, atol=0)


@pytest.mark.parametrize(("n_group", "topk_group"), [(4, 2), (8, 4), (16, 1)])
@pytest.mark.parametrize("with_bias", [False, True], ids=["unbiased", "biased"])
def test_group_limit(n_group: int, topk_group: int, with_bias: bool) -> None:
    spec = RoutingSpec(top_k=4, scoring="sigmoid", n_group=n_group, topk_group=topk_group)
    logits = random_logits(50, 64, seed=3)
    bias = random_logits(64, seed=4) if with_bias else None
    topk_ids, topk_weights = route(logits, spec, correction_bias=bias)
    expected = oracle(logits, spec, correction_bias=bias)
    torch.testing.assert_close(dense(topk_ids, topk_weights, 64), dense(*expected, 64), rtol=RTOL, atol=0)
    assert all(len(set(row)) <= topk_group for row in (topk_ids // (64 // n_group)).tolist())


def test_group_score_is_the_best_expert_or_with_a_bias_the_best_two() -> None:
    logits = torch.tensor([[4.0, -4.0, 3.0, 3.0]])
    spec = RoutingSpec(top_k=2, scoring="sigmoid", n_group=2, topk_group=1)
    assert route(logits, spec)[0].tolist() == [[0, 1]]
    assert route(logits, spec, correction_bias=torch.zeros(4))[0].tolist() == [[2, 3]]


def test_a_closed_group_loses_against_barred_and_negatively_biased_experts() -> None:
    spec = RoutingSpec(top_k=2, scoring="sigmoid", n_group=2, topk_group=1)
    barred = torch.tensor([[0.0, 0.0, 1.0, -math.inf]])
    assert route(barred, spec)[0].tolist() == [[2, 3]]
    negative = torch.tensor([-9.0, -9.0, -3.0, -4.0])
    assert route(torch.zeros(1, 4), spec, correction_bias=negative)[0].tolist() == [[2, 3]]


@pytest.mark.parametrize("with_bias", [False, True], ids=["unbiased", "biased"])
def test_ties_go_to_the_lower_id(with_bias: bool) -> None:
    bias = torch.zeros(64) if with_bias else None
    logits = torch.zeros(3, 64)
    logits[1, ::2] = 1.0
    topk_ids, _ = route(logits, RoutingSpec(top_k=5), correction_bias=bias)
    assert topk_ids.tolist() == [[0, 1, 2, 3, 4], [0, 2, 4, 6, 8], [0, 1, 2, 3, 4]]
    grouped_ids, _ = route(logits, RoutingSpec(top_k=3, n_group=32, topk_group=2), correction_bias=bias)
    assert grouped_ids.tolist() == [[0, 1, 2], [0, 2, 1], [0, 1, 2]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_ids_are_distinct_in_coarse_half_precision(scoring: str) -> None:
    logits = random_logits(64, 512, seed=5, dtype=torch.float16).round()
    topk_ids, _ = route(logits, RoutingSpec(top_k=22, scoring=scoring))
    assert all(len(set(row)) == 22 for row in topk_ids.tolist())
    assert torch.equal(topk_ids, oracle_route(logits, 22, scoring=scoring)[0])


def test_scores_that_saturate_keep_their_order() -> None:
    logits = torch.tensor([[20.0, 30.0, 25.0], [-200.0, -180.0, -190.0]])
    topk_ids, topk_weights = route(logits, RoutingSpec(top_k=2, scoring="sigmoid"))
    assert topk_ids.tolist() == [[1, 2], [1, 2]]
    # Both sigmoids of the second row underflow in fp32; their ratio does not.
    expected = oracle(logits, RoutingSpec(top_k=2, scoring="sigmoid"))[1]
    torch.testing.assert_close(topk_weights.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("with_bias", [False, True], ids=["unbiased", "biased"])
def test_roots_of_softplus(renormalize: bool, with_bias: bool) -> None:
    logits = torch.cat([random_logits(20, 64), 60 * random_logits(20, 64, seed=1)]).double()
    bias = random_logits(64, seed=2).double() if with_bias else torch.zeros(64).double()
    # Far below zero they are roots of exponentials.
    scores = torch.where(logits < -40, torch.exp(logits), torch.log1p(torch.exp(logits))).sqrt()
    expected_ids = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :6]
    expected = scores.gather(1, expected_ids)
    expected = 1.5 * (expected / expected.sum(1, keepdim=True) if renormalize else expected)
    spec = RoutingSpec(top_k=6, scoring="sqrtsoftplus", renormalize=renormalize, routed_scaling_factor=1.5)
    topk_ids, topk_weights = route(logits.float(), spec, correction_bias=bias.float() if with_bias else None)
    assert torch.equal(topk_ids, expected_ids)
    torch.testing.assert_close(topk_weights.double(), expected, rtol=RTOL, atol=1e-30)


def test_roots_of_softplus_that_underflow_keep_their_ratio() -> None:
    logits = torch.tensor([[-400.0, -401.0, -500.0]])
    topk_ids, topk_weights = route(logits, RoutingSpec(top_k=2, scoring="sqrtsoftplus"))
    assert topk_ids.tolist() == [[0, 1]]
    expected = torch.softmax(torch.tensor([[-200.0, -200.5]]), dim=-1)
    torch.testing.assert_close(topk_weights, expected, rtol=RTOL, atol=0)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_barred_experts_weigh_nothing(scoring: str, renormalize: bool) -> None:
    spec = RoutingSpec(top_k=2, scoring=scoring, renormalize=renormalize)
    logits = torch.full((2, 4), -math.inf)
    logits[1, 3] = 0.5
    topk_ids, topk_weights = route(logits, spec)
    assert topk_ids.tolist() == [[0, 1], [3, 0]]
    assert topk_weights[0].tolist() == [0.0, 0.0]
    assert topk_weights[1, 0] > 0
    assert topk_weights[1, 1] == 0
    biased_ids, biased_weights = route(logits[:1], spec, correction_bias=torch.tensor([0.0, 1.0, 2.0, 3.0]))
    # A score of 0 still takes a bias; a bare logit of -inf does not.
    assert biased_ids.tolist() == [[0, 1] if scoring == "topk_softmax" else [3, 2]]
    assert biased_weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 7.0])
def test_invalid_rows_have_no_experts_whatever_their_logits(bad: float) -> None:
    spec = RoutingSpec(top_k=2, scoring="sigmoid", n_group=2, topk_group=1)
    logits = random_logits(5, 8, seed=6)
    logits[[1, 4]] = bad
    valid = torch.tensor([True, False, True, True, False])
    bias = random_logits(8, seed=7)
    topk_ids, topk_weights = route(logits, spec, correction_bias=bias, valid=valid)
    assert topk_ids[~valid].unique().tolist() == [-1]
    assert topk_weights[~valid].unique().tolist() == [0.0]
    alone = route(logits[valid], spec, correction_bias=bias)
    assert torch.equal(topk_ids[valid], alone[0])
    assert torch.equal(topk_weights[valid], alone[1])


def test_no_tokens() -> None:
    topk_ids, topk_weights = route(torch.empty(0, 8), RoutingSpec(top_k=2, n_group=2, topk_group=1))
    assert (topk_ids.shape, topk_weights.shape) == ((0, 2), (0, 2))


def test_weights_carry_gradients() -> None:
    logits = random_logits(4, 8).requires_grad_()
    route(logits, RoutingSpec(top_k=2, renormalize=False))[1].sum().backward()
    assert logits.grad is not None
    assert bool((logits.grad != 0).any())


# ---- the routers of transformers -------------------------------------------------------------------------------
def _sizes(**more: Any) -> dict[str, Any]:
    return dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, **more)


def _mixtral() -> tuple[Any, RoutingSpec]:
    from transformers.models.mixtral import modeling_mixtral as m

    config = m.MixtralConfig(**_sizes(num_local_experts=8, num_experts_per_tok=2))
    return m.MixtralTopKRouter(config), RoutingSpec(top_k=2)


def _qwen3(renormalize: bool) -> tuple[Any, RoutingSpec]:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as m

    config = m.Qwen3MoeConfig(**_sizes(num_experts=16, num_experts_per_tok=4, norm_topk_prob=renormalize))
    return m.Qwen3MoeTopKRouter(config), RoutingSpec(top_k=4, renormalize=renormalize)


def _gpt_oss() -> tuple[Any, RoutingSpec]:
    from transformers.models.gpt_oss import modeling_gpt_oss as m

    config = m.GptOssConfig(**_sizes(num_local_experts=8, num_experts_per_tok=4))
    return m.GptOssTopKRouter(config), RoutingSpec(top_k=4, scoring="topk_softmax")


def _deepseek_v3(renormalize: bool) -> tuple[Any, RoutingSpec]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as m

    routing = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5)
    config = m.DeepseekV3Config(
        **_sizes(n_routed_experts=32, num_experts_per_tok=4, norm_topk_prob=renormalize, **routing)
    )
    return m.DeepseekV3TopkRouter(config), RoutingSpec(top_k=4, scoring="sigmoid", renormalize=renormalize, **routing)


def _deepseek_v4() -> tuple[Any, RoutingSpec]:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as m

    config = m.DeepseekV4Config(**_sizes(n_routed_experts=32, num_experts_per_tok=6, routed_scaling_factor=1.5))
    return m.DeepseekV4TopKRouter(config), RoutingSpec(top_k=6, scoring="sqrtsoftplus", routed_scaling_factor=1.5)


@pytest.mark.parametrize(
    ("router", "spec"),
    [
        pytest.param(*_mixtral(), id="mixtral"),
        pytest.param(*_qwen3(True), id="qwen3-moe"),
        pytest.param(*_qwen3(False), id="qwen3-moe-raw"),
        pytest.param(*_gpt_oss(), id="gpt-oss"),
        pytest.param(*_deepseek_v3(True), id="deepseek-v3"),
        pytest.param(*_deepseek_v3(False), id="deepseek-v3-raw"),
        pytest.param(*_deepseek_v4(), id="deepseek-v4"),
    ],
)
def test_equals_the_router_of_transformers(router: torch.nn.Module, spec: RoutingSpec) -> None:
    tensors = router.state_dict()
    for seed, tensor in enumerate(tensors.values()):
        tensor.copy_(random_logits(*tensor.shape, seed=seed) / 8)
    with torch.no_grad():
        logits, expected_weights, expected_ids = router(random_logits(40, 32, seed=9))
    topk_ids, topk_weights = route(logits, spec, correction_bias=tensors.get("e_score_correction_bias"))
    num_experts = logits.shape[1]
    expected = dense(expected_ids, expected_weights, num_experts)
    torch.testing.assert_close(dense(topk_ids, topk_weights, num_experts), expected, rtol=RTOL, atol=0)


# ---- compiled and on accelerators ------------------------------------------------------------------------------
COMPILED_SPECS = [
    RoutingSpec(top_k=2),
    RoutingSpec(top_k=2, renormalize=False),
    RoutingSpec(top_k=3, scoring="topk_softmax"),
    RoutingSpec(top_k=3, scoring="sigmoid", n_group=4, topk_group=2, routed_scaling_factor=2.5),
    RoutingSpec(top_k=3, scoring="sqrtsoftplus"),
]


@pytest.mark.parametrize("spec", COMPILED_SPECS, ids=str)
def test_compiles_without_a_graph_break(spec: RoutingSpec) -> None:
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        logits, bias, valid = random_logits(6, 16, seed=seed), random_logits(16, seed=3), torch.arange(6) != seed
        expected = route(logits, spec, correction_bias=bias, valid=valid)
        topk_ids, topk_weights = compiled(logits, spec, correction_bias=bias, valid=valid)
        assert torch.equal(topk_ids, expected[0])
        torch.testing.assert_close(topk_weights, expected[1], rtol=RTOL, atol=0)


@pytest.mark.error_path
def test_compiled_code_still_refuses_nan() -> None:
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    spec = RoutingSpec(top_k=2)
    compiled(torch.zeros(3, 4), spec)
    with pytest.raises(RuntimeError, match=r"NaN or \+inf in router logits"):
        compiled(torch.full((3, 4), math.nan), spec)


@pytest.mark.parametrize("spec", [RoutingSpec(top_k=2), RoutingSpec(top_k=2, scoring="sigmoid", renormalize=False)])
def test_weights_are_nan_where_no_error_can_be_raised(spec: RoutingSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ASSERTING", ())
    logits, valid = random_logits(5, 8), torch.tensor([True, True, True, True, False])
    _, weights = route(logits, spec)
    assert weights.isfinite().all()
    logits[1, 3], logits[2, 5], logits[3, 0], logits[4] = math.nan, math.inf, -math.inf, math.nan
    _, marked = route(logits, spec, valid=valid)
    assert marked.isnan().all(1).tolist() == [False, True, True, False, False]
    assert torch.equal(marked[0], weights[0])
    assert (marked[4] == 0).all()
    # A bad bias chooses wrong experts for everybody.
    bias = torch.zeros(8)
    bias[2] = math.nan
    assert route(random_logits(5, 8), spec, correction_bias=bias)[1].isnan().all()


@needs_cuda
@pytest.mark.parametrize("spec", COMPILED_SPECS, ids=str)
def test_no_host_sync_on_an_accelerator(spec: RoutingSpec) -> None:
    logits, bias, valid = random_logits(64, 16), random_logits(16, seed=3), torch.arange(64) % 5 != 0
    expected = route(logits, spec, correction_bias=bias, valid=valid)
    on_device = [tensor.cuda() for tensor in (logits, bias, valid)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        topk_ids, topk_weights = route(on_device[0], spec, correction_bias=on_device[1], valid=on_device[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(topk_ids.cpu(), expected[0])
    torch.testing.assert_close(topk_weights.cpu(), expected[1], rtol=RTOL, atol=0)


@needs_cuda
@pytest.mark.error_path
def test_nan_is_a_device_side_assert_on_an_accelerator() -> None:
    # In a process of its own: the assertion makes the CUDA context unusable.
    code = (
        "import torch; from moe_core.routing import SCORINGS, RoutingSpec, route; "
        "route(torch.full((2, 4), float('nan'), device='cuda'), RoutingSpec(top_k=1)); torch.cuda.synchronize()"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert finished.returncode != 0
    assert "device-side assert" in finished.stderr


# ---- bad input -------------------------------------------------------------------------------------------------
@pytest.mark.error_path
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(top_k=0), r"top_k.*>= 1, got 0"),
        (dict(top_k=True), r"top_k.*got True"),
        (dict(top_k=2, scoring="sparsemixer"), r"scoring.*'sparsemixer' is not one of softmax"),
        (dict(top_k=2, renormalize=1), r"renormalize.*expected bool"),
        (dict(top_k=2, n_group=2, topk_group=3), r"topk_group 3 exceeds n_group 2"),
        (dict(top_k=2, routed_scaling_factor=math.nan), r"routed_scaling_factor.*finite"),
    ],
)
def test_spec_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RoutingSpec(**arguments)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("spec", "num_experts", "message"),
    [
        (RoutingSpec(top_k=7), 6, "top_k 7 exceeds the 6 experts"),
        (RoutingSpec(top_k=2, n_group=4), 6, "6 experts cannot be cut into n_group 4"),
        (RoutingSpec(top_k=5, n_group=4, topk_group=1), 16, "top_k 5 exceeds the 4 experts in 1 of 4 groups"),
    ],
)
def test_spec_and_experts_that_do_not_fit(spec: RoutingSpec, num_experts: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec.check_num_experts(num_experts)
    with pytest.raises(SpecError, match=message):
        route(torch.zeros(2, num_experts), spec)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (dict(logits=torch.zeros(4)), r"logits must be float \[num_tokens, num_experts\], got \[4\] float32"),
        (dict(logits=torch.zeros(4, 4, dtype=torch.int32)), r"logits must be float.*int32"),
        (dict(correction_bias=torch.zeros(5)), r"correction_bias must be float \[num_experts\] = \[4\], got \[5\]"),
        (dict(correction_bias=torch.zeros(4, dtype=torch.int64)), r"correction_bias must be float.*int64"),
        (dict(valid=torch.ones(4, dtype=torch.bool)), r"valid must be bool \[num_tokens\] = \[3\], got \[4\] bool"),
        (dict(valid=torch.ones(3)), r"valid must be bool.*float32"),
        (dict(correction_bias=torch.tensor([0, math.nan, 0, math.inf])), r"correction_bias is NaN.*experts 1, 3;"),
        (dict(logits=torch.full((3, 4), math.nan)), r"rows 0, 1, 2 of 3"),
        (dict(logits=torch.full((30, 4), math.inf)), r"rows 0, 1, 2, 3, 4, 5, 6, 7 and 22 more of 30"),
    ],
)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_route_refuses(tensors: dict[str, torch.Tensor], message: str, scoring: str) -> None:
    with pytest.raises(InputError, match=message):
        route(**{"logits": torch.zeros(3, 4), **tensors}, spec=RoutingSpec(top_k=2, scoring=scoring))


def test_a_spec_reads_back_from_its_repr() -> None:
    spec = RoutingSpec(top_k=8, scoring="sigmoid", n_group=8, topk_group=4, routed_scaling_factor=2.5)
    assert eval(repr(spec)) == spec
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        spec.top_k = 4  # type: ignore[misc]
