from __future__ import annotations

import pickle
from typing import Any

import attrs
import pytest
from fakes import request
from hypothesis import given
from hypothesis import strategies as st

from moe_core import activation, quant
from moe_core.activation import GEGLU, RELU2, SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.errors import SpecError
from moe_core.placement import ExpertPlacement
from moe_core.quant import FP8_BLOCK128, MXFP4, NVFP4, SCHEMES, W4A4_INT4, W4A8_INT8, W8A8_INT8, LayerQuant, QuantScheme
from moe_core.request import LayerRequest, Pins, Workload

NAMES = {
    **vars(quant),
    **vars(activation),
    "LayerRequest": LayerRequest,
    "Workload": Workload,
    "ExpertPlacement": ExpertPlacement,
}
_WORKLOADS = [
    (Workload(),),
    (Workload(phase="decode", max_tokens=64, graph_capture=True), Workload(phase="prefill", a2a_backend="deepep")),
]
REQUESTS = st.builds(
    LayerRequest,
    num_experts=st.integers(8, 512),
    top_k=st.integers(1, 8),
    # 4-bit values lie in pairs.
    hidden_size=st.integers(1, 4096).map(lambda n: 2 * n),
    intermediate_size=st.integers(1, 100).map(lambda n: 8 * n),
    activation=st.sampled_from([SWIGLU, SWIGLU_OAI, GEGLU, RELU2]),
    quant=st.sampled_from([FP8_BLOCK128, NVFP4, LayerQuant(W4A4_INT4, W8A8_INT8), SCHEMES["bf16"]]),
    tp_size=st.sampled_from([1, 2, 4]),
    ep_size=st.integers(1, 64),
    placement=st.sampled_from([ExpertPlacement(), ExpertPlacement("round_robin")]),
    workloads=st.sampled_from(_WORKLOADS),
    runner_backend=st.sampled_from([None, "deep_gemm"]),
    dispatch_dtype=st.sampled_from([None, "fp8"]),
    prefer=st.lists(st.sampled_from(["a", "b"]), unique=True),
)


@given(REQUESTS)
def test_a_request_can_be_written_down_and_read_back(layer: LayerRequest) -> None:
    assert eval(repr(layer), NAMES) == layer
    copied = pickle.loads(pickle.dumps(layer))
    assert copied == layer
    assert hash(copied) == hash(layer)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"top_k": 0}, "LayerRequest, field 'top_k': expected an int >= 1, got 0"),
        ({"num_experts": True}, "field 'num_experts': expected an int >= 1, got True"),
        ({"hidden_size": 64.0}, "field 'hidden_size'"),
        ({"top_k": 65}, "top_k 65 exceeds num_experts 64"),
        ({"intermediate_size": 3, "tp_size": 4}, "tp_size 4 exceeds intermediate_size 3"),
        ({"dtype": "bfloat16"}, "LayerRequest, field 'dtype': 'bfloat16' is not one of fp32, bf16, fp16"),
        ({"dtype": "nvfp4"}, "field 'dtype': 'nvfp4' is not one of"),
        ({"dtype": "fp16", "quant": quant.BF16}, "dtype fp16 with unquantized bf16 weights; cast"),
        ({"quant": "bf16"}, "field 'quant': expected LayerQuant, got 'bf16'"),
        ({"quant": QuantScheme(weight_dtype="any")}, "LayerRequest.quant: any.* is a pattern"),
        (
            {"quant": attrs.evolve(quant.W4A16_INT4, weight_block=(quant.WHOLE, 4))},
            "blocks of all rows and 4 columns would span gate and up",
        ),
        ({"activation": "silu"}, "field 'activation': expected ActivationSpec"),
        ({"bias": 1}, "field 'bias': expected bool, got 1"),
        ({"dispatch_dtype": "fp7"}, "field 'dispatch_dtype': 'fp7' is not one of"),
        ({"a2a_backend": ""}, "field 'a2a_backend': expected a name or None, got ''"),
        ({"runner_backend": ("torch",)}, "field 'runner_backend': expected a name or None"),
        ({"prefer": "torch"}, r"field 'prefer': expected a tuple of alternatives, got 'torch'; write \('torch',\)"),
        ({"prefer": {"a", "b"}}, "field 'prefer': .*order counts"),
        ({"exclude": (1,)}, "field 'exclude': expected a tuple of str, got the element 1"),
        ({"workloads": ()}, "phases must be present and distinct"),
        (
            {"workloads": (Workload(phase="decode"), Workload(phase="decode"))},
            "distinct, or differ in max_tokens; got .*decode",
        ),
        ({"workloads": (Workload(), Workload(phase="decode"))}, "'any' stands alone"),
        (
            {"workloads": (Workload(max_tokens=1), Workload(max_tokens=2)), "ep_size": 2},
            r"phases must be present and distinct; got \['any', 'any'\]",
        ),
        ({"workloads": ("decode",)}, "field 'workloads': expected a tuple of Workload"),
        ({"placement": "contiguous"}, "field 'placement': expected ExpertPlacement"),
    ],
)
def test_a_wrong_request_names_the_field(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        request(**fields)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"phase": "train"}, "Workload, field 'phase': 'train' is not one of any, prefill, decode, verify"),
        ({"max_tokens": 0}, "Workload, field 'max_tokens'"),
        ({"graph_capture": None}, "Workload, field 'graph_capture'"),
        ({"a2a_backend": 3}, "Workload, field 'a2a_backend'"),
    ],
)
def test_a_wrong_workload_names_the_field(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        Workload(**fields)


def test_sizes_are_those_of_one_rank() -> None:
    layer = request(num_experts=10, ep_size=4, tp_size=2, intermediate_size=64)
    sizes = layer.sizes(Workload(max_tokens=7))
    assert (sizes["num_local_experts"], sizes["intermediate_size"], sizes["max_tokens"]) == (3, 32, 7)


def test_rows_of_an_expert_follow_tokens_and_ranks() -> None:
    # 4 ranks bring 3 slots for each of their tokens, and 12 slots hold experts, copies counted.
    copies = ExpertPlacement("map", (*range(10), 0, 3))
    assert request(num_experts=10, top_k=3, ep_size=4, placement=copies).rows_per_token == 1.0


def test_the_pin_of_a_workload_wins() -> None:
    layer = request(a2a_backend="none", runner_backend="torch")
    assert layer.pins(Workload()) == Pins("none", "torch")
    assert str(layer.pins(Workload(a2a_backend="deepep"))) == "a2a deepep, runner torch"
    assert str(Pins("none", "torch", "fp8").dropped("a2a", "runner")) == "dispatch dtype fp8"
    assert str(Pins()) == "no pins"


def test_unquantized_layers_take_the_scheme_of_their_dtype() -> None:
    assert request(dtype="fp16").quant.label == "fp16"
    assert request(activation=ActivationSpec(limit=7)).activation.limit == 7.0


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"hidden_size": 63}, r"so w13 cannot have 63 input channels \(hidden_size 63\)$"),
        ({"intermediate_size": 15}, r"so w2 cannot have 15 input channels \(intermediate_size 15\)$"),
        (
            {"intermediate_size": 30, "tp_size": 2},
            r"w2 cannot have 15 input channels of one of 2 ranks \(intermediate_size 30\); choose a tp_size whose",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("scheme", [MXFP4, W4A8_INT8], ids=str)
def test_half_bytes_are_refused_before_there_are_weights(
    scheme: QuantScheme, sizes: dict[str, int], match: str
) -> None:
    asked = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 64, **sizes}
    with pytest.raises(SpecError, match=match) as caught:
        LayerRequest(**asked, quant=scheme)
    assert caught.value.sizes == (next(iter(sizes)),)
    LayerRequest(**asked, quant=W8A8_INT8)
