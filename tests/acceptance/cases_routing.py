"""Acceptance cases from public bug reports: routers. Expectations are the oracle's, in float64."""

from __future__ import annotations

import math
from typing import Any

import reference_moe
import torch
from case_lib import T_, Lib, case, expect, plain
from cases_open import dense
from reference_moe import F64, det, route, sigmoid

#: As the other cases have it for routing.
LIMIT = 1e-4


def require_weights(library: Lib, comparisons: T_, what: str, logits: torch.Tensor, k: int, **more: Any) -> None:
    """The library's routing as a matrix equals the oracle's; `wrong` is what the reported fault gives."""
    wrong = more.pop("wrong", None)
    num_experts = logits.shape[1]
    wanted = dense(*route(logits, k, **more), num_experts)
    found = lambda: dense(*library.route(logits, k, **more), num_experts)  # noqa: E731
    comparisons.close(what, found, wanted, LIMIT, wrong=wrong)


def renormalized(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`scores` of `ids` as a matrix whose rows sum to 1."""
    weights = scores.gather(1, ids)
    return dense(ids, weights / weights.sum(1, keepdim=True), scores.shape[1])


@case(
    "MC-101",
    "routing",
    "Weights of tiny scores survive a large correction bias",
    ["flashinfer-ai/flashinfer#3875 p 2026-07-07", "flashinfer-ai/flashinfer#3803 p 2026-07-02"],
    "Every weight of a token was zero, or NaN after the division.",
    "The score is won back as (score + bias) - bias, and 1e-8 beside 12 is lost in fp32.",
    "logits near -18, biases near 12: weights are those of the sigmoids alone; all zero is told apart.",
)
def tiny_scores(library: Lib, comparisons: T_) -> None:
    logits, bias = det((5, 8), 201, 1 / 64) - 18, 12 + det((8,), 202, 1 / 512)
    options = {"scoring": "sigmoid", "bias": bias, "scale": 2.5}
    lost = ((sigmoid(logits) + bias).float() - bias.float()).double()
    wrong = dense(route(logits, 3, **options)[0], lost.gather(1, route(logits, 3, **options)[0]), 8)
    require_weights(library, comparisons, "top-3 of 8", logits, 3, **options, wrong=wrong)


@case(
    "MC-102",
    "routing",
    "Equal logits weigh the same, however far below zero",
    ["sgl-project/sglang#38320 p 2026-09-07", "sgl-project/sglang#31017 p 2026-07-13"],
    "NaN from finite logits near -100; with a small term added to the divisor the weights of a token summed to 0.13.",
    "The sigmoid underflows in fp32, and so does the sum of the chosen ones.",
    "all logits -50 or -100, sigmoid, renormalized: four weights of 1/4; weights over sum + 1e-20 are told apart.",
)
def equal_logits_far_below_zero(library: Lib, comparisons: T_) -> None:
    for level in (-50.0, -100.0):
        logits = torch.full((3, 6), level, dtype=F64)
        chosen = sigmoid(logits)[:, :4]
        attenuated = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
        wrong = dense(torch.arange(4).expand(3, 4), attenuated, 6)
        require_weights(library, comparisons, f"logits {level:g}", logits, 4, scoring="sigmoid", wrong=wrong)


@case(
    "MC-103",
    "routing",
    "Barred experts are picked last, each once",
    ["vllm-project/vllm-omni#7175 p 2026-09-09"],
    "With a bias of -inf for all experts but one the same expert filled several slots.",
    "A winner is taken out by writing -inf over its score, which others have already.",
    "bias -inf except for expert 2, top-3: expert 2 first, then two others, each once.",
)
def barred_experts(library: Lib, comparisons: T_) -> None:
    logits, bias = torch.zeros(3, 6, dtype=F64), torch.full((6,), -math.inf)
    bias[2] = 0.0
    ids, _ = library.route(logits, 3, scoring="sigmoid", bias=bias)
    comparisons.same("expert 2 first, all distinct", ids.tolist() == [[2, 0, 1]] * 3, ids[0].tolist())


@case(
    "MC-104",
    "routing",
    "Biased scores far below zero still have an order",
    ["vllm-project/vllm#31478 p 2025-12-29", "deepseek-ai/DeepSeek-V3#741 i 2025-03-04"],
    "A search that starts at -1 or 0 as the smallest possible score finds no expert, or one of a closed group.",
    "Scores are taken for probabilities although a bias was added.",
    "biases from -9 to -5, with and without groups: the largest biased scores win.",
)
def biased_scores_below_zero(library: Lib, comparisons: T_) -> None:
    logits, bias = det((6, 12), 203, 1 / 32), det((12,), 204, 1 / 64) - 7
    first = dense(torch.arange(4).expand(6, 4), torch.full((6, 4), 0.25), 12)
    options = {"scoring": "sigmoid", "bias": bias}
    require_weights(library, comparisons, "no groups", logits, 4, **options, wrong=first)
    require_weights(library, comparisons, "2 of 3 groups", logits, 4, **options, n_group=3, topk_group=2, wrong=first)


@case(
    "MC-105",
    "routing",
    "A score that is larger by a little wins, wherever it stands",
    ["sgl-project/sglang#31768 p 2026-07-28"],
    "Up to a tenth of the tokens went to other experts than in the released model.",
    "To break ties by index, 3e-7 times the index was subtracted from every score.",
    "64 experts, the last one's logit larger by 4e-6: it wins; equal logits go to the lower id.",
)
def close_scores(library: Lib, comparisons: T_) -> None:
    logits = torch.zeros(2, 64, dtype=F64)
    logits[0, 63] = 4e-6
    wrong = dense(torch.tensor([[0], [0]]), torch.ones(2, 1), 64)
    require_weights(library, comparisons, "sigmoid", logits, 1, scoring="sigmoid", wrong=wrong)
    require_weights(library, comparisons, "softmax", logits, 1, wrong=wrong)


@case(
    "MC-106",
    "routing",
    "Any number of experts, not only powers of two",
    ["sgl-project/sglang#31768 p 2026-07-28", "lightseekorg/tokenspeed#1461 p 2026-09-09"],
    "Lanes beyond the experts win where all scores are negative, or hand out the id after the last expert.",
    "A block is as wide as the next power of two, and padding counts as a score of zero.",
    "33, 60, 160, 384 and 896 experts, all logits below zero, top-8: distinct ids in range, weights as the oracle's.",
)
def numbers_of_experts(library: Lib, comparisons: T_) -> None:
    for num_experts in (33, 60, 160, 384, 896):
        logits = det((2, num_experts), 205 + num_experts, 1 / 512) - 3
        ids, _ = library.route(logits, 8, scoring="topk_softmax")
        in_range = all(len(set(row)) == 8 and max(row) < num_experts and min(row) >= 0 for row in ids.tolist())
        comparisons.same(f"{num_experts}: in range, distinct", in_range)
        require_weights(library, comparisons, f"{num_experts}: weights", logits, 8, scoring="topk_softmax")


@case(
    "MC-107",
    "routing",
    "Logits of padding rows may be NaN, others may not",
    ["lightseekorg/tokenspeed#1461 p 2026-09-09", "vllm-project/vllm#39391 p 2026-04-16"],
    "Rows that pad a captured batch hold NaN: one router returned an id beyond the experts, another one id k times.",
    "No comparison with NaN is true, so a search keeps its start value.",
    "rows 1 and 4 of 5 pad, with NaN: ids -1 and weights 0 there, the oracle's elsewhere; NaN in a token is an error.",
)
def padding_rows(library: Lib, comparisons: T_) -> None:
    logits, valid = det((5, 8), 207, 1 / 16), torch.tensor([True, False, True, True, False])
    logits[~valid] = math.nan
    for scoring in ("softmax", "sigmoid", "topk_softmax"):
        ids, weights = library.route(logits, 2, scoring=scoring, valid=valid)
        is_padding = bool((ids[~valid] == -1).all() and (weights[~valid] == 0).all())
        comparisons.same(f"{scoring}: padding", is_padding, ids[1].tolist())
        wanted_ids, wanted = route(logits[valid], 2, scoring=scoring)
        rows = lambda ids=ids, weights=weights: dense(ids[valid], weights[valid], 8)  # noqa: E731
        comparisons.close(f"{scoring}: tokens", rows, dense(wanted_ids, wanted, 8), LIMIT)
    comparisons.raises("NaN in a token", lambda: library.route(logits, 2), "nan")


@case(
    "MC-108",
    "routing",
    "Logits that are a part of a wider tensor",
    ["flashinfer-ai/flashinfer#4713 p 2026-08-24"],
    "Wrong experts for every token but the first, and no error.",
    "A row's address is its number times the number of experts; the stride is not asked for.",
    "logits = wide[:, :8] of 12 columns, and a transposed tensor: the oracle's routing; dense reading is told apart.",
)
def strided_logits(library: Lib, comparisons: T_) -> None:
    wide = det((6, 12), 208, 1 / 16)
    read_densely = wide.flatten()[:48].view(6, 8)
    wrong = dense(*route(read_densely, 2), 8)
    require_weights(library, comparisons, "a slice", wide[:, :8], 2, wrong=wrong)
    require_weights(library, comparisons, "transposed", wide[:, :8].T.contiguous().T, 2, wrong=wrong)


@case(
    "MC-109",
    "routing",
    "Scores of 16-bit logits are computed in fp32",
    ["NVIDIA/Megatron-LM#2741 i 2025-12-23", "marin-community/marin#4234 p 2026-03-28"],
    "Weights differ in the third digit, and near ties go to other experts.",
    "Sigmoid or softmax, and the division after it, keep the dtype of the logits.",
    "bf16 logits, sigmoid and softmax: 1e-4 of the oracle on the same logits; scores rounded to bf16 are told apart.",
)
def half_precision_logits(library: Lib, comparisons: T_) -> None:
    logits = det((9, 16), 209, 1 / 32).bfloat16()
    for scoring, score in (("sigmoid", torch.sigmoid), ("softmax", lambda values: values.softmax(-1))):
        ids, _ = route(logits, 4, scoring=scoring)
        wrong = renormalized(score(logits).double(), ids)
        require_weights(library, comparisons, scoring, logits, 4, scoring=scoring, wrong=wrong)


@case(
    "MC-110",
    "routing",
    "A bias beside softmax scores picks, and does not weigh",
    ["huggingface/transformers#39581 p 2025-07-22", "PaddlePaddle/PaddleFormers#3452 p 2026-01-07"],
    "A family with softmax scores and a correction bias took weights that contained the bias.",
    "Top-k over the biased scores returns these as weights, and nobody gathers again.",
    "softmax, bias of up to a quarter, top-3 of 8, renormalized and not.",
)
def bias_beside_softmax(library: Lib, comparisons: T_) -> None:
    logits, bias = det((7, 8), 210, 1 / 64), det((8,), 211, 1 / 512)
    ids, _ = route(logits, 3, bias=bias)
    biased = logits.softmax(-1) + bias
    wrong = renormalized(biased, ids)
    require_weights(library, comparisons, "renormalized", logits, 3, bias=bias, wrong=wrong)
    raw = dense(ids, biased.gather(1, ids), 8)
    require_weights(library, comparisons, "as they are", logits, 3, bias=bias, renormalize=False, wrong=raw)


@case(
    "MC-111",
    "routing",
    "A bias reorders sigmoid scores as it does, not softmax scores",
    ["ml-explore/mlx-lm#1883 i 2026-09-13", "ml-explore/mlx-lm#1354 p 2026-06-05"],
    "Plausible text; half of the tokens went to other experts, and weights were up to a third off.",
    "The port of a sigmoid router used softmax, added the bias to the weights and dropped the scaling factor.",
    "32 experts, top-4, sigmoid, bias, factor 1.5: softmax in its place is told apart, and so is the missing factor.",
)
def sigmoid_or_softmax(library: Lib, comparisons: T_) -> None:
    logits, bias = det((8, 32), 212, 1 / 32), det((32,), 213, 1 / 256)
    options = {"scoring": "sigmoid", "bias": bias, "scale": 1.5}
    softmax = dense(*route(logits, 4, **{**options, "scoring": "softmax"}), 32)
    require_weights(library, comparisons, "not softmax", logits, 4, **options, wrong=softmax)
    unscaled = dense(*route(logits, 4, **{**options, "scale": 1.0}), 32)
    require_weights(library, comparisons, "with its factor", logits, 4, **options, wrong=unscaled)


@case(
    "MC-112",
    "routing",
    "A group's score is its best expert's, with a bias that of its best two",
    [
        "NVIDIA/Megatron-LM#1378 i 2025-02-06",
        "vllm-project/vllm#13474 p 2025-02-18",
        "vllm-project/vllm#46869 p 2026-06-26",
    ],
    "Models of one generation ran with the other's rule: other groups, slightly worse answers.",
    "The rule is hard-wired, or hangs on the scoring function.",
    "group 0 has the best expert, group 1 the best two: without bias group 0 stays open, with a bias of zeros group 1.",
)
def scores_of_groups(library: Lib, comparisons: T_) -> None:
    logits = torch.tensor([[3.0, -3.0, -3.0, -3.0, 2.5, 2.5, -3.0, -3.0]], dtype=F64)
    for scoring in ("softmax", "sigmoid"):
        for bias, group in ((None, 0), (torch.zeros(8), 1)):
            more = {} if bias is None else {"bias": bias}
            ids, _ = library.route(logits, 2, scoring=scoring, n_group=2, topk_group=1, **more)
            found = sorted(set((ids // 4).flatten().tolist()))
            comparisons.same(f"{scoring}, {'no bias' if bias is None else 'bias'}: group {group}", found == [group])


@case(
    "MC-113",
    "routing",
    "One expert, and all of the experts",
    ["microsoft/Tutel#218 i 2023-11-07"],
    "With a single expert the output of a layer was not that of the expert.",
    "A path for one expert takes a shape or a stride for granted.",
    "1 expert, top-1: weight 1 and the plain MLP; 4 experts, top-4: every expert once; no token: [0, k].",
)
def few_experts(library: Lib, comparisons: T_) -> None:
    require_weights(library, comparisons, "top-1 of 1", det((5, 1), 214), 1)
    require_weights(library, comparisons, "top-4 of 4", det((5, 4), 215, 1 / 16), 4)
    empty = library.route(torch.zeros(0, 4, dtype=F64), 2)
    comparisons.same("no token", [tuple(part.shape) for part in empty] == [(0, 2), (0, 2)])
    spec = plain(T=5, E=1, K=1, seed=216)
    gate, up = (spec["x"] @ spec["ckpt"]["w13"][0].T).chunk(2, 1)
    mlp = (reference_moe.silu(gate) * up) @ spec["ckpt"]["w2"][0].T
    comparisons.same("the oracle is the MLP", reference_moe.rel(expect(spec), mlp) < 1e-12)
    comparisons.close("the layer", lambda: library.run(**spec), mlp)
