from __future__ import annotations

from typing import Any

import attrs
import pytest
from fakes import (
    A2,
    A3,
    A5,
    BF16_TOKENS,
    FP8_COLUMN,
    FP8_ROW,
    FP8_UE8M0,
    INT8,
    MXFP8_TOKENS,
    NVFP4_TOKENS,
    SM90,
    SM100,
    dispatcher,
    expect,
    fake_plugin,
    manager_of,
    plugin,
    request,
    runner,
)

from moe_core.decision import Decision
from moe_core.deprecated import BF16_DISPATCH_VARIABLE, bf16_dispatch_requested
from moe_core.environment import Environment
from moe_core.findings import DtypeChoice
from moe_core.planner import PlanWarning, make_plan
from moe_core.quant import BF16, FP8_BLOCK128, MXFP8, NVFP4, W4A4_INT4, W8A8_INT8, QuantScheme
from moe_core.request import Workload
from moe_core.resolver import resolve
from moe_core.specs import PluginSpec, TokenDtype

Tokens = tuple[TokenDtype, ...]


@attrs.frozen
class Pair:
    """A dispatcher that sends, a runner that reads, and the layer between them."""

    machine: Environment
    format: str
    sends: Tokens
    reads: Tokens
    scheme: QuantScheme

    @property
    def declared(self) -> PluginSpec:
        sender = dispatcher(format=self.format, sends=self.sends)
        reader = runner(format=self.format, reads=self.reads, schemes=(self.scheme,))
        return plugin(dispatchers=[sender], runners=[reader])

    def decide(self, **fields: Any) -> Decision:
        return resolve([self.declared], request(quant=self.scheme, **fields), self.machine)

    def dtype(self, **fields: Any) -> DtypeChoice:
        decision = self.decide(**fields)
        expect(decision.is_feasible, decision.explain())
        return decision.workloads[0].ranked[0].dtype


HOPPER = (BF16_TOKENS, FP8_COLUMN)
BF16_LAYER = Pair(SM90, "masked", HOPPER, (BF16_TOKENS,), BF16)
FP8_LAYER = Pair(SM90, "masked", HOPPER, (FP8_COLUMN, BF16_TOKENS), FP8_BLOCK128)
FP4_READER = (NVFP4_TOKENS, BF16_TOKENS)
NVFP4_MASKED = Pair(SM100, "masked", (BF16_TOKENS, FP8_UE8M0, NVFP4_TOKENS), FP4_READER, NVFP4)
NVFP4_NORMAL = Pair(SM100, "contiguous", (BF16_TOKENS, FP8_UE8M0), FP4_READER, NVFP4)
INT8_A2 = Pair(A2, "contiguous", (BF16_TOKENS, INT8), (INT8, BF16_TOKENS), W8A8_INT8)
INT8_A3 = Pair(A3, "contiguous", (BF16_TOKENS, INT8), (INT8,), W8A8_INT8)
INT4_A3 = Pair(A3, "contiguous", (BF16_TOKENS, INT8), (BF16_TOKENS,), W4A4_INT4)
MXFP8_A5 = Pair(A5, "contiguous", (BF16_TOKENS, INT8), (MXFP8_TOKENS, BF16_TOKENS), MXFP8)
INT8_CUDA = Pair(SM90, "contiguous", (BF16_TOKENS, FP8_COLUMN), (BF16_TOKENS,), W8A8_INT8)


@pytest.mark.parametrize(
    ("pair", "fields", "dtype", "rule"),
    [
        pytest.param(BF16_LAYER, {}, "bf16", "runner", id="only candidate"),
        pytest.param(FP8_LAYER, {}, "fp8/column_128", "runner", id="fp8 experts"),
        pytest.param(FP8_LAYER, {"dispatch_dtype": "bf16"}, "bf16", "pin", id="pin bf16"),
        pytest.param(FP8_LAYER, {"bf16_dispatch_variable": True}, "bf16", "variable", id="deprecated variable"),
        pytest.param(
            FP8_LAYER,
            {"bf16_dispatch_variable": True, "dispatch_dtype": "fp8"},
            "fp8/column_128",
            "pin",
            id="pin over variable",
        ),
        pytest.param(NVFP4_MASKED, {}, "nvfp4/block_16", "input-global-scale", id="global scale"),
        pytest.param(NVFP4_NORMAL, {}, "bf16", "runner", id="global scale, not sendable"),
        pytest.param(INT8_A2, {"dispatch_dtype": "fp8"}, "int8/token", "pin", id="ascend fp8 is int8"),
        pytest.param(INT4_A3, {}, "bf16", "runner", id="int4 experts"),
        pytest.param(MXFP8_A5, {}, "bf16", "runner", id="mxfp8 not sendable"),
    ],
)
def test_choice(pair: Pair, fields: dict[str, Any], dtype: str, rule: str) -> None:
    choice = pair.dtype(**fields)
    assert (str(choice.token_dtype), choice.rule) == (dtype, rule)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("pair", "fields", "message"),
    [
        pytest.param(BF16_LAYER, {"dispatch_dtype": "fp8"}, "pinned fp8, found only bf16", id="fp8 on bf16 experts"),
        pytest.param(
            attrs.evolve(BF16_LAYER, format="contiguous", sends=(BF16_TOKENS, FP8_ROW)),
            {"dispatch_dtype": "nvfp4"},
            "pinned nvfp4, found only bf16",
            id="nvfp4 on bf16 experts",
        ),
        pytest.param(
            INT8_A2,
            {"dispatch_dtype": "fp8", "strict": True},
            "pinned fp8, found npu uses int8/token instead; pin int8",
            id="strict",
        ),
        pytest.param(INT8_A3, {"dispatch_dtype": "nvfp4"}, "pinned nvfp4, found only int8", id="nvfp4 on ascend"),
        pytest.param(INT8_CUDA, {"dispatch_dtype": "int8"}, "pinned int8, found only bf16", id="int8 on cuda"),
    ],
)
def test_a_pin_outside_the_candidates_is_an_error(pair: Pair, fields: dict[str, Any], message: str) -> None:
    decision = pair.decide(**fields)
    expect(not decision.is_feasible)
    expect(f"dispatch-dtype: needs {message}" in decision.explain(), decision.explain())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_layers_do_not_influence_each_other(order: tuple[int, int]) -> None:
    layers = (FP8_LAYER, BF16_LAYER)
    found = {index: str(layers[index].dtype().token_dtype) for index in order}
    assert found == {0: "fp8/column_128", 1: "bf16"}


@pytest.mark.parametrize("max_tokens", [1, 128, None])
def test_token_counts_do_not_change_the_dtype(max_tokens: int | None) -> None:
    choice = FP8_LAYER.dtype(workloads=Workload(max_tokens=max_tokens))
    assert choice == FP8_LAYER.dtype()


@pytest.mark.parametrize(
    ("pair", "note"),
    [
        (NVFP4_NORMAL, "nvfp4 (preferred by input-global-scale) is not possible: the dispatcher sends only bf16, fp8"),
        (MXFP8_A5, "mxfp8 (preferred by runner) is not possible: the dispatcher sends only bf16, int8/token"),
        (
            attrs.evolve(FP8_LAYER, sends=(BF16_TOKENS, FP8_ROW)),
            "fp8 (preferred by runner) is not possible: sent as fp8/row_128, read as fp8/column_128",
        ),
    ],
)
def test_a_skipped_preference_is_said(pair: Pair, note: str) -> None:
    assert any(text.startswith(note) for text in pair.dtype().notes)


def test_a_dtype_that_two_rules_prefer_is_impossible_once() -> None:
    notes = NVFP4_NORMAL.dtype().notes
    assert [note.partition(":")[0] for note in notes] == ["nvfp4 (preferred by input-global-scale) is not possible"]


def test_the_ignored_variable_is_said() -> None:
    choice = FP8_LAYER.dtype(bf16_dispatch_variable=True, dispatch_dtype="fp8")
    assert choice.notes == ("deprecated bf16 variable ignored: a dispatch dtype is pinned",)


def test_an_adjustment_is_warned_about_and_kept_in_the_plan() -> None:
    layer = request(quant=W8A8_INT8, dispatch_dtype="fp8")
    with pytest.warns(PlanWarning, match="pinned fp8 is int8 on npu"):
        plan, _ = make_plan(manager_of(INT8_A2.declared), layer, A2)
    (route,) = plan.routes
    assert (str(route.token_dtype), route.dtype_requested) == ("int8/token", "fp8")
    assert plan.notes == ("pinned fp8 is int8 on npu",)


def test_cuda_int8_becomes_fp8_where_fp8_can_be_read() -> None:
    choice = FP8_LAYER.dtype(dispatch_dtype="int8")
    assert (choice.token_dtype, choice.requested) == (FP8_COLUMN, "int8")


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("sends", "reads", "parts"),
    [
        ((BF16_TOKENS,), (FP8_COLUMN,), ["one of bf16", "it reads fp8/column_128"]),
        ((FP8_ROW,), (FP8_COLUMN,), ["one of fp8/row_128", "fp8: the scale layouts differ"]),
        ((BF16_TOKENS,), (TokenDtype("fp16"),), ["it reads fp16 (layer dtype bf16)"]),
    ],
)
def test_nothing_in_common_names_both_sides(sends: Tokens, reads: Tokens, parts: list[str]) -> None:
    reason = (
        attrs.evolve(FP8_LAYER, sends=sends, reads=reads).decide().reasons_of("toy:toy.standard + toy:toy.standard")
    )
    expect([r.code for r in reason] == ["dispatch-dtype"], reason)
    for part in parts:
        expect(part in str(reason[0]), reason[0])


def test_float_tokens_come_only_in_the_dtype_of_the_layer() -> None:
    floats = (TokenDtype("fp32"), BF16_TOKENS, TokenDtype("fp16"))
    pair = Pair(SM90, "standard", floats, floats, BF16)
    assert pair.dtype().token_dtype == BF16_TOKENS


@pytest.mark.parametrize(("value", "asked"), [("1", True), ("true", True), ("0", False), ("", False)])
@pytest.mark.parametrize("pinned", [None, "fp8"])
def test_the_deprecated_variable_warns(value: str, asked: bool, pinned: str | None) -> None:
    environ = {BF16_DISPATCH_VARIABLE: value}
    if not asked:
        assert not bf16_dispatch_requested(environ, pinned)
        return
    with pytest.warns(DeprecationWarning, match="--dispatch-dtype bf16") as caught:
        assert bf16_dispatch_requested(environ, pinned)
    assert ("ignored" in str(caught[0].message)) is (pinned is not None)


@pytest.mark.parametrize(
    ("fields", "is_asked"),
    [({}, True), ({"dispatch_dtype": "bf16"}, False), ({"bf16_dispatch_variable": True}, False)],
)
def test_no_hook_is_asked_where_the_user_named_a_dtype(fields: dict[str, Any], is_asked: bool) -> None:
    asked = []
    declared = FP8_LAYER.declared
    hooks = {"select_output_dtype": lambda candidates: asked.append(candidates)}
    manager = manager_of()
    manager.register("toy", fake_plugin("toy", declared.dispatchers, declared.runners, hooks))
    make_plan(manager, request(quant=FP8_BLOCK128, **fields), SM90)
    assert asked == ([(FP8_COLUMN, BF16_TOKENS)] if is_asked else [])
