"""The vendor's grouped GEMM on the CPU, for the kinds of operands that this plugin gives it.

| tokens | weights | scale | row scale | bias | result |
|---|---|---|---|---|---|
| bf16 | bf16 `[L, K, N]` | - | - | fp32 `[L, N]` | bf16 |
| int8 | int8 `[L, K, N]` | - | - | - | int32 |
| int8 | int8 `[L, K, N]` | bf16 `[L, N]` | fp32 `[R]` | - | bf16 |
| int8 | int4 words `[L, K, N / 8]` | int64 `[L, 1, N]` | fp32 `[R]` | fp32 `[L, N]` | bf16 |
| int4 words `[R, K / 8]` | int4 words `[L, K, N / 8]` | int64 `[L, N]` | fp32 `[R]` | - | bf16 |
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from moe_core.payloads import Tensor
from moe_core.testing.memory import poison
from moe_plugin_ascend.emulation.formats import int4_values, values

#: Last axes are shorter than this.
INNER_LIMIT = 65536
MOST_GROUPS = 1024
#: torch's numbers for the dtypes that are passed as such.
_INT32, _BF16 = 3, 15


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise RuntimeError(f"emulated npu_grouped_matmul: {rule}")


@attrs.frozen(eq=False)
class _Operands:
    """Float64 tokens `[R, K]` and matrices `[L, K, N]` (integers are exact in it), and what follows the product."""

    tokens: Tensor
    matrices: Tensor
    finish: Callable[[Tensor, int, slice], Tensor]
    dtype: torch.dtype


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    output_dtype: int | None = None,
    **others: object,
) -> list[Tensor]:
    """`[R, N]`; rows past the groups are poisoned."""
    _require(not others, f"{sorted(others)} are not emulated")
    _require(len(x) == len(weight) == 1 and split_item in (2, 3) and group_type == 0, "one tensor in, one out, by rows")
    _require(x[0].dim() == 2 and weight[0].dim() == 3 and x[0].is_contiguous(), "tokens [R, K], weights [L, K, N]")
    for optional in (bias, scale, per_token_scale):
        _require(optional is None or len(optional) == 1, "one tensor of each kind")
    _require(max(x[0].shape[-1], weight[0].shape[-1], weight[0].stride(-1)) < INNER_LIMIT, f"last axes < {INNER_LIMIT}")
    ends = _ends(group_list, group_list_type, weight[0].shape[0], x[0].shape[0])
    operands = _operands(x[0], weight[0], *(None if t is None else t[0] for t in (scale, per_token_scale, bias)))
    wanted = {_INT32: torch.int32, _BF16: torch.bfloat16, None: x[0].dtype}.get(output_dtype)
    _require(wanted == operands.dtype, f"output_dtype {wanted}, these operands give {operands.dtype}")
    _require(operands.tokens.shape[1] == operands.matrices.shape[1], "tokens and weights have one K")
    out = poison(x[0].new_empty((x[0].shape[0], operands.matrices.shape[2]), dtype=operands.dtype))
    start = 0
    for expert, end in enumerate(ends):
        rows = slice(start, end)
        out[rows] = operands.finish(operands.tokens[rows] @ operands.matrices[expert], expert, rows).to(operands.dtype)
        start = end
    return [out]


def _ends(group_list: Tensor | None, kind: int, num_groups: int, num_rows: int) -> list[int]:
    _require(group_list is not None and group_list.dtype == torch.int64, "group_list is an int64 tensor")
    listed = group_list.tolist()  # type: ignore[union-attr]
    _require(len(listed) == num_groups <= MOST_GROUPS, f"{len(listed)} groups, {num_groups} matrices")
    _require(kind == 0 or len(listed) > 1, "counts of one group are not taken")
    sizes = listed if kind == 1 else [end - start for start, end in zip([0, *listed[:-1]], listed, strict=True)]
    _require(min(sizes) >= 0 and sum(sizes) <= num_rows, f"groups of {sizes} rows in {num_rows}")
    ends = torch.tensor(sizes).cumsum(0)
    return ends.tolist()


def _operands(
    tokens: Tensor, weight: Tensor, scale: Tensor | None, row_scale: Tensor | None, bias: Tensor | None
) -> _Operands:
    matrices = values(weight)
    kinds = (tokens.dtype, weight.dtype)
    if kinds == (torch.bfloat16, torch.bfloat16):
        _require(scale is None and row_scale is None, "bf16 has no scales")
        _require_tensor("bias", bias, torch.float32, (matrices.shape[0], matrices.shape[2]), optional=True)
        return _Operands(tokens.double(), matrices.double(), _biased(bias), torch.bfloat16)
    _require_tensor("per_token_scale", row_scale, torch.float32, tuple(tokens.shape[:1]), optional=True)
    if kinds == (torch.int8, torch.int8):
        _require(bias is None and (scale is None) == (row_scale is None), "both scales or none, no bias")
        if scale is None or row_scale is None:
            return _Operands(tokens.double(), matrices.double(), lambda sums, expert, rows: sums, torch.int32)
        _require_tensor("scale", scale, torch.bfloat16, (matrices.shape[0], matrices.shape[2]))
        return _Operands(tokens.double(), matrices.double(), _scaled(scale.float(), row_scale, None), torch.bfloat16)
    _require(kinds[1] == torch.int32 and kinds[0] in (torch.int8, torch.int32), f"{kinds} are not emulated")
    _require(scale is not None and row_scale is not None, "int4 weights have both scales")
    numbers = int4_values(matrices)
    is_split = kinds[0] == torch.int8
    across = (1,) if is_split else ()
    shape = (numbers.shape[0], *across, numbers.shape[2])
    _require_tensor("scale", scale, torch.int64, shape)
    _require_tensor("bias", bias, torch.float32, (numbers.shape[0], numbers.shape[2]), optional=not is_split)
    codes = tokens.double() - 8 if is_split else int4_values(tokens).double()
    bits = _from_bits(scale).reshape(numbers.shape[0], -1)  # type: ignore[arg-type]
    return _Operands(codes, numbers.double(), _scaled(bits, row_scale, bias), torch.bfloat16)  # type: ignore[arg-type]


def _require_tensor(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], optional: bool = False
) -> None:
    if tensor is None:
        _require(optional, f"{name} is missing")
        return
    found = f"{list(tensor.shape)} {tensor.dtype}"
    _require(tensor.dtype == dtype and tuple(tensor.shape) == shape, f"{name} is {list(shape)} {dtype}, not {found}")


def _from_bits(scale: Tensor) -> Tensor:
    """The fp32 in the lower half of each int64."""
    return scale.contiguous().view(torch.float32)[..., 0::2]


def _biased(bias: Tensor | None) -> Callable[[Tensor, int, slice], Tensor]:
    return lambda sums, expert, rows: sums.float() if bias is None else sums.float() + bias[expert]


def _scaled(scale: Tensor, row_scale: Tensor, bias: Tensor | None) -> Callable[[Tensor, int, slice], Tensor]:
    def finish(sums: Tensor, expert: int, rows: slice) -> Tensor:
        inner = sums.float() * scale[expert]
        return (inner if bias is None else inner + bias[expert]) * row_scale[rows, None]

    return finish
