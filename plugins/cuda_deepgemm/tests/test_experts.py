"""Binding and warming up: what is compiled when, what is passed, and faults that must show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import emulated_deep_gemm
import pytest
import torch
from deepgemm_layers import small_layer
from emulated_deep_gemm import CALLS
from moe_plugin_deepgemm import experts, library
from moe_plugin_deepgemm.warm_up import row_counts, warm_up

from moe_core.errors import PluginError
from moe_core.kernels import ops
from moe_core.payloads import ContiguousTokens, MaskedTokens
from moe_core.quant import BF16, FP8_BLOCK128, FP8_BLOCK128_UE8M0
from moe_core.request import Workload
from moe_core.specs import TokenDtype

SCHEMES = (BF16, FP8_BLOCK128, FP8_BLOCK128_UE8M0)
FORMATS = ("contiguous", "masked")


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("quant", SCHEMES, ids=["bf16", "fp8", "ue8m0"])
def test_binding_compiles_both_projections_and_a_forward_calls_each_once(quant: Any, format_: str) -> None:
    layer = small_layer(quant, format_)
    CALLS.clear()
    bound = layer.bind()
    rows = (128,) if format_ == "contiguous" else (4, 128)
    # Groups of fp8 rows are told in two ways.
    forms = 2 if format_ == "contiguous" and quant is not BF16 else 1
    assert [shape for _, shape in CALLS] == [(*rows, 256), (*rows, 128)] * forms
    CALLS.clear()
    error, allowed = layer.error(bound)
    assert error < allowed
    assert len(CALLS) == 2


@pytest.mark.parametrize(
    ("quant", "few_experts", "tokens_of_expert", "by_end"),
    [
        (BF16, 3, 160, True),
        (FP8_BLOCK128, 4, 160, True),
        (FP8_BLOCK128, 3, 100, True),
        (FP8_BLOCK128, 3, 160, False),
    ],
)
def test_how_groups_are_told_depends_on_dtype_experts_and_rows(
    quant: Any, few_experts: int, tokens_of_expert: int, by_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_FEW_EXPERTS", few_experts)
    runner = small_layer(quant).bind().routes[0].experts
    assert isinstance(runner, experts.DeepGemmExperts)
    hidden = torch.randn(4 * tokens_of_expert, 256).bfloat16()
    tokens, _ = ops.permute_contiguous(hidden, torch.arange(len(hidden))[:, None] % 4, 4, alignment=128)
    groups = runner.tell_groups(tokens, _real(tokens).int() - 1)
    assert (library.ENDS_KEYWORD in groups) == by_end
    forms = [attrs.evolve(runner, tell_groups=form)(tokens) for form in (experts.by_row, experts.by_end)]
    assert torch.equal(forms[0][_real(tokens)], forms[1][_real(tokens)])


@pytest.mark.error_path
def test_what_fails_to_compile_fails_at_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    def gemm(**arguments: Any) -> None:
        raise RuntimeError("NVCC compilation failed")

    layer = small_layer()
    monkeypatch.setattr(experts, "grouped_gemm", lambda dtype, format_: gemm)
    with pytest.raises(PluginError, match=r"deep_gemm\.bf16_contiguous: .* \[4, 256, 256\] .*NVCC compilation failed"):
        layer.bind()


@pytest.mark.parametrize("format_", FORMATS)
def test_warm_up_meets_every_size_and_tells_how_far_it_is(format_: str) -> None:
    bound = small_layer(format_=format_, workloads=Workload(max_tokens=300)).bind()
    CALLS.clear()
    seen: list[tuple[int, int]] = []
    warm_up(bound, max_tokens=1000, progress=lambda done, total: seen.append((done, total)))
    sizes = list(row_counts(bound.plan.request, bound.plan.routes[0], 300))
    assert seen == [(done, len(sizes)) for done in range(1, len(sizes) + 1)]
    assert len(CALLS) == 2 * len(sizes)


def test_the_sizes_of_a_forward_are_among_those_of_the_warm_up() -> None:
    for format_ in FORMATS:
        plan = small_layer(format_=format_).plan
        sizes = set(row_counts(plan.request, plan.routes[0], 300))
        for count in (1, 2, 65, 300):
            ids = torch.rand(count, 4).topk(2, dim=1).indices
            hidden = torch.zeros(count, 8)
            if format_ == "contiguous":
                tokens, _ = ops.permute_contiguous(hidden, ids, 4, alignment=128)
                assert tokens.hidden_states.shape[0] in sizes
            else:
                blocks, _ = ops.permute_masked(hidden, ids, 4, 384)
                assert blocks.expected_m in sizes or blocks.expected_m > 128


@pytest.mark.parametrize("layout", ["row_128", "column_128", "float"])
@pytest.mark.parametrize("format_", FORMATS)
def test_rounding_is_the_same_wherever_it_is_done(format_: str, layout: str) -> None:
    layer = small_layer(FP8_BLOCK128, format_)
    bound = layer.bind().routes[0]
    # Rounded by the dispatcher, before they were permuted.
    tokens, _ = bound.dispatch(*layer.tokens())  # type: ignore[misc]
    floats, _ = small_layer(BF16, format_).bind().routes[0].dispatch(*layer.tokens())  # type: ignore[misc]
    sent = floats
    if layout != "float":
        codes, scales = ops.quantize(floats.hidden_states, TokenDtype("fp8", layout))  # type: ignore[union-attr]
        sent = attrs.evolve(floats, hidden_states=codes, scales=scales)
    real = _real(tokens)
    assert torch.equal(bound.experts(sent)[real], bound.experts(tokens)[real])  # type: ignore[misc,arg-type]


def _real(tokens: ContiguousTokens | MaskedTokens) -> torch.Tensor:
    if isinstance(tokens, MaskedTokens):
        return torch.arange(tokens.hidden_states.shape[1]) < tokens.masked_m[:, None]
    rows = tokens.hidden_states.shape[0]
    return ops.row_experts(tokens.num_tokens_per_expert, tokens.group_ends, rows) >= 0


@pytest.mark.parametrize("quant", [BF16, FP8_BLOCK128], ids=["bf16", "fp8"])
def test_counts_of_zero_one_and_a_full_block_with_poison_past_them(quant: Any) -> None:
    layer = small_layer(quant, "masked")
    bound = layer.bind().routes[0]
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(4, 128, 256, generator=generator).to(torch.bfloat16)
    counts = torch.tensor([0, 1, 128, 7], dtype=torch.int32)
    real = torch.arange(128) < counts[:, None]
    clean = MaskedTokens(hidden_states=rows, masked_m=counts, expected_m=34)
    poisoned = attrs.evolve(clean, hidden_states=torch.where(real[..., None], rows, torch.nan))
    found = bound.experts(poisoned)[real]  # type: ignore[misc]
    assert found.isfinite().all()
    assert torch.equal(found, bound.experts(clean)[real])  # type: ignore[misc]


@pytest.mark.parametrize(("expected", "passed"), [(0, 1), (1, 1), (70, 70)])
def test_the_library_wants_to_expect_a_row(expected: int, passed: int) -> None:
    seen: list[int] = []
    experts_ = small_layer(BF16, "masked").bind().routes[0].experts
    recorded = [
        attrs.evolve(one, gemm=lambda **arguments: seen.append(arguments["expected_m"]))
        for one in (experts_.w13, experts_.w2)  # type: ignore[union-attr]
    ]
    experts_ = attrs.evolve(experts_, w13=recorded[0], w2=recorded[1])  # type: ignore[misc]
    rows = torch.zeros(4, 128, 256, dtype=torch.bfloat16)
    counts = torch.zeros(4, dtype=torch.int32)
    experts_(MaskedTokens(hidden_states=rows, masked_m=counts, expected_m=expected))
    assert seen == [passed, passed]


Patch = Callable[[pytest.MonkeyPatch], None]


def _tile_of(size: int) -> Patch:
    return lambda patch: patch.setattr(emulated_deep_gemm, "TILE", size)


def _recipe(*sizes: int) -> Patch:
    return lambda patch: patch.setitem(experts._RECIPES, "column_128", sizes)


def _call(dtype: str, format_: str, name: str) -> Patch:
    return lambda patch: patch.setitem(
        library.CALLS, (dtype, format_), attrs.evolve(library.CALLS[dtype, format_], names=(name,))
    )


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("quant", "format_", "patch"),
    [
        # Groups that are not padded to the library's tile.
        (BF16, "contiguous", _tile_of(256)),
        (BF16, "masked", _tile_of(256)),
        (FP8_BLOCK128, "contiguous", _recipe(1, 1, 128)),
        (BF16, "masked", _call("bf16", "masked", "m_grouped_bf16_gemm_nt_contiguous")),
        (FP8_BLOCK128, "contiguous", _call("fp8", "contiguous", "m_grouped_bf16_gemm_nt_contiguous")),
    ],
)
def test_wrong_calls_do_not_pass_unnoticed(
    monkeypatch: pytest.MonkeyPatch, quant: Any, format_: str, patch: Patch
) -> None:
    layer = small_layer(quant, format_)
    patch(monkeypatch)
    with pytest.raises((PluginError, emulated_deep_gemm.VendorRule)):
        layer.error()


def test_a_row_of_another_expert_shows() -> None:
    layer = small_layer()
    bound = layer.bind()
    experts_ = bound.routes[0].experts
    weight = experts_.w13.weight  # type: ignore[union-attr]
    weight.copy_(weight.roll(1, 0))
    error, allowed = layer.error(bound)
    assert error > 10 * allowed
