"""Acceptance cases from public bug reports: what one layer is given. Expectations are the oracle's, in float64."""

from __future__ import annotations

import math
from typing import Any

import reference_moe
import torch
from case_lib import T_, Lib, case, expect, fp8_ckpt, int_ckpt, mxfp4_ckpt, nvfp4_ckpt, plain
from reference_moe import F64, det

Spec = dict[str, Any]

#: As the other cases have it, for bf16 and for quantized layers.
LIMIT, QUANTIZED_LIMIT = 2e-2, 8e-2


def layer(seed: int, **sizes: Any) -> Spec:
    return plain(**{"T": 6, "H": 64, "I": 32, "E": 4, "seed": seed, **sizes})


def formats(spec: Spec, *names: str) -> dict[str, Spec]:
    """The spec with its weights in one format of each kind, or in those of `names`."""
    w13, w2 = spec["ckpt"]["w13"], spec["ckpt"]["w2"]
    scales = reference_moe.nvfp4_global(spec["x"]), 0.0021
    stored = {
        "plain": lambda: {},
        "fp8": lambda: fp8_ckpt(w13, w2, (64, 64)),
        "int8": lambda: int_ckpt(w13, w2, 8),
        "int4": lambda: int_ckpt(w13, w2, 4, 32),
        "mxfp4": lambda: mxfp4_ckpt(w13, w2),
        "nvfp4": lambda: nvfp4_ckpt(w13, w2, *scales),
    }
    return {name: {**spec, "ckpt": {**spec["ckpt"], **stored[name]()}} for name in names or stored}


def tensors(ckpt: Spec) -> dict[str, torch.Tensor]:
    return {name: value for name, value in ckpt.items() if isinstance(value, torch.Tensor)}


@case(
    "MC-141",
    "strides",
    "Hidden states that are a part of a wider tensor, or transposed",
    ["vllm-project/vllm#43190 p 2026-05-20", "microsoft/Tutel#218 i 2023-11-07"],
    "A fused projection hands on a slice: a kernel that steps by the width of a row reads its neighbours.",
    "Only the shape of the input is looked at.",
    "x = wide[:, 64:128], x of every second column (NaN between), x transposed: the oracle's; dense reading differs.",
)
def strided_tokens(library: Lib, comparisons: T_) -> None:
    spec = layer(401)
    wide = det((6, 192), 402)
    wide[:, 64:128] = spec["x"]
    wanted = expect(spec)
    wrong = expect(spec, x=wide.flatten()[64 : 64 + 384].view(6, 64))
    comparisons.close("a slice", lambda: library.run(**{**spec, "x": wide[:, 64:128]}), wanted, wrong=wrong)
    holes = torch.full((6, 128), math.nan, dtype=F64)
    holes[:, ::2] = spec["x"]
    comparisons.close("every second column", lambda: library.run(**{**spec, "x": holes[:, ::2]}), wanted)
    comparisons.close("transposed", lambda: library.run(**{**spec, "x": spec["x"].T.contiguous().T}), wanted)


@case(
    "MC-142",
    "strides",
    "Routing that one row of memory stands for",
    ["vllm-project/vllm#57167 p 2026-09-16", "flashinfer-ai/flashinfer#4713 p 2026-08-24"],
    "Expanded tensors have a row stride of zero; a kernel that steps by k reads past their end.",
    "A stride of zero passes a check for contiguous rows.",
    "ids and weights of one row expanded to 6 tokens, and column-major ones: the oracle's answer.",
)
def expanded_routing(library: Lib, comparisons: T_) -> None:
    spec = layer(403)
    one = {"ids": spec["ids"][:1].expand(6, 2), "wts": spec["wts"][:1].expand(6, 2)}
    comparisons.close("expanded", lambda: library.run(**{**spec, **one}), expect({**spec, **one}))
    turned = {name: spec[name].T.contiguous().T for name in ("ids", "wts")}
    comparisons.close("column-major", lambda: library.run(**{**spec, **turned}), expect(spec))


@case(
    "MC-143",
    "strides",
    "Weights that are views of a larger tensor",
    ["linkedin/Liger-Kernel#1377 p 2026-08-12"],
    "Experts cut from a packed tensor lie apart; a kernel counted tiles as if they followed each other.",
    "The distance between experts is computed from the shape.",
    "w13 and w2 as slices of tensors with NaN around them, and one expert expanded to four: the oracle's answer.",
)
def weights_that_are_views(library: Lib, comparisons: T_) -> None:
    spec = layer(404)
    for dtype in (torch.float64, torch.bfloat16):
        views = {}
        for name in ("w13", "w2"):
            weight = spec["ckpt"][name].to(dtype)
            around = torch.full([size + 8 for size in weight.shape], math.nan, dtype=dtype)
            views[name] = around[4:-4, 4:-4, 4:-4].copy_(weight)
        other = {**spec, "ckpt": {**spec["ckpt"], **views}}
        comparisons.close(f"slices, {dtype}", lambda other=other: library.run(**other), expect(spec))
    for name, other in formats(spec).items():
        same = {key: value[:1].expand(value.shape) for key, value in tensors(other["ckpt"]).items()}
        other = {**other, "ckpt": {**other["ckpt"], **same}}
        what = f"one expert, {name}"
        comparisons.close(what, lambda other=other: library.run(**other), expect(other), QUANTIZED_LIMIT)


@case(
    "MC-144",
    "large batches",
    "More than 65535 rows of tokens and slots",
    ["FlashML-org/FreeToken#186 i 2026-08-25"],
    "8191 tokens of top-8 worked and 8192 did not; the error came from the next call.",
    "A row is a block of the grid's last axis, which ends at 65535, and no launch is checked.",
    "8200 tokens, top-8: the last rows are the oracle's.",
)
def many_rows(library: Lib, comparisons: T_) -> None:
    spec = layer(405, T=8, H=16, I=8, E=8, K=8)
    many = {**spec, **{name: spec[name].repeat(1025, 1) for name in ("x", "ids", "wts")}}
    output = library.run(**many)
    wanted = expect(spec)
    comparisons.close("the first rows", lambda: output[:8], wanted)
    comparisons.close("the last rows", lambda: output[-8:], wanted, wrong=wanted * 0)


@case(
    "MC-145",
    "many experts",
    "Numbers of experts that fill no block",
    ["ModelTC/LightLLM#1369 p 2026-06-25", "axolotl-ai-cloud/axolotl#3865 p 2026-07-21"],
    "Experts were counted modulo their number to stay in range, so the first ones were worked on twice.",
    "A block of lanes is wider than what is left of the experts.",
    "5 and 131 experts, tokens for the first and the last ones: the oracle's answer, on one rank and on three.",
)
def experts_that_fill_no_block(library: Lib, comparisons: T_) -> None:
    for num_experts in (5, 131):
        spec = layer(406, H=32, I=16, E=num_experts)
        last = num_experts - 1
        spec["ids"] = torch.tensor([[0, last], [last, last - 1], [1, 0], [-1, last], [2, 3], [last, 0]])
        twice = torch.where(spec["ids"] < 3, 2.0, 1.0) * spec["wts"]
        wrong = expect(spec, wts=twice)
        for name, other in formats(spec, "plain", "mxfp4").items():
            run = lambda other=other: library.run(**other)  # noqa: E731
            comparisons.close(f"{num_experts}, {name}", run, expect(other), QUANTIZED_LIMIT)
        comparisons.close(
            f"{num_experts}, 3 ranks", lambda spec=spec: library.run(**spec, ep=3), expect(spec), wrong=wrong
        )


@case(
    "MC-146",
    "router weights",
    "A slot of weight zero adds nothing, and zero on the input is no missing slot",
    ["huggingface/transformers#48205 p 2026-08-22"],
    "Slots of other ranks get the weight zero and stay in the batch; what they computed came back by another way.",
    "A weight of zero is taken for a mark of padding in one place and for a number in another.",
    "second slots of weight 0 with biases: nothing on the output; on the input they still add f(b13) and b2.",
)
def weights_of_zero(library: Lib, comparisons: T_) -> None:
    spec = layer(407, bias=True)
    spec["wts"] = spec["wts"] * torch.tensor([1.0, 0.0])
    first = spec["ids"].clone()
    first[:, 1] = -1
    wanted = expect(spec, ids=first)
    comparisons.close("on the output", lambda: library.run(**spec), wanted)
    on_input = {**spec, "weight_on_input": True}
    comparisons.close(
        "on the input", lambda: library.run(**on_input), expect(on_input), wrong=expect(on_input, ids=first)
    )


@case(
    "MC-147",
    "sum over slots",
    "A token's experts are summed in fp32",
    [
        "vllm-project/vllm#15045 i 2025-03-18",
        "deepseek-ai/DeepEP#176 i 2025-05-24",
        "mlc-ai/TIRx-kernels#208 p 2026-09-19",
        "ml-explore/mlx-lm#938 p 2026-02-27",
    ],
    "Answers drift away after some dozen tokens with top-8 and more.",
    "The running sum is kept in bf16, where 256 + 1 is 256.",
    "one expert gives 256, fifteen give 1, all exact in bf16: 271 rounds to 272 once, and a bf16 sum stays 256.",
)
def sums_over_slots(library: Lib, comparisons: T_) -> None:
    spec = plain(T=4, H=32, I=16, E=16, K=16, seed=408, activation="relu")
    spec["ckpt"]["w13"] = torch.zeros(16, 16, 32, dtype=F64)
    spec["ckpt"]["w13"][:, 0, 0] = 1.0
    spec["ckpt"]["w2"] = torch.zeros(16, 32, 16, dtype=F64)
    spec["ckpt"]["w2"][:, :, 0] = 1.0
    spec["ckpt"]["w2"][0] *= 256.0
    spec["x"] = torch.ones(4, 32, dtype=F64)
    spec |= {"ids": torch.arange(16).expand(4, 16), "wts": torch.ones(4, 16, dtype=F64)}
    wanted = expect(spec)
    comparisons.close("the largest first", lambda: library.run(**spec), wanted, 5e-3, wrong=wanted * 0 + 256)
    other = {**spec, "ids": spec["ids"].flip(1)}
    comparisons.close("the largest last", lambda: library.run(**other), wanted, 5e-3)


@case(
    "MC-148",
    "bad tokens",
    "A token of NaN or infinity spoils itself alone",
    ["flashinfer-ai/flashinfer#3650 p 2026-06-16", "vllm-project/vllm#54683 p 2026-09-01"],
    "One bad request turned a whole batch into NaN.",
    "Rows share a tile or a scale, and 0 x NaN is NaN.",
    "token 2 has one NaN, then one infinity, and valid ids: the other rows are the oracle's in every format.",
)
def bad_tokens(library: Lib, comparisons: T_) -> None:
    others = [0, 1, 3, 4, 5]
    for name, spec in formats(layer(409)).items():
        wanted = expect(spec)[others]
        for bad in (math.nan, math.inf):
            tokens = spec["x"].clone()
            tokens[2, 5] = bad
            rows = lambda spec=spec, tokens=tokens: library.run(**{**spec, "x": tokens})[others]  # noqa: E731
            comparisons.close(f"{name}, {bad}", rows, wanted, QUANTIZED_LIMIT, wrong=wanted * math.nan)


@case(
    "MC-149",
    "activation kind",
    "silu, relu and gelu without a gate, in quantized formats",
    ["flashinfer-ai/flashinfer#3350 i 2026-05-18", "vllm-project/vllm#56590 p 2026-09-14"],
    "An activation was in the list of a kernel and its runner refused it; another backend crashed without gates.",
    "The list of names is longer than what is computed.",
    "fp8, int8, int4 and mxfp4, activations silu, relu and gelu_tanh: the oracle's; relu2 is told apart.",
)
def activations_without_a_gate(library: Lib, comparisons: T_) -> None:
    for activation in ("silu", "relu", "gelu_tanh"):
        # NVFP4 has two scales here, for halves that w13 does not have.
        for name, spec in formats(layer(410, activation=activation), "fp8", "int8", "int4", "mxfp4").items():
            run = lambda spec=spec: library.run(**spec)  # noqa: E731
            wrong = expect(spec, activation="relu2")
            comparisons.right_or_raises(f"{activation}, {name}", run, expect(spec), QUANTIZED_LIMIT, wrong)
