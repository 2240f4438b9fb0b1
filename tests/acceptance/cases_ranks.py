"""Acceptance cases from public bug reports: experts and their channels over ranks. Expectations are the oracle's."""

from __future__ import annotations

import itertools
import math
from typing import Any

import reference_moe
import torch
from case_lib import T_, Lib, case, expect, mxfp4_ckpt, plain
from cases_inputs import QUANTIZED_LIMIT, Spec, formats, layer


def over_ranks(library: Lib, spec: Spec, *cuts: int, **more: Any) -> list[torch.Tensor]:
    """What the ranks return whose tokens end at `cuts`."""
    bounds = [0, *cuts, len(spec["x"])]
    inputs = ("x", "ids", "wts")
    per_rank = [{name: spec[name][start:end] for name in inputs} for start, end in itertools.pairwise(bounds)]
    shared = {name: value for name, value in spec.items() if name not in inputs}
    return library.run_ranks(per_rank, ep=len(per_rank), **shared, **more)


def together(library: Lib, spec: Spec, *cuts: int, **more: Any) -> torch.Tensor:
    return torch.cat(list(over_ranks(library, spec, *cuts, **more)))


@case(
    "MC-161",
    "weight on input",
    "Weights on the input travel with their tokens",
    ["vllm-project/vllm#16744 p 2025-04-17", "NVIDIA/TensorRT-LLM#3492 p 2025-04-11"],
    "The weight was applied after dispatch in one version and before it in the next, or lost on the way to a rank.",
    "The option belongs to the kernel, and the rank that has the expert does not have the weights.",
    "2 ranks, biases, weights 1/4 to 1 on the input: the oracle's; weights on the output are told apart.",
    "2 ranks",
)
def weights_travel(library: Lib, comparisons: T_) -> None:
    spec = layer(501, bias=True) | {"weight_on_input": True}
    spec["wts"] = 0.25 + spec["wts"] / 2
    wrong = expect({**spec, "weight_on_input": False})
    comparisons.close("both ranks", lambda: together(library, spec, 2), expect(spec), wrong=wrong)


@case(
    "MC-162",
    "expert bias",
    "gpt-oss in whole: interleaved 4-bit rows, both biases, clamped activation, cut over ranks",
    ["NVIDIA/TensorRT-Model-Connect#136 p 2026-05-27", "huggingface/text-generation-inference#1036 i 2023-09-18"],
    "The second bias came once from each tensor-parallel rank.",
    "Every rank adds the bias to its partial sum before the sum over ranks.",
    "mxfp4, tp 2 and tp 2 x ep 2: the oracle's; the second bias twice is told apart.",
)
def biases_over_ranks(library: Lib, comparisons: T_) -> None:
    spec = plain(T=6, H=64, I=64, E=4, seed=502, activation="swiglu_oai", bias=True)
    ckpt = spec["ckpt"]
    ckpt["b2"] = ckpt["b2"] * 8
    ckpt |= mxfp4_ckpt(ckpt["w13"], ckpt["w2"]) | {"layout": "interleaved"}
    wanted = expect(spec)
    wrong = expect({**spec, "ckpt": {**ckpt, "b2": 2 * ckpt["b2"]}})
    for ranks in ({"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 4}):
        comparisons.close(str(ranks), lambda ranks=ranks: library.run(**spec, **ranks), wanted, wrong=wrong)


@case(
    "MC-163",
    "uneven ranks",
    "Odd and unequal numbers of tokens on the ranks",
    ["sgl-project/sglang-jax#1540 p 2026-08-21", "lightseekorg/tokenspeed#189 p 2026-05-20"],
    "127 tokens on a rank did not compile; elsewhere scales of rows that four does not divide were misread.",
    "A rank's share must fill a tile or a pack, and is padded in one place only.",
    "3 ranks with 1, 7 and 3 tokens, unquantized and int8: each rank gets its own rows.",
    "3 ranks",
)
def uneven_ranks(library: Lib, comparisons: T_) -> None:
    for name, spec in formats(layer(503, T=11), "plain", "int8").items():
        wanted = expect(spec)
        outputs = over_ranks(library, spec, 1, 8)
        comparisons.same(f"{name}: rows", [len(output) for output in outputs] == [1, 7, 3])
        comparisons.close(name, lambda outputs=outputs: torch.cat(list(outputs)), wanted, QUANTIZED_LIMIT)


@case(
    "MC-164",
    "quantized dispatch",
    "Ranks whose tokens differ in size keep their own scales",
    ["vllm-project/vllm#54683 p 2026-09-01"],
    "Rows that ranks had quantized with scales of their own were multiplied with the scale of one of them.",
    "Scales are gathered as one number, or cut like rows that they are not.",
    "2 ranks, the second one's tokens 64 times smaller, fp8 and nvfp4: its rows alone are the oracle's.",
    "2 ranks",
)
def tokens_of_different_size(library: Lib, comparisons: T_) -> None:
    spec = layer(504)
    spec["x"] = spec["x"] * torch.tensor([1.0] * 3 + [1 / 64] * 3)[:, None]
    for name, other in formats(spec, "fp8", "nvfp4").items():
        wanted = expect(other)
        output = together(library, other, 3)
        for rows, what in ((slice(0, 3), "large"), (slice(3, 6), "small")):
            found = lambda output=output, rows=rows: output[rows]  # noqa: E731
            comparisons.close(f"{name}, {what}", found, wanted[rows], QUANTIZED_LIMIT)


@case(
    "MC-165",
    "padding",
    "Padding rows of one rank do not reach another",
    ["huggingface/transformers#48205 p 2026-08-22", "lightseekorg/tokenspeed#1461 p 2026-09-09"],
    "NaN from rows without an expert came back through a buffer that they were never meant to be read from.",
    "Rows past the last one are sent, multiplied or summed, with a weight of zero.",
    "2 ranks, rank 0 pads two rows (ids -1, NaN in tokens and weights): zeros there, the oracle's rows elsewhere.",
    "2 ranks",
)
def padding_on_one_rank(library: Lib, comparisons: T_) -> None:
    for name, spec in formats(layer(505, T=7), "plain", "fp8").items():
        inputs = {part: spec[part].clone() for part in ("x", "ids", "wts")}
        wanted = expect(spec)
        wanted[2:4] = 0.0
        inputs["ids"][2:4], inputs["x"][2:4], inputs["wts"][2:4] = -1, math.nan, math.nan
        run = lambda spec=spec, inputs=inputs: together(library, {**spec, **inputs}, 4)  # noqa: E731
        comparisons.close(name, run, wanted, QUANTIZED_LIMIT, wrong=wanted * math.nan)


@case(
    "MC-166",
    "dispatch capacity",
    "All tokens to one rank, as many as the limit allows",
    ["vllm-project/vllm-ascend#11258 p 2026-07-01"],
    "A rank received more rows than a buffer of a fixed size held; the rest was dropped without a word.",
    "The size was right for balanced experts.",
    "2 ranks, limit 3, 3 tokens on each, all to the experts of rank 0: nothing is dropped.",
    "2 ranks",
)
def all_to_one_rank(library: Lib, comparisons: T_) -> None:
    spec = layer(506)
    spec["ids"] = torch.tensor([[0, 1]] * 6)
    wanted = expect(spec)
    dropped = torch.cat([wanted[:3], wanted[3:] * 0])
    run = lambda: together(library, spec, 3, max_dispatch_tokens_per_rank=3)  # noqa: E731
    comparisons.close("both ranks", run, wanted, wrong=dropped)


@case(
    "MC-167",
    "ids out of range",
    "An id that no expert has, on one rank, ends all ranks with an error",
    ["ROCm/aiter#2644 p 2026-04-07"],
    "A row number past the batch made a kernel read foreign memory; other ranks wait for the one that fails.",
    "Ids are checked where they are used, on the rank that owns the expert.",
    "2 ranks, rank 1 has an id 4 of 4 experts: an error that names it, within the time limit; then a call that works.",
    "2 ranks",
)
def bad_id_on_one_rank(library: Lib, comparisons: T_) -> None:
    spec = layer(507)
    ids = spec["ids"].clone()
    ids[4, 1] = 4
    comparisons.raises("id 4 on rank 1", lambda: over_ranks(library, {**spec, "ids": ids}, 3), "4")
    comparisons.close("afterwards", lambda: together(library, spec, 3), expect(spec))


@case(
    "MC-168",
    "id dtype",
    "Ranks may have ids of different widths",
    ["sgl-project/sglang#32882 p 2026-07-30"],
    "Ids of 32 bits are sent where 64 are received: a collective waits for bytes that never come.",
    "Every rank takes the dtype of its own tensor.",
    "rank 0 has int32 ids, rank 1 int64, rank 2 none at all: each rank's rows are the oracle's.",
    "3 ranks",
)
def ids_of_different_widths(library: Lib, comparisons: T_) -> None:
    spec = layer(508)
    shared = {name: spec[name] for name in ("activation", "num_experts", "ckpt")}
    parts = [(0, 2, torch.int32), (2, 6, torch.int64), (6, 6, torch.int32)]
    per_rank = [
        {"x": spec["x"][start:end], "ids": spec["ids"][start:end].to(dtype), "wts": spec["wts"][start:end]}
        for start, end, dtype in parts
    ]
    run = lambda: torch.cat(list(library.run_ranks(per_rank, ep=3, **shared)))  # noqa: E731
    comparisons.close("three ranks", run, expect(spec))


@case(
    "MC-169",
    "expert replicas",
    "Copies of an expert on one rank and on several, with tokens of every rank",
    ["vllm-project/vllm#18343 p 2025-06-21", "deepseek-ai/EPLB#8 i 2025-03-07"],
    "A placement that put two copies on one rank left one of them with old weights.",
    "The move assumes that a rank has an expert once.",
    "2 ranks, places 0 0 1 | 2 3 0 (nvfp4) and 0 0 1 | 2 0 and an always-on 3: the oracle's rows.",
    "2 ranks",
)
def copies_on_ranks(library: Lib, comparisons: T_) -> None:
    placements = {
        "plain": {"phys_to_log": [0, 0, 1, 2, 0], "shared": [3]},
        "nvfp4": {"phys_to_log": [0, 0, 1, 2, 3, 0]},
    }
    for name, spec in formats(layer(509), *placements).items():
        wanted, dropped = expect(spec), expect(spec, ids=torch.where(spec["ids"] == 0, -1, spec["ids"]))
        run = lambda spec=spec, name=name: together(library, spec, 3, eplb=placements[name])  # noqa: E731
        comparisons.close(f"{name}, {placements[name]}", run, wanted, QUANTIZED_LIMIT, wrong=dropped)


@case(
    "MC-170",
    "EP partition",
    "More ranks than experts, in quantized formats",
    ["vllm-project/vllm#52435 i ~2026-08-15"],
    "A rank without an expert has tensors of no rows, whose scales and pointers nobody expects.",
    "Local counts are taken to be at least one.",
    "3 experts over 5 ranks: every part is finite, ranks without experts add zeros, the sum is the oracle's.",
)
def more_ranks_than_experts(library: Lib, comparisons: T_) -> None:
    for name, spec in formats(layer(510, E=3)).items():
        owned = library.local_experts(3, 5)
        parts = [library.rank_part(rank, 5, **spec) for rank in range(5)]
        idle = [part for part, experts in zip(parts, owned, strict=True) if not experts]
        comparisons.same(f"{name}: idle ranks", len(idle) == 2 and all(bool((part == 0).all()) for part in idle))
        comparisons.close(name, lambda parts=parts: sum(parts[1:], parts[0]), expect(spec), QUANTIZED_LIMIT)


@case(
    "MC-171",
    "alignment",
    "Widths that the ranks do not divide",
    ["vllm-project/vllm#54178 i 2026-08-28", "ROCm/ATOM#309 p 2026-03-11"],
    "A width that does not divide was padded on one side of a product and cut on the other.",
    "The share of a rank is rounded, each part in its own way.",
    "I 40 over 3 ranks: the oracle's answer or an error that names both; the last channel lost is told apart.",
)
def widths_that_do_not_divide(library: Lib, comparisons: T_) -> None:
    for name, spec in formats(layer(511, I=40), "plain", "fp8", "int8").items():
        lost = plain(T=6, H=64, I=40, E=4, seed=511)["ckpt"]
        lost["w2"][:, :, 39:] = 0
        wrong = None if name != "plain" else expect({**spec, "ckpt": lost})
        run = lambda spec=spec: library.run(**spec, tp=3)  # noqa: E731
        comparisons.right_or_raises(name, run, expect(spec), QUANTIZED_LIMIT if wrong is None else 2e-2, wrong)


@case(
    "MC-172",
    "batch invariance",
    "A rank's answer does not depend on how many tokens the others have",
    ["vllm-project/vllm#57016 i ~2026-09-15"],
    "Greedy answers changed with the load of other ranks.",
    "The order of a sum, or the size of a tile, follows the number of rows that arrive.",
    "2 ranks, deterministic: rank 0 with 2 tokens, beside 4 and beside none: bit by bit the same.",
    "2 ranks",
)
def load_of_other_ranks(library: Lib, comparisons: T_) -> None:
    spec = layer(513) | {"deterministic": True}
    beside_four = over_ranks(library, spec, 2)[0]
    alone = {**spec, **{name: spec[name][:2] for name in ("x", "ids", "wts")}}
    beside_none = over_ranks(library, alone, 2)[0]
    comparisons.close("beside four", lambda: beside_four, expect(alone))
    comparisons.close("beside none", lambda: beside_none, expect(alone))
    same = torch.equal(beside_four, beside_none)
    comparisons.same("bit by bit", same or not library.deterministic, reference_moe.rel(beside_four, beside_none))
