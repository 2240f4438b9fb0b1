"""CPU kernels of the vendor's operators, written from their documentation.

Each checks what the documentation asks of its arguments (the Meta kernels check little of it) and leaves undefined what
it calls undefined. A kernel is given only the arguments that differ from the schema's defaults, so that each signature
repeats these. Letters: `T` tokens, `K` slots of a token, `R` rows, `L` experts, `H` hidden, `I` intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn import functional

from moe_core.payloads import Tensor
from moe_core.testing.memory import poison
from moe_plugin_ascend.emulation.formats import (
    ND,
    NZ,
    Tiled,
    annotate,
    fits_tiles,
    int4_words,
    tiles,
    values,
)
from moe_plugin_ascend.emulation.gemm import grouped_matmul

#: torch's numbers for the dtypes that are passed as such.
_INT8, _QUINT4X2 = 1, 16
#: Largest code.
_LARGEST = {_INT8: 127, _QUINT4X2: 7}

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
#: (operator, dispatch key) -> kernel.
KERNELS: dict[tuple[str, str], Callable[..., Any]] = {("npu_grouped_matmul", "CPU"): grouped_matmul}


def _kernel(operator: str, key: str = "CPU") -> Callable[[_Kernel], _Kernel]:
    def register(function: _Kernel) -> _Kernel:
        KERNELS[operator, key] = function
        return function

    return register


def require(holds: bool, rule: str) -> None:
    """Raise `RuntimeError` with a documented rule that does not hold."""
    if not holds:
        raise RuntimeError(f"emulated operator: {rule}")


# Without a tensor among the arguments nothing but this key is asked on a machine without an NPU.
@_kernel("empty_with_format", "BackendSelect")
def _empty_with_format(
    size: list[int], *, dtype: torch.dtype, device: torch.device, acl_format: int = ND, **_: object
) -> Tensor:
    made = poison(torch.empty(size, dtype=dtype, device=device))
    return _tiled(made) if acl_format == NZ else made


@_kernel("npu_format_cast")
def _format_cast(tensor: Tensor, acl_format: int, *, customize_dtype: None = None, input_dtype: None = None) -> Tensor:
    require(acl_format in (ND, NZ), f"format {acl_format} is not emulated")
    is_whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    require(is_whole, "of a view the whole storage is cast; give it memory of its own")
    plain = values(tensor)
    if acl_format == ND:
        return plain.clone()
    require(fits_tiles(tuple(plain.shape), plain.dtype), f"{list(plain.shape)} {plain.dtype} are not whole tiles")
    return annotate(tiles(plain).view(plain.shape), Tiled(tuple(plain.shape), plain.dtype))


def _tiled(tensor: Tensor) -> Tensor:
    require(fits_tiles(tuple(tensor.shape), tensor.dtype), f"{list(tensor.shape)} {tensor.dtype} are not whole tiles")
    return annotate(tensor, Tiled(tuple(tensor.shape), tensor.dtype))


@_kernel("npu_moe_init_routing_v2")
def _init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: tuple[int, ...] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require(expert_idx.dtype == torch.int32, f"expert_idx is int32, not {expert_idx.dtype}")
    require(drop_pad_mode == 0 and expert_tokens_num_flag, "drop_pad_mode 0 and expert_tokens_num_flag only")
    require(expert_tokens_num_type == 1 and row_idx_type == 0, "counts and gather maps are emulated")
    require(quant_mode in (-1, 1) and scale is None and offset is None, "quant_mode -1 or 1, without scale and offset")
    require(0 < expert_num <= 10240 and active_num in (-1, 0, expert_idx.numel()), "1 .. 10240 experts, all rows")
    flat = expert_idx.reshape(-1).long()
    require(flat.numel() > 0 and bool(((flat >= 0) & (flat < expert_num)).all()), f"ids lie in 0 .. {expert_num - 1}")
    first, last = active_expert_range or (0, expert_num)
    require(0 <= first < last <= expert_num, f"experts {first} .. {last} of {expert_num}")
    is_active = (flat >= first) & (flat < last)
    order = torch.where(is_active, flat, expert_num).argsort(stable=True)[: int(is_active.sum())]
    row_map = torch.full_like(flat, -1, dtype=torch.int32)
    row_map[order] = torch.arange(len(order), dtype=torch.int32)
    counts = torch.bincount(flat[is_active] - first, minlength=last - first)
    rows = x[order // expert_idx.shape[1]]
    scales = poison(torch.empty(flat.numel(), dtype=torch.float32))
    out = poison(x.new_empty((flat.numel(), x.shape[1]), dtype=torch.int8 if quant_mode == 1 else x.dtype))
    if quant_mode == 1:
        rows, scales[: len(order)] = _rounded(rows, _INT8)
    out[: len(order)] = rows
    return out, row_map, counts, scales


@_kernel("npu_moe_token_unpermute")
def _token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: None = None,
) -> Tensor:
    require(not padded_mode and sorted_indices.dim() == 1, "padded_mode False, indices in one axis")
    require(permuted_tokens.dtype == torch.bfloat16, f"tokens are bf16, not {permuted_tokens.dtype}")
    require(probs is None or probs.dtype == torch.bfloat16, "probs are bf16")
    top_k = 1 if probs is None else probs.shape[1]
    require(top_k <= 512, "at most 512 slots in a token")
    inside = (sorted_indices >= 0) & (sorted_indices < permuted_tokens.shape[0])
    require(bool(inside.all()), "every index names a row")
    rows = permuted_tokens[sorted_indices.long()].float().view(-1, top_k, permuted_tokens.shape[1])
    summed = torch.zeros(rows.shape[0], rows.shape[2])
    for slot in range(top_k):
        summed += rows[:, slot] * (1.0 if probs is None else probs[:, slot, None].float())
    return summed.to(permuted_tokens.dtype)


@_kernel("npu_swiglu")
def _swiglu(x: Tensor, dim: int = -1) -> Tensor:
    left, right = x.float().chunk(2, dim)
    return (functional.silu(left) * right).to(x.dtype)


@_kernel("npu_dynamic_quant")
def _dynamic_quant(
    x: Tensor,
    *,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    **others: object,
) -> tuple[Tensor, Tensor]:
    require(x.dtype in (torch.float16, torch.bfloat16) and x.dim() > 1, f"fp16 or bf16 rows, not {x.dtype}")
    require(quant_mode == "pertoken" and not others, "one scale per row is emulated")
    kind = _INT8 if dst_type is None else dst_type
    require(kind in _LARGEST, f"int8 or quint4x2, not {kind}")
    require(kind == _INT8 or x.shape[-1] % 8 == 0, f"int4 rows are multiples of 8, not {x.shape[-1]}")
    return _rounded(x, kind)


@_kernel("npu_dequant_swiglu_quant")
def _dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    **others: object,
) -> tuple[Tensor, Tensor]:
    require(not others, f"{sorted(others)} are not emulated")
    require(group_index is not None and group_index.dtype == torch.int64, "group_index is int64")
    width = x.shape[1] // 2
    require(width <= 10496 and width % 64 == 0, f"with groups at most 10496 and a multiple of 64, not {width}")
    require(quant_mode == 1, "with groups quant_mode is 1")
    are_sums, are_scaled = x.dtype == torch.int32, weight_scale is not None and activation_scale is not None
    require(x.dtype in (torch.int32, torch.bfloat16), f"int32 or bf16, not {x.dtype}")
    require(are_sums == are_scaled, "int32 comes with both scales, bf16 with none")
    sizes = group_index.tolist()  # type: ignore[union-attr]
    total = sum(sizes)
    require(total <= x.shape[0], f"groups of {total} rows, {x.shape[0]} are there")
    rows = x[:total].float()
    if weight_scale is not None and activation_scale is not None:
        require(weight_scale.shape == (len(sizes), x.shape[1]), f"weight_scale is {list(weight_scale.shape)}")
        require(weight_scale.dtype == activation_scale.dtype == torch.float32, "scales are fp32")
        by_row = weight_scale.repeat_interleave(torch.tensor(sizes), 0)
        rows = rows * by_row * activation_scale[:total, None]
    left, right = rows.chunk(2, -1)
    gate, up = (left, right) if activate_left else (right, left)
    codes, scales = poison(x.new_empty((x.shape[0], width), dtype=torch.int8)), poison(torch.empty(x.shape[0]))
    codes[:total], scales[:total] = _rounded(functional.silu(gate) * up, _INT8)
    return codes, scales


def _rounded(rows: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Codes of one scale per row, and the scales."""
    wide, largest = rows.float(), _LARGEST[kind]
    scale = wide.abs().amax(-1) / largest
    # In float64: a quotient near a tie must not depend on how fp32 rounds it.
    divisor = torch.where(scale == 0, 1.0, scale).double()[..., None]
    codes = (wide.double() / divisor).round().clamp(-largest - 1, largest).nan_to_num().to(torch.int8)
    return int4_words(codes) if kind == _QUINT4X2 else codes, scale
