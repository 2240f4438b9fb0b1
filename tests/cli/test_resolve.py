"""`moe-core resolve`: plans, explanations, machines, pins, models."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.error_path

ON_CPU = ("resolve", "--environment", "cpu")
ON_H100 = ("resolve", "--environment", "h100", "--quant-scheme", "fp8_block128", "--ep-size", "8")
IMPOSSIBLE = (*ON_CPU, "--runner-backend", "deep_gemm")


def _words(text):
    return " ".join(text.split())


def test_the_plan_of_the_default_layer(call):
    code, out, err = call(*ON_CPU)
    assert (code, err) == (0, "")
    for expected in (
        "machine cpu, generic CPU, preset cpu",
        "asked 128 experts, top-8, H 2048, I 768, bf16, weights bf16, silu-gated",
        "any torch:none.standard + torch:torch.standard dispatch dtype bf16 (by runner), chosen by rank (tier generic)",
        "weights layout canonical, prepared by plugin torch",
    ):
        assert expected in _words(out)


def test_this_machine_is_the_default(call):
    code, out, _ = call("resolve", "--dtype", "fp32")
    assert code == 0
    assert "probed" in out


def test_a_machine_from_a_file(call, tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"device_type": "npu", "arch": "a3", "packages": {"torch": "2.13.0"}}))
    code, out, _ = call("resolve", "--environment", str(file), "--json")
    environment = json.loads(out)["groups"][0]["decision"]["environment"]
    assert (code, environment["arch"]) == (0, "a3")


def test_sizes_reach_the_request(call):
    sizes = {"num_experts": 6, "top_k": 3, "hidden_size": 64, "intermediate_size": 48, "ep_size": 2, "tp_size": 3}
    words = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    options = ("--bias", "--activation", "swiglu_oai", "--dtype", "fp16", "--deterministic")
    code, out, _ = call(*ON_CPU, *words, *options, "--json")
    (group,) = json.loads(out)["groups"]
    request = group["decision"]["request"]
    assert code == 0
    assert {name: request[name] for name in sizes} == sizes
    assert (request["bias"], request["dtype"], request["deterministic"]) == (True, "fp16", True)
    assert request["activation"]["limit"] == 7.0
    assert group["plan"]["output_is_complete"] is False


def test_a_generation_that_nothing_names_is_a_warning(call, tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"device_type": "cuda", "arch": "sm77", "packages": {"torch": "2.13.0"}}))
    code, _, err = call("resolve", "--environment", str(file))
    assert code == 0
    assert err.startswith(f"warning: environment {file}: no plugin names sm77, ")
    assert call("resolve", "--environment", "b200")[2] == ""


def test_what_no_plugin_asks_for_in_a_machine_is_a_warning(call, tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"device_type": "cpu", "packages": {"torch": "2.13.0", "tritn": "3.6", "numpy": "2"}}))
    code, _, err = call("resolve", "--environment", str(file))
    assert code == 0
    told = f"warning: environment {file}, field 'packages': no installed plugin asks for numpy, tritn (did you mean 't"
    assert err.startswith(told)
    assert err.count("\n") == 1
    # What it says itself.
    file.write_text(call("list-backends", "--json")[1])
    assert call("resolve", "--environment", str(file))[2] == ""


def test_a_machine_for_which_no_plugin_is_installed_is_a_warning(call):
    code, out, err = call("resolve", "--environment", "ascend-a3")
    assert code == 0
    assert "chosen by rank (tier generic)" in out
    assert err.startswith("warning: no installed plugin has anything made for npu, ")


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (("--runner-backend", "deep_gemm"), "Known: torch (plugin torch), triton (plugin triton). Backends come with "),
        (("--a2a-backend", "deepep"), "Known: none (plugins torch, triton), peer_memory (plugin triton), torch_all"),
        (("--prefer", "deepep"), "Known: none (plugins torch, triton), peer_memory (plugin triton), torch, torch_a"),
        (("--quant-scheme", "fp9"), "Schemes are of moe-core itself: "),
    ],
)
def test_a_name_that_nothing_has_may_be_one_of_a_plugin_that_is_not_installed(call, words, known):
    code, out, err = call(*ON_CPU, *words)
    assert (code, out) == (2, "")
    assert known in err
    assert "quant" in words[0] or "one that is not listed by moe-core list-backends has to be installed first" in err


def test_named_shapes(call):
    shapes = ("--shape", "deepseek-v3", "--shape", "mixtral-8x7b")
    code, out, _ = call(*ON_CPU, *shapes, "--quant-scheme", "fp8_block128", "--ep-size", "2", "--explain")
    assert code == 0
    assert "plan of layer of deepseek-v3 asked 256 experts, top-8, H 7168, I 2048, bf16, weights fp8" in _words(out)
    assert "why for layer of mixtral-8x7b" in out
    code, out, _ = call(*ON_CPU, *shapes, "--json")
    groups = json.loads(out)["groups"]
    assert [group["shape"] for group in groups] == ["deepseek-v3", "mixtral-8x7b"]
    assert [group["decision"]["request"]["num_experts"] for group in groups] == [256, 8]
    code, out, _ = call(*ON_CPU, "--json")
    assert [group["shape"] for group in json.loads(out)["groups"]] == [""]


def test_a_shape_says_in_which_scheme_its_model_is_published(call):
    told = "assumed weights bf16; deepseek-v3 is published with others: --quant-scheme fp8_block128 any"
    _, out, _ = call(*ON_CPU, "--shape", "deepseek-v3", "--shape", "mixtral-8x7b")
    assert told in _words(out)
    assert out.count("assumed") == 1
    _, out, _ = call(*ON_CPU, "--shape", "deepseek-v3", "--shape", "mixtral-8x7b", "--json")
    taken = "weights bf16; deepseek-v3 is published with others: --quant-scheme fp8_block128"
    assert [group["assumed"] for group in json.loads(out)["groups"]] == [taken, ""]
    _, out, _ = call(*ON_CPU, "--shape", "deepseek-v3", "--quant-scheme", "bf16")
    assert "assumed" not in out


def test_groups_that_divide_no_size_are_told_without_weights(call):
    odd = (*ON_CPU, "--hidden-size", "200", "--intermediate-size", "96")
    code, out, _ = call(*odd, "--quant-scheme", "w4a16_int4_g128")
    assert code == 0
    said = _words(out)
    assert "groups of 128 input channels do not divide hidden_size 200, so the last of w13 has 72; most tools" in said
    assert "groups of 128 input channels do not divide intermediate_size 96, so the last of w2 has 96; most" in said
    for scheme in ("w4a16_int4_g32", "w4a16_int4", "fp8_block128", "w8a8_int8"):
        _, out, _ = call(*odd, "--quant-scheme", scheme)
        assert ("groups of" in out) == (scheme == "w4a16_int4_g32")
        assert "intermediate_size" not in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--num-experts", "4"), "--top-k 8 exceeds --num-experts 4; --top-k 8 is taken where it is not given"),
        (("--top-k", "200"), "--top-k 200 exceeds --num-experts 128; --num-experts 128 is taken where it is not given"),
        (("--num-experts", "4", "--top-k", "5"), "--top-k 5 exceeds --num-experts 4"),
        (
            ("--workload", "decode", "--workload", "decode"),
            "workload 'decode': expected each phase once, or again with ",
        ),
        (("--workload", "decode:8", "--workload", "decode:8:graph"), "workload 'decode:8': expected each phase once"),
    ],
)
def test_what_was_not_typed_or_typed_twice_is_told(call, words, told):
    code, out, err = call(*ON_CPU, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {told}")
    assert ("not given" in err) == ("not given" in told)


@pytest.mark.parametrize("word", ["decode:0", "decode:1:2", "decode:1:grahp", "decode:-1"])
def test_a_workload_that_cannot_be_names_what_was_typed(call, word):
    code, out, err = call(*ON_CPU, "--workload", word)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: workload {word!r}: expected ")
    assert "for example decode:128:graph" in err


def test_one_is_no_plural(call):
    sizes = ("--num-experts", "1", "--top-k", "1", "--workload", "decode:1")
    _, out, _ = call(*ON_CPU, *sizes, "--workload", "prefill", "--explain")
    assert "asked 1 expert, top-1," in _words(out)
    assert "up to 1 token" in out
    assert not re.findall(r"\b1 (?:tokens|experts|lines|specs|variants|layers)\b", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shape", "mixtral"), "unknown shape 'mixtral'; did you mean 'mixtral-8x7b'"),
        (("--shape", "mixtral-8x7b", "--top-k", "2"), "--shape cannot be combined with --model or with sizes"),
        (("--shape", "mixtral-8x7b", "--model", "."), "--shape cannot be combined with --model or with sizes"),
    ],
)
def test_shapes_that_are_asked_for_wrongly(call, words, message):
    code, out, err = call(*ON_CPU, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_workloads_get_a_route_each(call):
    words = ("--workload", "prefill:4096", "--workload", "decode:128")
    code, out, _ = call(*ON_CPU, *words, "--json")
    routes = json.loads(out)["groups"][0]["plan"]["routes"]
    assert code == 0
    assert [(route["phase"], route["max_tokens"]) for route in routes] == [("decode", 128), ("prefill", 4096)]


@pytest.mark.parametrize("explain", [(), ("--explain",)])
def test_infeasible(call, with_vendors, explain):
    code, out, err = call(*IMPOSSIBLE, *explain)
    assert code == 1
    assert err.startswith("error: no backend combination fits this layer on cpu")
    lines = [line.strip() for line in err.splitlines()]
    both = lines.index("cuda_vendor_gemm:deep_gemm.contiguous, .masked:")
    assert lines[both + 1] == "device: needs cuda, found cpu"
    assert "Traceback" not in err
    assert ("what you named: each spec alone" in out) == bool(explain)
    assert "plan of" not in out


def test_infeasible_as_json(call, with_vendors):
    code, out, err = call(*IMPOSSIBLE, "--json")
    document = json.loads(out)
    assert (code, document["feasible"], document["groups"][0]["plan"]) == (1, False, None)
    # Programs read Python's words, people the command's; all but the last lines have none.
    assert document["groups"][0]["error"].splitlines()[:-2] == err.removeprefix("error: ").splitlines()[:-2]


def test_pins_and_fallback(call, with_vendors):
    pinned = (*ON_H100, "--a2a-backend", "deepep.low_latency", "--runner-backend", "deep_gemm")
    code, out, _ = call(*pinned)
    assert code == 0
    assert "cuda_vendor_gemm:deepep.low_latency + cuda_vendor_gemm:deep_gemm.masked" in _words(out)
    assert "chosen by pin (a2a deepep.low_latency, runner deep_gemm), then rank" in _words(out)
    code, out, err = call(*IMPOSSIBLE, "--allow-fallback")
    assert (code, err) == (0, "")
    assert "fallback: asked for runner deep_gemm, kept no pins" in _words(out)
    assert "chosen by rank" in out


def test_a_documented_adjustment_is_said_and_strict_refuses_it(call, with_vendors):
    pinned = (*ON_H100, "--dispatch-dtype", "int8")
    code, out, _ = call(*pinned)
    assert code == 0
    assert "dispatch dtype fp8/row_128 (by pin, asked for int8)" in _words(out)
    assert "notes pinned int8 is fp8 on cuda" in _words(out)
    code, _, err = call(*pinned, "--strict")
    assert code == 1
    assert "cuda uses fp8/row_128 instead; pin fp8, or leave --strict out" in err


@pytest.mark.parametrize(
    ("option", "first"), [(("--prefer", "none.masked"), "masked"), (("--exclude", "none.standard"), "contiguous")]
)
def test_prefer_and_exclude(call, option, first):
    code, out, _ = call(*ON_CPU, *option, "--json")
    assert code == 0
    assert json.loads(out)["groups"][0]["plan"]["routes"][0]["dispatcher"] == f"torch:none.{first}"


def test_the_deprecated_variable_warns_and_counts(call, monkeypatch):
    monkeypatch.setenv("SGLANG_DEEPEP_BF16_DISPATCH", "1")
    code, out, err = call(*ON_CPU)
    assert code == 0
    assert "dispatch dtype bf16 (by variable)" in _words(out)
    assert err.startswith("warning: environment variable SGLANG_DEEPEP_BF16_DISPATCH is deprecated")


def test_a_pinned_plugin_that_failed_raises_its_error(moe_core):
    result = moe_core(*ON_CPU, "--runner-backend", "import_fails:x", sites=("broken",))
    assert result.returncode == 1
    assert "No module named 'a_module_that_does_not_exist'" in result.stderr


def test_groups_of_a_model(call, tmp_path):
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
        "intermediate_size": 256,
        "moe_intermediate_size": 32,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = call(*ON_CPU, "--model", str(tmp_path))
    assert code == 0
    assert "plan of layers 0, 2-3" in out
    assert "8 experts, top-2, H 64, I 32, fp32" in _words(out)
    code, out, _ = call(*ON_CPU, "--model", str(tmp_path / "config.json"), "--dtype", "bf16", "--json")
    assert json.loads(out)["groups"][0]["layers"] == [0, 2, 3]


ON_H200 = ("resolve", "--environment", "h200", "--json")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("quantization", "layout", "is_told"),
    [({}, "canonical", True), ({"quantization_config": FP8}, "triton_panels", False)],
)
def test_a_model_of_floats_keeps_its_weights_as_run_does(call, tmp_path, quantization, layout, is_told):
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 768}
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | quantization))
    _, out, _ = call(*ON_H200, "--model", str(tmp_path))
    (group,) = json.loads(out)["groups"]
    assert group["plan"]["weight_layout"] == layout
    left_out = (
        "left out: times of triton:triton.fused_panels, whose weights would be a copy beside those that the model "
        "keeps; a pin takes it"
    )
    assert (left_out in group["decision"]["measurements"]) == is_told
    # A layer of its own takes its weights over.
    _, out, _ = call(*ON_H200, *(("--quant-scheme", "fp8_block128") if quantization else ()))
    (group,) = json.loads(out)["groups"]
    assert group["plan"]["weight_layout"] == "triton_panels"


def test_layers_of_a_model_with_different_schemes(call, tmp_path):
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.experts"],
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = call(*ON_CPU, "--model", str(tmp_path))
    assert code == 0
    first, second = _words(out).split("plan of layer 1")
    assert "plan of layers 0, 2" in first
    assert ("weights fp8_block128" in first, "weights bf16" in second) == (True, True)


WITH_DRAFT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
FP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NVFP4_BUT_THE_DRAFT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP4, "input_activations": FP4}},
    "ignore": ["lm_head", "model.layers.3*"],
}
FP8_BUT_THE_DRAFT = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["model.layers.3"],
}


@pytest.mark.parametrize(
    ("quantization", "words", "scheme", "tokens"),
    [
        (NVFP4_BUT_THE_DRAFT, ON_CPU, "nvfp4", "bf16"),
        (FP8_BUT_THE_DRAFT, ("resolve", "--environment", "h100", "--ep-size", "8"), "fp8_block128", "fp8/row_128"),
    ],
    ids=["nvfp4", "fp8"],
)
def test_a_bf16_draft_layer_beside_quantized_layers(call, with_vendors, tmp_path, quantization, words, scheme, tokens):
    (tmp_path / "config.json").write_text(json.dumps({**WITH_DRAFT, "quantization_config": quantization}))
    words = (*words, "--model", str(tmp_path))
    code, out, _ = call(*words)
    assert code == 0
    own, draft = _words(out).split("plan of draft layer 3")
    assert "plan of layers 1-2" in own
    assert (f"weights {scheme}," in own, "weights bf16," in draft) == (True, True)
    assert "why for draft layer 3" in call(*words, "--explain")[1]
    groups = json.loads(call(*words, "--json")[1])["groups"]
    assert [(group["layers"], group["draft"]) for group in groups] == [([1, 2], False), ([3], True)]
    assert [group["plan"]["routes"][0]["dispatch_dtype"] for group in groups] == [tokens, "bf16"]


def test_draft_layers_that_are_not_understood_are_left_out_with_a_warning(call, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**WITH_DRAFT, "model_type": "glm_of_tomorrow"}))
    code, out, err = call(*ON_CPU, "--model", str(tmp_path), "--json")
    assert code == 0
    assert [group["layers"] for group in json.loads(out)["groups"]] == [[1, 2]]
    assert "warning: draft layers are left out: model type 'glm_of_tomorrow'" in err


@pytest.mark.error_path
def test_hints_are_options(call):
    code, _, err = call(*ON_CPU, "--ep-size", "2", "--a2a-backend", "none", "--exclude", "triton")
    assert code == 1
    for hint in ("say --token-placement replicated if", "  --allow-fallback lets another", "reason: --explain -v\n"):
        assert hint in err
    assert "=True" not in err
    code, out, _ = call(*ON_CPU, "--explain")
    assert code == 0
    assert "one rank needs no transport: --a2a-backend none" in _words(out.replace("│", ""))
    _, out, _ = call(*ON_CPU, "--exclude", "none.masked", "--explain")
    assert "found --exclude none.masked; leave --exclude none.masked out" in _words(out.replace("│", ""))
    assert call(*ON_CPU, "--ep-size", "0")[2] == "error: --ep-size: expected an int >= 1, got 0\n"
    _, out, _ = call("resolve", "--environment", "h100", "--ep-size", "2", "--explain")
    reason = "limit: needs max_tokens, found any number of tokens; declare --workload PHASE:TOKENS"
    assert f"triton:peer_memory.contiguous, .masked, .standard {reason}" in _words(re.sub("[│└├─]", "", out))
    # Programs read the fields of a request.
    _, out, _ = call(*ON_CPU, "--ep-size", "2", "--a2a-backend", "none", "--json")
    assert "say token_placement='replicated' if" in json.loads(out)["groups"][0]["error"]


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--top-k", "9", "--num-experts", "4"), "--top-k 9 exceeds --num-experts 4"),
        (("--tp-size", "9", "--intermediate-size", "4"), "--tp-size 9 exceeds --intermediate-size 4"),
    ],
)
def test_a_sentence_about_two_fields_names_both_options(call, words, message):
    code, _, err = call("resolve", *words)
    assert (code, err.strip()) == (2, f"error: {message}")
