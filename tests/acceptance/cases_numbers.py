"""Acceptance cases from public bug reports: what stored numbers mean. Expectations follow the formats, in float64."""

from __future__ import annotations

import math
from typing import Any

import reference_moe
import torch
from case_lib import T_, Lib, case, expect, fp8_ckpt, int_ckpt, mxfp4_ckpt, nvfp4_ckpt, plain, weights
from reference_moe import F64, det, moe

Spec = dict[str, Any]

#: As the other cases have it for quantized layers.
LIMIT = 5e-2


def layer(seed: int, **sizes: Any) -> Spec:
    return plain(**{"T": 6, "H": 64, "I": 64, "E": 2, "seed": seed, **sizes})


def among(codes: list[int], shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Bytes that are all of `codes`, in no order."""
    picks = (det(shape, seed) * 128).long() + 127
    return torch.tensor(codes, dtype=torch.uint8)[picks % len(codes)]


def with_decoder(spec: Spec, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The answer with weights that were decoded in another way."""
    quantizers = weights(spec["ckpt"])[2]
    return moe(spec["x"], w13, w2, spec["ids"], spec["wts"], q1=quantizers[0], q2=quantizers[1])


@case(
    "MC-121",
    "fp8 codes",
    "Weights with the exponent zero are subnormal",
    ["1bit-MONSTER/1bit-MONSTER#300 i 2026-07-17", "ooples/AiDotNet.Tensors#801 p 2026-07-17"],
    "All seven subnormal values of e4m3 came out wrong, some of them two times too large.",
    "The formula for normal numbers, with the hidden one, is used for exponent zero too.",
    "weights of subnormal codes alone (m/8 x 2^-6, both signs, both zeros), and of all 254 finite codes.",
)
def subnormal_weights(library: Lib, comparisons: T_) -> None:
    spec = layer(301)
    names, shapes = ("w13", "w2"), ((2, 128, 64), (2, 64, 64))
    ones = {"w13_scale_inv": torch.full((2, 2, 1), 4.0), "w2_scale_inv": torch.full((2, 1, 1), 4.0)}
    form = {"fmt": "fp8_block", "block": (64, 64), "layout": "gate_up", "orientation": "out_in", **ones}
    subnormal = [sign + mantissa for sign in (0, 128) for mantissa in range(8)]
    codes = {name: among(subnormal, shape, 302 + n) for n, (name, shape) in enumerate(zip(names, shapes, strict=True))}
    spec["ckpt"] = form | codes
    as_normal = [4 * (1 - (code >> 7).double() * 2) * (1 + (code & 7) / 8) * 2.0**-7 for code in codes.values()]
    comparisons.close(
        "subnormal codes", lambda: library.run(**spec), expect(spec), LIMIT, wrong=with_decoder(spec, *as_normal)
    )
    finite = [code for code in range(256) if code % 128 != 127]
    codes = {name: among(finite, shape, 304 + n) for n, (name, shape) in enumerate(zip(names, shapes, strict=True))}
    small = {name: scale / 4096 for name, scale in ones.items()}
    other = {**spec, "ckpt": form | small | codes}
    comparisons.close("all finite codes", lambda: library.run(**other), expect(other), LIMIT)


@case(
    "MC-122",
    "NVFP4 scales",
    "Scales of blocks with the exponent zero are subnormal",
    ["local-inference-lab/b12x#388 p 2026-09-17"],
    "A block scale with the byte 1 counted as 0.0088 instead of 0.00195: blocks of small weights came out too large.",
    "A decoder of e4m3 scales that knows normal numbers only, and drops signs.",
    "block scales of the bytes 0 to 7, with and without quantized activations.",
)
def subnormal_block_scales(library: Lib, comparisons: T_) -> None:
    spec = layer(306)
    stored = nvfp4_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"], 0.00037, 0.0011)
    for name, seed in (("w13", 307), ("w2", 308)):
        stored[f"{name}_scale"] = among(list(range(8)), tuple(stored[f"{name}_scale"].shape), seed)
        stored[f"{name}_scale_2"] = torch.full_like(stored[f"{name}_scale_2"], 3.0)
    for weight_only in (True, False):
        spec["ckpt"] = {**stored, "weight_only": weight_only}
        as_normal = [
            reference_moe.dequant_nvfp4(
                reference_moe.unpack_nibbles(stored[name]), (1 + stored[f"{name}_scale"].double() / 8) * 2.0**-7, 3.0
            )
            for name in ("w13", "w2")
        ]
        what = "16-bit activations" if weight_only else "quantized activations"
        comparisons.close(what, lambda: library.run(**spec), expect(spec), LIMIT, wrong=with_decoder(spec, *as_normal))


@case(
    "MC-123",
    "fp4 codes",
    "Codes 0, 1, 8 and 9 are zero, a half, and their negatives",
    ["tile-ai/tilelang#2704 i 2026-07-19"],
    "Exactly four of the sixteen codes were decoded wrongly: zero became 0.5 and a half 0.75.",
    "The exponent is moved to another bias as if every number were normal.",
    "mxfp4 weights of these four codes alone.",
)
def smallest_fp4_codes(library: Lib, comparisons: T_) -> None:
    spec = layer(309)
    stored = mxfp4_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"])
    bytes_of_both = [low + 16 * high for low in (0, 1, 8, 9) for high in (0, 1, 8, 9)]
    wrong = []
    for name, seed in (("w13", 310), ("w2", 311)):
        stored[name] = among(bytes_of_both, tuple(stored[name].shape), seed)
        stored[f"{name}_scale"] = torch.full_like(stored[f"{name}_scale"], 126)
        codes = reference_moe.unpack_nibbles(stored[name]).double()
        wrong.append(0.5 * torch.where(codes % 8 == 0, 0.5, 0.75) * torch.where(codes < 8, 1.0, -1.0))
    spec["ckpt"] = stored
    comparisons.close("four codes", lambda: library.run(**spec), expect(spec), LIMIT, wrong=with_decoder(spec, *wrong))


@case(
    "MC-124",
    "E8M0 scales",
    "The byte 0 is 2^-127 and the byte 255 is not a number",
    ["NVIDIA/TransformerEngine#3262 p 2026-07-25", "arch-hdl-lang/arch-com#848 p 2026-08-09"],
    "Blocks with the scale byte 0 vanished, and those with 255 became infinite.",
    "The byte is shifted into the exponent of an fp32 number, where 0 means zero and 255 infinity.",
    "mxfp4, w13 all bytes 0, tokens x 2^120: the oracle's answer, not zeros; byte 255: an error, or NaN where used.",
)
def ends_of_e8m0(library: Lib, comparisons: T_) -> None:
    spec = layer(312, activation="relu")
    stored = mxfp4_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"])
    stored["w13_scale"] = torch.zeros_like(stored["w13_scale"])
    spec |= {"ckpt": stored, "x": spec["x"] * 2.0**120}
    wanted = expect(spec)
    comparisons.close("byte 0", lambda: library.run(**spec), wanted, LIMIT, wrong=wanted * 0)
    stored = {**stored, "w13_scale": stored["w13_scale"].clone()}
    stored["w13_scale"][1] = 255
    ids = torch.tensor([[0, 0]] * 3 + [[1, 1]] * 3)
    bad = {**spec, "ckpt": stored, "ids": ids}
    try:
        output = library.run(**bad)
    except ValueError as error:
        comparisons.same("byte 255 is refused", "w13" in str(error), str(error)[:90].replace("\n", " "))
    else:
        comparisons.same("byte 255 is NaN", bool(output[3:].isnan().all() and output[:3].isfinite().all()))


@case(
    "MC-125",
    "E8M0 scales",
    "An fp16 layer keeps scales that fp16 has as subnormals, or not at all",
    ["1CatAI/1Cat-vLLM#222 p 2026-08-16"],
    "Scale bytes 103 to 112 were flushed to zero on GPUs without bf16: whole blocks of weights were lost.",
    "The exponent is written into an fp16 number, which has none that small.",
    "fp16 layer, w13 at the bytes 96 and 108, w2 as much larger: the oracle's answer, not zeros.",
)
def small_scales_in_fp16(library: Lib, comparisons: T_) -> None:
    for byte in (96, 108):
        spec = layer(313, activation="relu") | {"dtype": "float16"}
        stored = mxfp4_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"])
        stored["w13_scale"] = torch.full_like(stored["w13_scale"], byte)
        stored["w2_scale"] = torch.full_like(stored["w2_scale"], 2 * 127 - byte)
        spec["ckpt"] = stored
        wanted = expect(spec)
        comparisons.close(f"byte {byte}", lambda spec=spec: library.run(**spec), wanted, LIMIT, wrong=wanted * 0)


@case(
    "MC-126",
    "integer codes",
    "The lowest code of four and of eight bits is a number like the others",
    ["1bit-MONSTER/1bit-MONSTER#704 i 2026-07-22", "IST-DASLab/gptq#19 i 2023-04-20"],
    "A converter clipped its codes twice and lost one end of their range; readers disagree whether -8 exists.",
    "Symmetric quantization is taken to mean codes from -7 to 7.",
    "int4 of -8 and one code more in both codings, int8 of -128 and 1: their signs lost is told apart.",
)
def lowest_integer_codes(library: Lib, comparisons: T_) -> None:
    spec = layer(314, activation="relu")
    for sign in ("twos", "offset8"):
        stored = int_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"], 4, 32, sign)
        lowest = 8 if sign == "twos" else 0
        for name, seed in (("w13", 315), ("w2", 316)):
            codes = [lowest, lowest, 3]
            stored[name] = among([a + 16 * b for a in codes for b in codes], tuple(stored[name].shape), seed)
        other = {**spec, "ckpt": stored}
        plus_eight = [torch.where(weight < 0, -weight, weight) for weight in weights({**stored, "gated": False})[:2]]
        wrong = moe(other["x"], *plus_eight, other["ids"], other["wts"], activation="relu")
        comparisons.close(f"-8, {sign}", lambda other=other: library.run(**other), expect(other), LIMIT, wrong=wrong)
    stored = int_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"], 8)
    stored["w13"] = torch.where(stored["w13"] < 0, -128, 1).to(torch.int8)
    other = {**spec, "ckpt": stored}
    kept = {**stored, "w13": torch.where(stored["w13"] < 0, 127, 1).to(torch.int8)}
    wrong = expect({**spec, "ckpt": kept})
    comparisons.close("-128", lambda: library.run(**other), expect(other), LIMIT, wrong=wrong)


@case(
    "MC-127",
    "negative scales",
    "A scale below zero turns its group around",
    ["anthony-chaudhary/fak#11101 i 2026-09-03", "openvinotoolkit/nncf#2790 p 2024-07-05"],
    "Half of the groups of a checkpoint had negative scales, and a kernel read these as unsigned: gibberish.",
    "Writers use the sign to reach the larger end of the codes; readers take scales for sizes.",
    "int4 and int8, every second group with its codes and its scale negated: the same answer as before.",
)
def negative_scales(library: Lib, comparisons: T_) -> None:
    spec = layer(317)
    for bits in (4, 8):
        stored = int_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"], bits, 32)
        turned = dict(stored)
        for name in ("w13", "w2"):
            values = stored[name].long()
            if bits == 4:
                values = reference_moe.int4_values(reference_moe.unpack_nibbles(stored[name]))
            scale = stored[f"{name}_scale"]
            sign = torch.where(torch.arange(scale.shape[-1]) % 2 == 1, -1, 1)
            values = values * sign.repeat_interleave(32)
            turned[name] = values.to(torch.int8)
            if bits == 4:
                turned[name] = reference_moe.pack_nibbles(reference_moe.int4_codes(values))
            turned[f"{name}_scale"] = scale * sign
        unsigned = {name: value.abs() if name.endswith("_scale") else value for name, value in turned.items()}
        comparisons.close(
            f"int{bits}",
            lambda turned=turned: library.run(**{**spec, "ckpt": turned}),
            expect({**spec, "ckpt": stored}),
            LIMIT,
            wrong=expect({**spec, "ckpt": {**turned, **_scales(unsigned)}}),
        )


def _scales(ckpt: Spec) -> Spec:
    return {name: value for name, value in ckpt.items() if name.endswith("_scale")}


@case(
    "MC-128",
    "dtypes of scales",
    "Scales may be stored in 16 bits",
    ["modular/modular#7142 i 2026-09-16", "guoqingbao/xinfer#172 p 2026-01-14"],
    "A checkpoint with bf16 block scales was refused by one kernel and misread by another.",
    "Kernels take fp32 scales, and the loader hands over what lies in the file.",
    "fp8 blocks, int8 and int4 with scales rounded to bf16 and to fp16: the oracle's answer with these scales.",
)
def scales_of_16_bits(library: Lib, comparisons: T_) -> None:
    spec = layer(318)
    w13, w2 = spec["ckpt"]["w13"], spec["ckpt"]["w2"]
    formats = {"fp8": fp8_ckpt(w13, w2, (64, 64)), "int8": int_ckpt(w13, w2, 8), "int4": int_ckpt(w13, w2, 4, 32)}
    for name, stored in formats.items():
        for dtype in (torch.bfloat16, torch.float16):
            rounded = {
                key: value.to(dtype) if isinstance(value, torch.Tensor) and "_scale" in key else value
                for key, value in stored.items()
            }
            other = {**spec, "ckpt": rounded}
            what = f"{name}, {str(dtype).removeprefix('torch.')}"
            comparisons.right_or_raises(what, lambda other=other: library.run(**other), expect(other), LIMIT)


@case(
    "MC-129",
    "UE8M0 scales",
    "Scales that are powers of two stay, and a block of zeros stays zero",
    ["inclusionAI/humming#39 p 2026-07-13"],
    "The rounding up to a power of two gave another number than the next one.",
    "The bits of the exponent are taken and one is added in the wrong place; zero has no logarithm.",
    "fp8 blocks with power-of-two scales, and an expert of zero codes with zero scales: the answer of fp32 scales.",
)
def powers_of_two(library: Lib, comparisons: T_) -> None:
    spec = layer(319, E=3)
    stored = fp8_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"], (64, 64))
    for name in ("w13", "w2"):
        scale = reference_moe.ceil_pow2(stored[f"{name}_scale_inv"]).float()
        scale[2] = 0.0
        stored[f"{name}_scale_inv"] = scale
        stored[name][2] = 0
    wanted = expect({**spec, "ckpt": {**stored, "ue8m0": True}})
    doubled = {name: 2 * value if name.endswith("_scale_inv") else value for name, value in stored.items()}
    wrong = expect({**spec, "ckpt": doubled})
    rounded = {**spec, "ckpt": {**stored, "ue8m0": True}}
    comparisons.close("powers of two", lambda: library.run(**rounded), wanted, LIMIT, wrong=wrong)


@case(
    "MC-130",
    "overflow",
    "fp16: what lies between the projections may exceed 65504",
    [
        "ggml-org/llama.cpp#25389 p 2026-07-07",
        "ggml-org/llama.cpp#27016 p 2026-08-13",
        "unslothai/unsloth-zoo#600 p 2026-04-17",
    ],
    "Empty answers: the activation of one layer was larger than fp16 can hold, and became NaN in the second product.",
    "silu(gate) x up is rounded to fp16 before it is multiplied.",
    "gate and up 512, w2 2^-14: finite and the oracle's, unquantized, int8 and fp8.",
)
def large_activations_in_fp16(library: Lib, comparisons: T_) -> None:
    spec = layer(320) | {"dtype": "float16"}
    ckpt = spec["ckpt"]
    ckpt["w13"] = torch.zeros(2, 128, 64, dtype=F64)
    ckpt["w13"][:, :64, 0] = ckpt["w13"][:, 64:, 1] = 512.0
    ckpt["w2"] = ckpt["w2"].sign() * 2.0**-14
    spec["x"] = torch.ones(6, 64, dtype=F64)
    w13, w2 = ckpt["w13"], ckpt["w2"]
    for name, stored in {"plain": ckpt, "int8": int_ckpt(w13, w2, 8), "fp8": fp8_ckpt(w13, w2, (64, 64))}.items():
        other = {**spec, "ckpt": stored}
        wanted = expect(other)
        comparisons.close(name, lambda other=other: library.run(**other), wanted, LIMIT, wrong=wanted * math.nan)


@case(
    "MC-131",
    "activation range",
    "gelu and silu of large gates are the gate or zero, never NaN",
    ["intel/llm-scaler#484 p 2026-06-16"],
    "Blank answers on one GPU and not on two: a gate above 11 gave NaN, and a rank's half of the gates stayed below.",
    "tanh(z) as (exp(2z) - 1) / (exp(2z) + 1) is infinity over infinity.",
    "gates of +-11, +-40 and +-30000 beside up 1: f(gate), for silu, gelu and the tanh form of it.",
)
def large_gates(library: Lib, comparisons: T_) -> None:
    gates = torch.tensor([11.0, -11.0, 40.0, -40.0, 30000.0, -30000.0], dtype=F64)
    spec = layer(321, E=1, K=1)
    spec["ckpt"]["w13"] = torch.zeros(1, 128, 64, dtype=F64)
    spec["ckpt"]["w13"][0, 0, 0] = spec["ckpt"]["w13"][0, 64, 1] = 1.0
    spec["ckpt"]["w2"] = torch.zeros(1, 64, 64, dtype=F64)
    spec["ckpt"]["w2"][0, 0, 0] = 1.0
    spec["x"] = torch.zeros(6, 64, dtype=F64)
    spec["x"][:, 0], spec["x"][:, 1] = gates, 1.0
    for activation in ("swiglu", "geglu", "geglu_tanh"):
        other = {**spec, "activation": activation}
        # Row by row: the largest gate would hide what the others become.
        wanted = expect(other)
        output = library.run(**other).double()
        off = float((output - wanted).abs().div(wanted.abs().clamp(min=1e-3)).max())
        comparisons.same(activation, off < 1e-2, f"{off:.2g}")


@case(
    "MC-132",
    "clamped swiglu",
    "Every limit of plain swiglu counts, in every format",
    ["ROCm/aiter#4526 p 2026-09-08", "vllm-project/vllm-ascend#14364 p 2026-08-16"],
    "Limits of 1 and 100 gave the same bits: the format's kernel had no clamp for silu.",
    "The limit is an argument of the public call that one path forgets to hand on.",
    "fp8, nvfp4, int4 and mxfp4, limit 1 and 100: the oracle's; the other limit is told apart.",
)
def limits_of_every_format(library: Lib, comparisons: T_) -> None:
    spec = layer(322, activation="swiglu_limit")
    w13, w2, spec["x"] = spec["ckpt"]["w13"], spec["ckpt"]["w2"], spec["x"] * 4
    scales = reference_moe.nvfp4_global(spec["x"]), 0.0013
    formats = {
        "fp8": fp8_ckpt(w13, w2, (64, 64)),
        "nvfp4": nvfp4_ckpt(w13, w2, *scales),
        "int4": int_ckpt(w13, w2, 4),
        "mxfp4": mxfp4_ckpt(w13, w2),
    }
    for name, stored in formats.items():
        for limit, other_limit in ((1.0, 100.0), (100.0, 1.0)):
            other = {**spec, "ckpt": stored, "limit": limit}
            wrong = expect({**other, "limit": other_limit})
            comparisons.close(
                f"{name}, limit {limit:g}", lambda other=other: library.run(**other), expect(other), 8e-2, wrong=wrong
            )
