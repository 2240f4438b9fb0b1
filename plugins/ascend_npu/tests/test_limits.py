"""The documented limits of the operators, each tried on both sides of its edge, and what a decision makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from moe_plugin_ascend import plugin
from moe_plugin_ascend.emulation.formats import int4_words
from moe_plugin_ascend.operators import Groups, grouped_matmul, round_rows, swiglu_int8
from moe_plugin_ascend.steps import Steps

from moe_core import LayerRequest
from moe_core.activation import SWIGLU_OAI
from moe_core.backends.torch import plugin as torch_plugin
from moe_core.decision import Decision
from moe_core.environment import PRESETS, Environment
from moe_core.errors import ResolutionError
from moe_core.manager import BackendManager
from moe_core.planner import make_plan
from moe_core.quant import BF16, FP8_BLOCK128, W4A4_INT4, W4A8_INT8, W4A8_INT8_G128, W8A8_INT8, LayerQuant, read_layer

pytestmark = pytest.mark.usefixtures("emulation")
A3 = PRESETS["ascend-a3"]


def resolve(environment: Environment = A3, **fields: Any) -> tuple[str, str, Decision]:
    """The chosen runner, the dispatch dtype, and why."""
    manager = BackendManager()
    manager.register("torch", torch_plugin)
    manager.register("ascend_npu", plugin)
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 128, "a2a_backend": "none"}
    plan, decision = make_plan(manager, LayerRequest(**(sizes | fields)), environment)
    route = plan.routes[0]
    return route.runner.spec.short_name, str(route.token_dtype), decision


@pytest.mark.parametrize(
    ("quant", "runner", "token"),
    [
        (BF16, "ascend.bf16", "bf16"),
        (W8A8_INT8, "ascend.w8a8", "int8/token"),
        (W4A8_INT8, "ascend.w4a8", "int8/token"),
        (LayerQuant(W4A8_INT8, W8A8_INT8), "ascend.w4a8", "int8/token"),
        (W4A4_INT4, "ascend.w4a4", "bf16"),
        (LayerQuant(W4A4_INT4, W8A8_INT8), "ascend.w4a4", "bf16"),
    ],
)
def test_each_scheme_has_its_kernel_and_token_dtype(quant: Any, runner: str, token: str) -> None:
    assert resolve(quant=quant)[:2] == (runner, token)
    assert resolve(quant=quant, dispatch_dtype="bf16")[:2] == (runner, "bf16")


@pytest.mark.parametrize(("gate_and_up", "down", "runner"), [("W4A4", "W8A8", "w4a4"), ("W4A8", "W8A8", "w4a8")])
def test_projections_that_modelslim_describes_apart_share_a_kernel(gate_and_up: str, down: str, runner: str) -> None:
    names = {"gate_proj": gate_and_up, "up_proj": gate_and_up, "down_proj": down}
    experts = "model.layers.0.mlp.experts"
    words = {f"{experts}.{e}.{name}.weight": f"{word}_DYNAMIC" for e in range(8) for name, word in names.items()}
    stored = read_layer({"model_quant_type": f"{gate_and_up}_DYNAMIC", "version": "1.0.0", **words}, experts)
    assert resolve(quant=stored.quant)[0] == f"ascend.{runner}"


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "fp16", "quant": W8A8_INT8}, "dtype"),
        ({"quant": FP8_BLOCK128}, "scheme"),
        ({"quant": W4A8_INT8_G128}, "scheme"),
        ({"quant": W8A8_INT8, "bias": True}, "bias"),
        ({"quant": W4A4_INT4, "dispatch_dtype": "int8"}, "int8"),
        ({"dispatch_dtype": "nvfp4"}, "nvfp4"),
        ({"environment": attrs.evolve(A3, arch="a5")}, "arch"),
        ({"environment": attrs.evolve(A3, packages={"torch": "2.13.0"})}, "torch_npu"),
    ],
)
def test_what_no_kernel_does_is_refused_with_its_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ResolutionError, match=reason):
        resolve(runner_backend="ascend", **fields)


def test_both_generations_and_any_activation_are_served() -> None:
    assert resolve(environment=attrs.evolve(A3, arch="a2"))[0] == "ascend.bf16"
    assert resolve(quant=W8A8_INT8, activation=SWIGLU_OAI)[0] == "ascend.w8a8"


#: Scheme, the size of a tile's row, and the multiple that the plain kernel asks for.
TILES = [(BF16, 16, 1), (W8A8_INT8, 32, 1), (W4A8_INT8, 64, 8), (W4A4_INT4, 64, 8)]


@pytest.mark.parametrize(("quant", "tile", "word"), TILES)
@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size"])
def test_what_is_no_whole_tile_goes_to_the_plain_layout_and_says_so(
    quant: Any, tile: int, word: int, field: str
) -> None:
    tiled, _, decision = resolve(quant=quant, **{field: 3 * tile})
    assert not tiled.endswith("_nd")
    assert decision.workloads[0].notes == ()
    size = 3 * tile - max(word, 2)
    # It changes no number, so that nothing is refused under `strict`.
    plain, _, decision = resolve(quant=quant, strict=True, **{field: size})
    assert plain == f"{tiled}_nd"
    found = f"needs {field} multiple_of {tile}, found {field} {size}"
    assert decision.workloads[0].notes == (f"ascend_npu:{plain} stands in for {tiled}: {found}",)
    # With what runs instead, for whoever asked for the other.
    (reason,) = decision.reasons_of(f"ascend_npu:{tiled}")
    assert str(reason).startswith(f"limit: {found}; ")
    assert reason.hint.partition("; or tp_size ")[0] == f"{plain} reads weights that are no whole tiles"
    assert str(reason) in decision.explain()


@pytest.mark.error_path
@pytest.mark.parametrize("quant", [W4A8_INT8, W4A4_INT4])
@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size"])
def test_int4_widths_that_fill_no_words_are_refused(quant: Any, field: str) -> None:
    assert resolve(quant=quant, **{field: 72})[0].endswith("_nd")
    with pytest.raises(ResolutionError, match=f"{field} multiple_of 8"):
        resolve(quant=quant, runner_backend="ascend", **{field: 76})


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("field", "most", "step"),
    [("hidden_size", 65520, 16), ("intermediate_size", 32752, 16), ("num_experts", 1024, 1)],
)
def test_sizes_of_the_grouped_gemm(field: str, most: int, step: int) -> None:
    assert resolve(**{field: most})[0] == "ascend.bf16"
    with pytest.raises(ResolutionError, match="<= "):
        resolve(runner_backend="ascend", **{field: most + step})


@pytest.mark.parametrize(
    ("width", "is_fused"), [(10496, True), (10432, True), (10560, False), (96, False), (128, True)]
)
def test_the_fused_activation_serves_the_widths_of_its_operator(width: int, is_fused: bool) -> None:
    request = LayerRequest(num_experts=2, top_k=1, hidden_size=64, intermediate_size=width, quant=W8A8_INT8)
    assert Steps.of(request).is_fused is is_fused
    rows = torch.zeros(1, 2 * width, dtype=torch.bfloat16)
    sizes = torch.tensor([1, 0])
    if is_fused:
        assert swiglu_int8(rows, sizes)[0].shape == (1, width)
    else:
        with pytest.raises(RuntimeError, match="10496 and a multiple of 64"):
            swiglu_int8(rows, sizes)


def product(sizes: list[int], rows: int = 4, inputs: int = 8, outputs: int = 8, experts: int | None = None) -> Any:
    groups = Groups(torch.tensor(sizes), None)
    weight = torch.ones(experts or len(sizes), inputs, outputs, dtype=torch.bfloat16)
    return grouped_matmul(torch.ones(rows, 8, dtype=torch.bfloat16), weight, groups, torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: product([4]), "one group"),
        (lambda: product([2, 3]), "rows in 4"),
        (lambda: product([1, 1], experts=3), "3 matrices"),
        (lambda: product([4] + [0] * 1024), "1025 groups"),
        (lambda: product([2, 2], inputs=9), "one K"),
        (lambda: product([2, 2], outputs=65536), "last axes"),
        (lambda: round_rows(torch.ones(2, 12, dtype=torch.bfloat16), torch.quint4x2), "multiples of 8|divisible by 8"),
    ],
)
def test_the_emulation_refuses_what_the_documentation_excludes(call: Callable[[], Any], rule: str) -> None:
    with pytest.raises(RuntimeError, match=rule):
        call()


def test_the_emulation_takes_what_lies_just_inside() -> None:
    assert product([2, 2]).shape == (4, 8)
    assert product([1, 1])[2:].isnan().all()
    assert product([4] + [0] * 1023).shape == (4, 8)
    assert product([2, 2], outputs=65535).shape == (4, 65535)
    assert round_rows(torch.ones(2, 16, dtype=torch.bfloat16), torch.quint4x2)[0].shape == (2, 2)


def test_scale_shapes_and_dtypes_are_checked() -> None:
    tokens, rows = torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
    words = int4_words(torch.ones(2, 8, 8, dtype=torch.int8))
    groups, bias = Groups(torch.tensor([2, 2]), None), torch.zeros(2, 8)
    bits = torch.zeros(2, 1, 8, dtype=torch.int64)
    right = grouped_matmul(tokens, words, groups, torch.bfloat16, scale=bits, row_scale=rows, bias=bias)
    assert right.shape == (4, 8)
    for scale, used_bias in ((bits[:, 0], bias), (bits.float(), bias), (bits, None), (bits[:1], bias)):
        with pytest.raises(RuntimeError, match=r"scale|bias"):
            grouped_matmul(tokens, words, groups, torch.bfloat16, scale=scale, row_scale=rows, bias=used_bias)
