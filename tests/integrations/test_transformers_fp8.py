"""FP8 experts modules of transformers, beside float64 and beside their own forward."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from oracle import relative_error
from transformers import FineGrainedFP8Config
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear

from moe_core.errors import InputError, ResolutionError, UnsupportedModelError
from moe_core.integrations.transformers import NAME, prepare, register
from moe_core.manager import BackendManager
from tests.integrations.hf_catalogue import decorated_classes
from tests.integrations.hf_fp8_experts import build, randomize_, reference, rounded, tokens, values

# Norm of the error over the norm. The layer rounds as the reference does, in fp32 instead of float64: rarely a code of
# e4m3 (2**-4) falls to the other side. bf16 and fp16: the output is rounded once more.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 4e-3, torch.float16: 2.5e-3}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


_WHOLE = (1 << 20, 1 << 20)
# Newer versions give the module its word, older ones read it from the configuration.
_FP4: dict[str, Any] = (
    {"expert_dtype": "fp4"}
    if "expert_dtype" in inspect.signature(FP8Experts.__init__).parameters
    else {"config": {"expert_dtype": "fp4"}}
)

#: Name -> (how to build it, tile of the first projection, tile of the second, rounding of activations).
FORMATS: dict[str, tuple[dict[str, Any], tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "blocks_of_128": ({"block_size": (128, 128)}, (128, 128), (128, 128), {"group": 128}),
    "power_of_two": (
        {"block_size": (128, 128), "scale_fmt": "ue8m0"},
        (128, 128),
        (128, 128),
        {"group": 128, "power_of_two": True},
    ),
    "ragged": ({"block_size": [128, 128], "hidden": 320}, (128, 128), (128, 128), {"group": 128}),
    "small_blocks": ({"block_size": (64, 32)}, (64, 32), (64, 32), {"group": 32}),
    "gate_and_up_in_one_block": (
        {"block_size": (128, 128), "hidden": 160, "inner": 48},
        (48, 128),
        (128, 128),
        {"group": 128},
    ),
    "no_blocks": ({"block_size": None}, (128, _WHOLE[1]), _WHOLE, {"group": _WHOLE[1]}),
    "not_gated": (
        {"block_size": (128, 128), "has_gate": False, "config": {"hidden_act": "relu2"}},
        (128, 128),
        (128, 128),
        {"group": 128},
    ),
    "static": ({"block_size": (128, 128), "activation_scheme": "static"}, (128, 128), (128, 128), {"group": 0}),
    "static_no_blocks": (
        {"block_size": None, "activation_scheme": "static"},
        (128, _WHOLE[1]),
        _WHOLE,
        {"group": 0},
    ),
    "mxfp8": (
        {"block_size": (1, 32), "scale_fmt": "ue8m0"},
        (1, 32),
        (1, 32),
        {"group": 32, "power_of_two": True},
    ),
    "mxfp4": (
        {"block_size": (128, 128), "scale_fmt": "ue8m0", **_FP4},
        (1, 32),
        (1, 32),
        {"group": 32, "power_of_two": True},
    ),
}


def run(name: str, num_tokens: int, **more: Any) -> tuple[Any, tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    arguments, first, down, rounding = FORMATS[name]
    experts = build(**arguments, **more)
    routed = tokens(num_tokens, experts.hidden_dim, experts.config.dtype)
    with torch.no_grad():
        return experts, routed, experts(*routed), reference(experts, routed, first, down, **rounding)


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, torch.float32), (9, torch.bfloat16), (9, torch.float16)])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_computes_what_its_numbers_say(name: str, num_tokens: int, dtype: torch.dtype) -> None:
    experts, _, found, expected = run(name, num_tokens, dtype=dtype)
    assert type(experts).__name__ == "FP8Experts"
    assert experts.down_proj.element_size() == 1
    assert found.dtype == dtype
    assert relative_error(found, expected) <= TOLERANCE[dtype]


def _linear(tile: tuple[int, int], rounding: dict[str, Any]) -> Any:
    """What the kernel behind the module's own forward computes: rounded rows, exact sums, rows of the same dtype."""

    def linear(rows: Any, weight: Any, scale: Any, *more: Any, activation_scale: Any = None, **_: Any) -> Any:
        # Versions name the last arguments (block size, bias, activation scale) or not.
        exact = torch.stack([rounded(row, scale=(*more, None, activation_scale)[2], **rounding) for row in rows])
        return (exact @ values(weight, scale, tile).T).to(rows.dtype)

    return linear


# One scale per matrix, and gate and up in one tile, the kernels of transformers refuse for gated experts.
@pytest.mark.parametrize("name", ["blocks_of_128", "ragged", "small_blocks", "static", "mxfp8", "mxfp4", "not_gated"])
def test_own_forward_with_what_its_kernel_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, first, down, rounding = FORMATS[name]
    assert first == down
    experts = build(**arguments)
    routed = tokens(7, experts.hidden_dim, torch.bfloat16)
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", _linear(first, rounding))
    with torch.no_grad():
        found = experts(*routed)
        own = inspect.unwrap(type(experts).forward)(experts, *routed)
    # It rounds the results of both projections and the activation to bf16 (2**-9 each); every thirtieth number between
    # the projections then falls to another code of e4m3 (up to 2**-4 of it).
    assert relative_error(found, own) <= 2.5e-2


GATES: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "silu_with_limit": {"swiglu_limit": 2.5},
    "alpha_and_limit": {"swiglu_alpha": 1.3, "swiglu_limit": 2.5},
}


@pytest.mark.parametrize("gate", GATES)
def test_gates_are_recognised_by_their_values(gate: str) -> None:
    experts, _, found, expected = run("blocks_of_128", 5, config=GATES[gate])
    activation = prepare(experts)[""].plan.request.activation
    assert activation.kind == ("gelu_tanh" if gate == "gelu_tanh" else "silu")
    assert activation.limit == GATES[gate].get("swiglu_limit")
    assert activation.alpha == GATES[gate].get("swiglu_alpha", 1.0)
    assert relative_error(found, expected) <= TOLERANCE[torch.bfloat16]


@pytest.mark.skipif("gate_softcap" not in inspect.getsource(FP8Experts), reason="came with a later transformers")
def test_a_gate_that_is_not_known_runs_itself() -> None:
    experts, _, found, expected = run("blocks_of_128", 5, config={"mlp_gate_softcap": 2.0, "mlp_up_softcap": 1.5})
    assert prepare(experts)[""].plan.request.activation.kind == "module"
    assert relative_error(found, expected) <= TOLERANCE[torch.bfloat16]


# Around the numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blocks_of_128", "power_of_two", "static", "mxfp4"])
def test_weights_and_their_scales_are_not_copied(name: str) -> None:
    experts = build(**FORMATS[name][0])
    mine = {parameter.data_ptr() for key, parameter in experts.named_parameters() if "activation" not in key}
    tensors = prepare(experts)[""].bound.weights.tensors
    assert {tensor.data.data_ptr() for key, tensor in tensors.items() if "input" not in key} == mine


def test_written_parameters_are_noticed() -> None:
    experts, routed, before, _ = run("blocks_of_128", 4)
    with torch.no_grad():
        experts.down_proj_scale_inv.mul_(2.0)
        torch.testing.assert_close(experts(*routed), 2.0 * before)


def test_the_dtype_is_that_of_the_tokens() -> None:
    """The weights do not tell it; the configuration does, until a call knows better."""
    experts = build(block_size=(128, 128), dtype=torch.float16)
    prepared = prepare(experts)[""]
    assert prepared.plan.request.dtype == "fp16"
    routed = tokens(3, 256, torch.float32)
    with torch.no_grad():
        found = experts(*routed)
    assert found.dtype == torch.float32
    expected = reference(experts, routed, (128, 128), (128, 128), group=128)
    assert relative_error(found, expected) <= TOLERANCE[torch.float32]


def test_a_model_with_fp8_experts() -> None:
    """As transformers makes it on a machine that has FP8."""
    entry = next(entry for entry in decorated_classes() if entry.name == "MixtralExperts")
    model = entry.build_model(seed=1).to(torch.bfloat16)
    dense = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head", "gate"]
    model = replace_with_fp8_linear(model, dense, FineGrainedFP8Config(weight_block_size=(16, 8)))
    experts = {name: module for name, module in model.named_modules() if name.endswith(".experts")}
    for name, module in experts.items():
        model.set_submodule(name, randomized(module))
    model.set_experts_implementation(NAME)
    prepared = prepare(model)
    assert set(prepared) == set(experts) != set()
    assert {plan.plan.request.dtype for plan in prepared.values()} == {"bf16"}
    with torch.no_grad():
        logits = model(torch.arange(3, 9)[None]).logits
    assert bool(logits.isfinite().all())


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    """The same module with memory and numbers; it was made on the meta device."""
    assert type(module) is FP8Experts
    module = module.to_empty(device="cpu")
    randomize_(module, torch.Generator().manual_seed(4))
    return module


# Refused ------------------------------------------------------------------------------------------------------


def changed(**attributes: Any) -> Any:
    def change(experts: Any) -> None:
        for name, value in attributes.items():
            setattr(experts, name, value)

    return change


def recast(name: str, dtype: torch.dtype) -> Any:
    def change(experts: Any) -> None:
        tensor = torch.ones(getattr(experts, name).shape).to(dtype)
        setattr(experts, name, torch.nn.Parameter(tensor, requires_grad=False))

    return change


class UnusedScale(FP8Experts):
    """Its forward does not do what its attributes say."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        # Another test may have decorated the class itself.
        return inspect.unwrap(FP8Experts.forward)(self, hidden_states, top_k_index, top_k_weights * 2)


BLOCKS: dict[str, Any] = {"block_size": (128, 128)}
REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "block": (BLOCKS, changed(block_size=(128,)), r"block_size is \(128,\); expected \(rows, columns\) or None"),
    "scheme": (BLOCKS, changed(activation_scheme="later"), "activation_scheme is 'later'; expected dynamic or static"),
    "order": (BLOCKS, changed(is_concatenated=False), "FP8 experts that are transposed or interleave"),
    "bias": (BLOCKS, changed(has_bias=True), "parameter gate_up_proj_bias is missing"),
    "weights": (BLOCKS, recast("down_proj", torch.bfloat16), r"down_proj is torch.bfloat16; FP8 experts hold"),
    "scales": (BLOCKS, recast("down_proj_scale_inv", torch.float16), "down_proj_scale_inv is torch.float16"),
    "no_scale": (BLOCKS, lambda experts: delattr(experts, "down_proj_scale_inv"), "down_proj_scale_inv is missing"),
    "fp4_scales": ({**BLOCKS, **_FP4}, changed(), "packed fp4, gate_up_proj_scale_inv is torch.float32"),
    "fp4_static": (
        {**BLOCKS, **_FP4, "scale_fmt": "ue8m0", "activation_scheme": "static"},
        changed(),
        "packed fp4 with static activation scales",
    ),
    "tile_over_the_gate": ({**BLOCKS, "inner": 192}, changed(), "tiles of 128 rows, and the gate ends after 192"),
    "shape": ({**BLOCKS, "inner": 256}, changed(block_size=(64, 64)), r"w13_scale: expected \[4, 8, 4\]"),
    "forward": ({**BLOCKS, "base": UnusedScale}, changed(), "computes something else than its flags say"),
}


@pytest.mark.error_path
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name: str) -> None:
    arguments, change, message = REFUSED[name]
    experts = build(**arguments)
    change(experts)
    for use in (prepare, lambda experts: experts(*tokens(2, 256, torch.bfloat16))):
        with pytest.raises(UnsupportedModelError, match=f"(?s){type(experts).__name__}.*{message}"):
            use(experts)


@pytest.mark.error_path
def test_tokens_of_a_dtype_that_no_layer_has() -> None:
    with pytest.raises(InputError, match=r"FP8Experts: tokens are torch\.float64; expected one of"):
        build(block_size=(128, 128))(*tokens(2, 256, torch.float64))


@pytest.mark.error_path
def test_numbers_that_no_backend_reads_are_an_error_with_reasons() -> None:
    experts = build(block_size=(128, 128))
    with pytest.raises(ResolutionError, match=r"asked: fp8_block128, bf16"):
        prepare(experts, manager=BackendManager())
