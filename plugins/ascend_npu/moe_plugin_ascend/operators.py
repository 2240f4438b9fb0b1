"""The calls of torch_npu operators that this plugin makes on its own rank, with every argument spelt out.

Schema defaults are not always values that the operators support, and positions moved between versions: everything is
said by name. Where no NPU is, an emulation computes on the CPU (see `moe_plugin_ascend.emulation`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence

import attrs
import torch

from moe_core.errors import PluginError
from moe_core.payloads import Tensor

#: FRACTAL_NZ, tiles of 16 rows by 32 bytes: aclFormat 29.
NZ = 29

#: Operators of this module -> the arguments that its calls name.
CALLS: dict[str, tuple[str, ...]] = {
    "empty_with_format": ("size", "dtype", "device", "acl_format"),
    "npu_format_cast": ("input", "acl_format"),
    "npu_moe_init_routing_v2": (
        "x",
        "expert_idx",
        "active_num",
        "expert_num",
        "drop_pad_mode",
        "expert_tokens_num_type",
        "expert_tokens_num_flag",
        "quant_mode",
        "active_expert_range",
        "row_idx_type",
    ),
    "npu_moe_token_unpermute": ("permuted_tokens", "sorted_indices", "probs"),
    "npu_grouped_matmul": (
        "x",
        "weight",
        "bias",
        "scale",
        "per_token_scale",
        "group_list",
        "split_item",
        "group_type",
        "group_list_type",
        "output_dtype",
    ),
    "npu_swiglu": ("input", "dim"),
    "npu_dynamic_quant": ("input", "dst_type"),
    "npu_dequant_swiglu_quant": (
        "x",
        "weight_scale",
        "activation_scale",
        "group_index",
        "activate_left",
        "quant_mode",
    ),
}


@functools.cache
def require_operators() -> None:
    """Make the operators callable, torch_npu's or their emulation, and see that they take our arguments.

    Raises:
        PluginError: An operator or one of its arguments is missing.
    """
    if not has_npu():
        from moe_plugin_ascend.emulation import install

        install()
    require_arguments(CALLS)


def has_npu() -> bool:
    """Whether this process has a usable NPU; whoever made a tensor on one has imported torch_npu."""
    return "torch_npu" in sys.modules and torch.npu.is_available()  # type: ignore[attr-defined]


def require_arguments(calls: Mapping[str, Sequence[str]]) -> None:
    """Raise `PluginError` unless every operator of `calls` is registered with the arguments that it names."""
    for name, arguments in calls.items():
        known = _arguments(name)
        missing = [argument for argument in arguments if argument not in known]
        if missing:
            found = f"takes {', '.join(known)}" if known else "is not registered"
            raise PluginError(f"torch_npu: operator {name} {found}; this plugin passes {', '.join(missing)}")


def _arguments(name: str) -> tuple[str, ...]:
    packet = getattr(torch.ops.npu, name, None)
    if packet is None:
        return ()
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return tuple(dict.fromkeys(argument.name for schema in schemas for argument in schema.arguments))


@attrs.define(eq=False)
class Groups:
    """Rows of each expert, in the two forms that operators take.

    Attributes:
        sizes: int64 `[L]`.
        ends: int64 `[L]`, cumulative, or None where the sizes do for the GEMM.
    """

    sizes: Tensor
    ends: Tensor | None


def empty_nz(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory of logical `shape`, in tiles along the last two axes."""
    return torch.ops.npu.empty_with_format(list(shape), dtype=dtype, device=device, acl_format=NZ)  # type: ignore[no-any-return]


def to_nz(matrix: Tensor) -> Tensor:
    """The same numbers in tiles.

    `matrix` fills a memory of its own: of a view, the operator casts the whole tensor that it is cut from.
    """
    return torch.ops.npu.npu_format_cast(matrix, NZ)  # type: ignore[no-any-return]


def group_tokens(
    hidden_states: Tensor, ids: Tensor, num_experts: int, own: range, *, to_int8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Copy each token once for each of its experts in `own`, grouped by expert.

    Args:
        hidden_states: bf16 `[T, H]`.
        ids: int32 `[T, K]`, all in `0 .. num_experts - 1`.
        num_experts: Ids that exist.
        own: Experts whose rows are wanted.
        to_int8: Whether to round the rows, each with a scale of its own.

    Returns:
        Rows `[T * K, H]`, of which those past the counts are undefined; the row of each (token, slot), -1 for experts
        outside `own`, int32 `[T * K]`; rows of each expert, int64 `[len(own)]`; fp32 scales `[T * K]`, or None.
    """
    rows, row_map, counts, scales = torch.ops.npu.npu_moe_init_routing_v2(
        hidden_states,
        ids,
        active_num=ids.numel(),
        expert_num=num_experts,
        drop_pad_mode=0,
        # Counts, in an output that must be asked for.
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=1 if to_int8 else -1,
        active_expert_range=[own.start, own.stop],
        # Where each slot's row went, not where each row came from.
        row_idx_type=0,
    )
    return rows, row_map, counts, scales if to_int8 else None


def weighted_sum(rows: Tensor, row_map: Tensor, weights: Tensor) -> Tensor:
    """`[R, H]` bf16 -> `[T, H]`: the row of each slot (int32 `[T * K]`, all valid) times its weight bf16 `[T, K]`."""
    return torch.ops.npu.npu_moe_token_unpermute(rows, row_map, probs=weights)  # type: ignore[no-any-return]


def grouped_matmul(
    rows: Tensor,
    weight: Tensor,
    groups: Groups,
    output_dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Each expert's rows `[R, K]` times its matrix of `[L, K, N]` -> `[R, N]`; rows past the groups are undefined."""
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weight],
        bias=None if bias is None else [bias],
        scale=None if scale is None else [scale],
        per_token_scale=None if row_scale is None else [row_scale],
        group_list=groups.sizes if groups.ends is None else groups.ends,
        group_list_type=1 if groups.ends is None else 0,
        # One tensor of rows in, one out, cut along the rows.
        split_item=2,
        group_type=0,
        output_dtype=output_dtype,
    )
    return out  # type: ignore[no-any-return]


def swiglu(rows: Tensor) -> Tensor:
    """`[R, 2I]` [gate, up] -> `[R, I]`."""
    return torch.ops.npu.npu_swiglu(rows, dim=-1)  # type: ignore[no-any-return]


def round_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`[R, C]` -> codes and fp32 scales `[R]`; `quint4x2` gives int32 `[R, C / 8]`, eight int4 in a word."""
    codes, scales = torch.ops.npu.npu_dynamic_quant(rows, dst_type=dtype)
    return codes, scales


def swiglu_int8(
    rows: Tensor, sizes: Tensor, scale: Tensor | None = None, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`[R, 2I]` [gate, up], bf16 or int32 sums with their scales -> int8 `[R, I]` and fp32 scales `[R]`.

    Args:
        rows: The first GEMM's result.
        sizes: int64 `[L]`, rows of each expert; what lies past them stays undefined.
        scale: fp32 `[L, 2I]` of int32 sums.
        row_scale: fp32 `[R]` of int32 sums.
    """
    codes, scales = torch.ops.npu.npu_dequant_swiglu_quant(
        rows,
        weight_scale=scale,
        activation_scale=row_scale,
        group_index=sizes,
        # The first half is the gate; the default takes the second.
        activate_left=True,
        quant_mode=1,
    )
    return codes, scales
