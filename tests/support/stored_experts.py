"""Tiny checkpoints in every storage, written by code of their own, with the float64 values they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from safetensors.torch import save_file

from moe_core import LayerRequest
from moe_core.payloads import Tensor
from moe_core.quant import WHOLE, QuantScheme

#: Where the experts of a written layer lie.
MODULE = "model.layers.0.mlp.experts"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@attrs.define
class Matrix:
    """One projection of one expert: its tensors by suffix, and its values."""

    tensors: dict[str, Tensor]
    values: Tensor
    input_scale: float | None = None


Writer = Callable[[torch.Generator, int, int, QuantScheme], Matrix]


def spread(scales: Tensor, block: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Every element's scale."""
    height = rows if block[0] == WHOLE else block[0]
    width = columns if block[1] == WHOLE else block[1]
    return scales.double()[torch.arange(rows)[:, None] // height, torch.arange(columns) // width]


def grid(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Tiles in both directions."""
    return tuple(1 if b == WHOLE else math.ceil(n / b) for n, b in zip((rows, columns), block, strict=True))  # type: ignore[return-value]


def words(codes: Tensor, axis: int, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of unsigned codes along `axis`; the last word is filled up with zeros."""
    per = 32 // bits
    codes = codes.movedim(axis, -1).long()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per))
    packed = torch.zeros(*codes.shape[:-1], codes.shape[-1] // per, dtype=torch.int64)
    for place in range(per):
        packed += codes[..., (order[place] if order else place) :: per] << (bits * place)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return packed.to(torch.int32).movedim(-1, axis).contiguous()


def pairs(codes: Tensor, axis: int) -> Tensor:
    """uint8 of two 4-bit codes along `axis`, the first low."""
    codes = codes.movedim(axis, -1)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8).movedim(-1, axis).contiguous()


def _scales(g: torch.Generator, shape: tuple[int, ...], word: str) -> Tensor:
    """Scales of many sizes, as stored."""
    if word == "e8m0":
        return torch.randint(118, 132, shape, generator=g, dtype=torch.uint8)
    values = torch.rand(shape, generator=g) * 0.9 + 0.1
    return values.to({"fp32": torch.float32, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[word])


def meaning(scales: Tensor) -> Tensor:
    return 2.0 ** (scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()


def _codes(g: torch.Generator, rows: int, columns: int, low: int, high: int) -> Tensor:
    return torch.randint(low, high + 1, (rows, columns), generator=g)


def plain(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
    weight = torch.randn(rows, columns, generator=g).bfloat16()
    return Matrix({"weight": weight}, weight.double())


def scaled(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
    block = scheme.weight_block
    if scheme.weight_dtype == "fp8":
        weight = (torch.randn(rows, columns, generator=g) * 40).to(torch.float8_e4m3fn)
        codes = weight.double()
    else:
        top = 8 if scheme.weight_dtype == "int4" else 128
        codes = _codes(g, rows, columns, -top, top - 1)
        weight = codes.to(torch.int8)
    if block == (WHOLE, WHOLE):
        scale = _scales(g, (), scheme.weight_scale)
        values = codes.double() * meaning(scale)
    else:
        scale = _scales(g, grid(rows, columns, block), scheme.weight_scale)
        values = codes.double() * spread(meaning(scale), block, rows, columns)
    matrix = Matrix({"weight": weight, "weight_scale_inv": scale}, values)
    _add_input_scale(g, matrix, scheme)
    return matrix


def _add_input_scale(g: torch.Generator, matrix: Matrix, scheme: QuantScheme) -> None:
    if scheme.activation_scaling == "static":
        matrix.input_scale = float(torch.rand((), generator=g) + 0.5)
        matrix.tensors["input_scale"] = torch.tensor(matrix.input_scale)


def _integers(
    g: torch.Generator, rows: int, columns: int, scheme: QuantScheme
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unsigned codes, scales, unsigned zero points and values."""
    size = grid(rows, columns, scheme.weight_block)
    top = 16 if scheme.weight_dtype == "int4" else 256
    codes = _codes(g, rows, columns, 0, top - 1)
    scale = _scales(g, size, "fp32").half()
    zeros = torch.randint(0, top, size, generator=g) if scheme.zero_point else torch.full(size, top // 2)
    block = scheme.weight_block
    values = (codes - spread(zeros, block, rows, columns)) * spread(scale.double(), block, rows, columns)
    return codes, scale, zeros, values


def packed(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
    codes, scale, zeros, values = _integers(g, rows, columns, scheme)
    bits = 4 if scheme.weight_dtype == "int4" else 8
    tensors = {
        "weight_packed": words(codes, 1, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if scheme.zero_point and scheme.weight_block == (WHOLE, WHOLE):
        tensors["weight_zero_point"] = (zeros.flatten() - 2 ** (bits - 1)).to(torch.int8)
    elif scheme.zero_point:
        tensors["weight_zero_point"] = words(zeros, 0, bits)
    return Matrix(tensors, values)


def gptq(lowered: int) -> Writer:
    def write(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
        codes, scale, zeros, values = _integers(g, rows, columns, scheme)
        group = columns if scheme.weight_block[1] == WHOLE else scheme.weight_block[1]
        tensors = {
            "qweight": words(codes.T, 0, 4 if scheme.weight_dtype == "int4" else 8),
            "qzeros": words(zeros.T - lowered, 1, 4 if scheme.weight_dtype == "int4" else 8),
            "scales": scale.T.contiguous(),
            "g_idx": (torch.arange(columns) // group).int(),
        }
        return Matrix(tensors, values)

    return write


def awq(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
    codes, scale, zeros, values = _integers(g, rows, columns, scheme)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(codes.T, 1, order=order),
        "qzeros": words(zeros.T, 1, order=order),
        "scales": scale.T.contiguous(),
    }
    return Matrix(tensors, values)


def quark(*, groups: bool, signed: bool) -> Writer:
    """Words of codes as AWQ has them, or along K where an output has one scale; signed ones in two's complement."""

    def write(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
        codes, scale, zeros, values = _integers(g, rows, columns, scheme)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        if signed:
            codes, zeros = (codes - 8) % 16, (zeros - 8) % 16
        if groups:
            tensors = {
                "weight": words(codes.T, 1, order=order),
                "weight_zero_point": words(zeros.T, 1, order=order),
                "weight_scale": scale.T.contiguous(),
            }
        else:
            tensors = {
                "weight": words(codes, 1, order=order),
                "weight_zero_point": words(zeros.flatten(), 0, order=order),
                "weight_scale": scale.flatten(),
            }
        return Matrix(tensors, values)

    return write


def quark_int4_fp8(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
    matrix = quark(groups=False, signed=True)(g, rows, columns, scheme)
    outer = torch.rand((), generator=g) + 0.5
    tensors = {"weight": matrix.tensors["weight"], "weight_scale": outer} | {
        f"{suffix}_2": matrix.tensors[suffix] for suffix in ("weight_scale", "weight_zero_point")
    }
    return Matrix(tensors, matrix.values * outer.double())


def _fp4(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> tuple[Tensor, Tensor, Tensor]:
    codes = _codes(g, rows, columns, 0, 15)
    scale = _scales(g, grid(rows, columns, scheme.weight_block), scheme.weight_scale)
    return codes, scale, E2M1[codes] * spread(meaning(scale), scheme.weight_block, rows, columns)


def nvfp4(suffixes: tuple[str, str, str, str], divides: bool) -> Writer:
    def write(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
        codes, scale, values = _fp4(g, rows, columns, scheme)
        outer, inner = 2.0 ** -float(torch.randint(2, 6, (), generator=g)), float(torch.rand((), generator=g) + 0.5)
        stored = [1 / x if divides else x for x in (outer, inner)]
        parts = (pairs(codes, 1), scale, torch.tensor([stored[0]]), torch.tensor([stored[1]]))
        tensors = dict(zip(suffixes, parts, strict=True))
        if scheme.activation_scaling != "static":
            del tensors[suffixes[3]]
        return Matrix(tensors, values * outer, inner)

    return write


def mxfp4(suffix: str) -> Writer:
    def write(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
        codes, scale, values = _fp4(g, rows, columns, scheme)
        matrix = Matrix({suffix: pairs(codes, 1), "weight_scale": scale}, values)
        _add_input_scale(g, matrix, scheme)
        return matrix

    return write


def gpt_oss(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
    codes, scale, values = _fp4(g, rows, columns, scheme)
    return Matrix({"blocks": pairs(codes, 1).view(rows, columns // 32, 16), "scales": scale}, values)


def modelslim(bits: int, packs: bool) -> Writer:
    def write(g: torch.Generator, rows: int, columns: int, scheme: QuantScheme) -> Matrix:
        codes = _codes(g, rows, columns, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        scale = _scales(g, (rows, 1), "fp32")
        weight = pairs(codes % 16, 0).view(torch.int8) if packs else codes.to(torch.int8)
        tensors = {"weight": weight, "weight_scale": scale, "weight_offset": torch.zeros(rows, 1)}
        if packs:
            tensors["scale_bias"] = torch.randn(rows, 1, generator=g)
        return Matrix(tensors, codes * scale.double())

    return write


WRITERS: dict[str, Writer] = {
    "plain": plain,
    "scaled": scaled,
    "compressed_tensors_packed": packed,
    "compressed_tensors_nvfp4": nvfp4(
        ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"), divides=True
    ),
    "compressed_tensors_mxfp4": mxfp4("weight_packed"),
    "packed_fp4": mxfp4("weight"),
    "modelopt_nvfp4": nvfp4(("weight", "weight_scale", "weight_scale_2", "input_scale"), divides=False),
    "gpt_oss_mxfp4": gpt_oss,
    "gptq": gptq(1),
    "gptq_v2": gptq(0),
    "awq": awq,
    "quark_int4": quark(groups=True, signed=True),
    "quark_int4_channel": quark(groups=False, signed=True),
    "quark_int4_fp8": quark_int4_fp8,
    "quark_nvfp4": nvfp4(("weight", "weight_scale", "weight_scale_2", "input_scale_2"), divides=False),
    "quark_uint4": quark(groups=True, signed=False),
    "quark_uint4_channel": quark(groups=False, signed=False),
    "modelslim_w8a8": modelslim(8, packs=False),
    "modelslim_w4a8": modelslim(4, packs=True),
    "modelslim_w4a4": modelslim(4, packs=False),
}


@attrs.define
class Stored:
    """A layer on disk, and what it means."""

    folder: Path
    tensors: dict[str, Tensor]
    #: `[E, I, H]`, `[E, I, H]`, `[E, H, I]` float64.
    gate: Tensor
    up: Tensor
    down: Tensor
    #: `[E]`, of the tokens and of the intermediate.
    input_scales: tuple[list[float | None], list[float | None]]


def save(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """One file, or shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name].contiguous() for name in sorted(tensors)[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    import json

    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_layer(
    folder: Path,
    request: LayerRequest,
    storages: tuple[str, str],
    *,
    module: str = MODULE,
    words_used: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    seed: int = 0,
    shards: int = 1,
) -> Stored:
    """A layer with one set of tensors per expert and projection."""
    g = torch.Generator().manual_seed(seed)
    inner, hidden = request.intermediate_size, request.hidden_size
    tensors: dict[str, Tensor] = {}
    values: dict[str, list[Tensor]] = {word: [] for word in words_used}
    scales: dict[str, list[float | None]] = {word: [] for word in words_used}
    for expert in range(request.num_experts):
        for word in words_used:
            down = word == words_used[2]
            scheme, storage = (request.quant.w2, storages[1]) if down else (request.quant.w13, storages[0])
            matrix = WRITERS[storage](g, *((hidden, inner) if down else (inner, hidden)), scheme)
            tensors |= {f"{module}.{expert}.{word}.{suffix}": t for suffix, t in matrix.tensors.items()}
            values[word].append(matrix.values)
            scales[word].append(matrix.input_scale)
    save(folder, tensors, shards)
    gate, up, down = (torch.stack(values[word]) for word in words_used)
    halves = zip(scales[words_used[0]], scales[words_used[1]], strict=True)
    both = [None if a is None or b is None else max(a, b) for a, b in halves]
    return Stored(folder, tensors, gate, up, down, (both, scales[words_used[2]]))
