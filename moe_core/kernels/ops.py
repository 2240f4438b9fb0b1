"""The blocks that a plugin is built from, each in torch and in Triton behind one name: what to import from here.

On a GPU, beside an installed Triton, these run its kernels, in one launch each (sorting many tokens takes three); on
other devices, and inside `torch.compile`, torch does the same. Both give the same bits, but for an activation's last
ones. Nothing here waits for a GPU, and everything may be captured in a graph there. On CPU, sizes that depend on data
are exact instead of bounds.

Letters are those of `moe_core.payloads`. Rows that a format leaves undefined may hold anything, NaN included: they are
read by nothing here and undefined in every result. Which rows exist is said by one tensor, `real`: for flat rows `[R]`
int32, each row's expert or -1 (`row_experts` makes it); for blocks of rows `[L]` int32, the rows of each expert
(`masked_m`); None where all exist. Ids and rows are in range, or nothing holds: `checks.check_ids` looks.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from moe_core.activation import ActivationSpec
from moe_core.errors import InputError
from moe_core.kernels import activation as torch_activation
from moe_core.kernels import checks as torch_checks
from moe_core.kernels import combine as torch_combine
from moe_core.kernels import permute as torch_permute
from moe_core.kernels import quantize as torch_quantize
from moe_core.kernels.on_device import on_device
from moe_core.kernels.permute import Permutation
from moe_core.kernels.scale_layouts import code_format
from moe_core.payloads import ContiguousTokens, MaskedTokens, Tensor
from moe_core.specs import TokenDtype


def checked_ids(topk_ids: Tensor, num_slots: int, table: Tensor | None = None) -> Tensor:
    """Ids as a communication library takes them: in range or -1, int64 and contiguous; the same tensor if it is so.

    Args:
        topk_ids: `[T, K]` int32 or int64, any strides.
        num_slots: Every id is below it.
        table: `[num_slots]` int64, what each becomes; None for itself. -1 stays.

    Raises:
        InputError: Another dtype, or on CPU an id out of range; elsewhere it stops the device.
    """
    if not _uses_triton(topk_ids):
        return torch_checks.checked_ids(topk_ids, num_slots, table)
    torch_checks.check_id_dtype(topk_ids)
    from moe_core.kernels.triton import ids

    with on_device(topk_ids.device):
        return ids.checked_ids(topk_ids, num_slots, table)


def sort_by_expert(topk_ids: Tensor, num_experts: int, *, alignment: int = 1) -> Permutation:
    """Give every slot a row, grouped by expert; inside an expert, tokens keep their order.

    Args:
        topk_ids: `[T, K]` int32 or int64 local ids, any strides, -1 = no expert; an id twice in one row has two rows.
        num_experts: Local experts `L`.
        alignment: Every group is padded to a multiple of it.

    Returns:
        Rows, counts and group ends; `num_rows` is a bound on GPUs (`permute.max_rows`).
    """
    if not _uses_triton(topk_ids):
        return torch_permute.permute(topk_ids, num_experts, alignment)
    from moe_core.kernels.triton import sort

    with on_device(topk_ids.device):
        return sort.permute(topk_ids, num_experts, alignment)


def permute_contiguous(
    hidden_states: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    *,
    alignment: int = 1,
    row_weights: Tensor | None = None,
    scales: Tensor | None = None,
    column_major: bool = False,
    num_rows: int | None = None,
    token_dtype: TokenDtype | None = None,
) -> tuple[ContiguousTokens, Tensor]:
    """Tokens to rows grouped by expert; each token is read once.

    Args:
        hidden_states: `[T, H]` of any dtype.
        topk_ids: `[T, K]` as in `sort_by_expert`.
        num_experts: Local experts `L`.
        alignment: Every group is padded to a multiple of it: 128 for many grouped GEMMs.
        row_weights: `[T, K]`, multiplies each float row in fp32, rounded once to the tokens' dtype; None for plain
            copies. Of rows that become codes afterwards, give the tokens as fp32: rounded twice, they get others.
        scales: `[T, G]` of quantized tokens, of one or four bytes each, any strides; `[T, 1]` for one per token.
        column_major: Whether the rows' `scales` come out with stride 1 along the rows, padded to 16 bytes (as in
            `column_128` and `ue8m0_128`), instead of row by row; not beside `token_dtype`, which says it.
        num_rows: `R`, from a caller who knows on the host how many rows suffice; None for as many as always do.
        token_dtype: What float tokens are rounded to on the way, once each and as by `quantize`, with scales of groups
            as it says; None for copies.

    Returns:
        The tokens, and `row_map [T, K]` int32: the row of each slot, -1 for none, which `combine` takes.

    Raises:
        SpecError: No kernel here writes `token_dtype`.
        InputError: `row_weights` for tokens that are codes or become codes, `token_dtype` for tokens that are codes or
            beside `scales` or `column_major`, or shapes that do not fit together.
    """
    tokens, options = _to_copy(hidden_states, topk_ids, row_weights, scales, column_major, token_dtype)
    options |= {"alignment": alignment, "num_rows": num_rows}
    if not _uses_triton(tokens):
        return torch_permute.permute_contiguous(tokens, topk_ids, num_experts, **options)
    from moe_core.kernels.triton import permute as triton_permute

    with on_device(tokens.device):
        return triton_permute.permute_contiguous(tokens, topk_ids, num_experts, **options)


def permute_masked(
    hidden_states: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    rows_per_expert: int,
    *,
    row_weights: Tensor | None = None,
    scales: Tensor | None = None,
    column_major: bool = False,
    token_dtype: TokenDtype | None = None,
) -> tuple[MaskedTokens, Tensor]:
    """Tokens to one block of `M` rows per expert; arguments as in `permute_contiguous`.

    Args:
        hidden_states: `[T, H]`.
        topk_ids: `[T, K]`.
        num_experts: Local experts `L`.
        rows_per_expert: `M`: `T` suffices where no token names an expert twice, `T * K` always. A slot that finds its
            block full gets no row, and `masked_m` exceeds `M` then: the caller's to check.
        row_weights: `[T, K]` or None.
        scales: `[T, G]` or None; out come `[L, M, G]`.
        column_major: As there, block by block.
        token_dtype: As there.

    Returns:
        The tokens, and `row_map [T, K]` int32 into the flattened `[L * M]` rows.

    Raises:
        SpecError: As there.
        InputError: As there.
    """
    tokens, options = _to_copy(hidden_states, topk_ids, row_weights, scales, column_major, token_dtype)
    if not _uses_triton(tokens):
        return torch_permute.permute_masked(tokens, topk_ids, num_experts, rows_per_expert, **options)
    from moe_core.kernels.triton import permute as triton_permute

    with on_device(tokens.device):
        return triton_permute.permute_masked(tokens, topk_ids, num_experts, rows_per_expert, **options)


def row_experts(num_tokens_per_expert: Tensor, group_ends: Tensor, num_rows: int) -> Tensor:
    """`[R]` int32: the expert of each contiguous row, -1 for padding and past the last group.

    Args:
        num_tokens_per_expert: `[L]` int32.
        group_ends: `[L]` int32.
        num_rows: `R`.
    """
    if not _uses_triton(group_ends):
        return torch_permute.row_experts(num_tokens_per_expert, group_ends, num_rows)
    from moe_core.kernels.triton import permute as triton_permute

    with on_device(group_ends.device):
        return triton_permute.row_experts(num_tokens_per_expert, group_ends, num_rows)


def activate(hidden: Tensor, spec: ActivationSpec, *, real: Tensor | None = None) -> Tensor:
    """`[R, 2I]` or `[L, M, 2I]` (`I` when not gated) -> `[..., I]` in the same dtype; fp32 inside, rounded once.

    Args:
        hidden: Of any float dtype and strides.
        spec: Every variant but `module`.
        real: The rows that exist.

    Raises:
        SpecError: An activation that is no formula.
        InputError: Codes instead of floats, or shapes that do not fit together.
    """
    _check_rows(hidden, real, spec)
    if not _uses_triton(hidden):
        return torch_activation.activate(hidden, spec, real=real)
    from moe_core.kernels.triton import activation as triton_activation

    with on_device(hidden.device):
        return triton_activation.activate_rows(hidden, spec, real=real)


def quantize(
    rows: Tensor, token_dtype: TokenDtype, *, activation: ActivationSpec | None = None, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows, or of an activation of them, in one pass.

    scale = amax / largest code of each group, a division in fp32 rounded to nearest; as a power of two, the next that
    is not less. code = value / scale, again a division, half to even, saturating. Zeros are zeros and their scale is
    zero: there is no floor. NaN makes its group's scale NaN (an exponent of 255), and codes of integers zero. An
    activation is computed in fp32 and not rounded before.

    Args:
        rows: `[R, C]` or `[L, M, C]` of any float dtype and strides; `2C` before a gated activation.
        token_dtype: `fp8` (e4m3) or `int8`, with scales `row_128`, `column_128`, `ue8m0_128` or `token`.
        activation: Applied first, None for none.
        real: The rows that exist.

    Returns:
        Codes `[..., C]`, contiguous, and scales: fp32 `[..., ceil(C / 128)]` row by row (`row_128`) or with stride 1
        along the rows and columns padded to 16 bytes (`column_128`); in that order int32 `[..., ceil(C / 512)]`, four
        exponent bytes each, the first in the low byte, 0 past the last group (`ue8m0_128`); fp32 `[...]` (`token`).

    Raises:
        SpecError: Another dtype or layout, or an activation that is no formula.
        InputError: Codes instead of floats, or shapes that do not fit together.
    """
    _check_rows(rows, real, activation)
    if not _rounds_in_triton(rows, token_dtype):
        return torch_quantize.quantize(rows, token_dtype, activation=activation, real=real)
    from moe_core.kernels.triton import quantize as triton_quantize

    with on_device(rows.device):
        return triton_quantize.quantize(rows, token_dtype, activation=activation, real=real)


def combine(
    rows: Tensor,
    row_map: Tensor,
    topk_weights: Tensor | None,
    dtype: torch.dtype,
    *,
    scaling_factor: float = 1.0,
) -> Tensor:
    """Sum each token's rows in slot order, in fp32, rounded once; product and sum are separate roundings.

    Args:
        rows: `[R, H]` or `[L, M, H]`, any float dtype.
        row_map: `[T, K]` int32 or int64, row of each slot, -1 = none: skipped, whatever its weight.
        topk_weights: `[T, K]`, used as fp32; None when the rows are already weighted.
        dtype: Of the result.
        scaling_factor: Multiplies the sum, before it is rounded.

    Returns:
        `[T, H]`; zeros for a token without any row.

    Raises:
        InputError: Weights that do not fit the map.
    """
    if topk_weights is not None and topk_weights.shape != row_map.shape:
        raise InputError(f"topk_weights: expected {list(row_map.shape)} of row_map, got {list(topk_weights.shape)}")
    flat = rows.reshape(-1, rows.shape[-1])
    if not _uses_triton(rows):
        return torch_combine.combine(flat, row_map, topk_weights, dtype, scaling_factor=scaling_factor)
    from moe_core.kernels.triton import combine as triton_combine

    with on_device(rows.device):
        return triton_combine.combine(flat, row_map, topk_weights, dtype, scaling_factor=scaling_factor)


def _to_copy(
    hidden_states: Tensor,
    topk_ids: Tensor,
    row_weights: Tensor | None,
    scales: Tensor | None,
    column_major: bool,
    token_dtype: TokenDtype | None,
) -> tuple[Tensor, dict[str, Any]]:
    """Tokens, and how a permutation copies them: codes instead of floats where no kernel rounds on the way."""
    _check_shapes(hidden_states, topk_ids, row_weights, scales)
    options: dict[str, Any] = {"row_weights": row_weights, "scales": scales, "column_major": column_major}
    if token_dtype is not None:
        _check_rounding(hidden_states, token_dtype, row_weights, scales, column_major)
        if _rounds_in_triton(hidden_states, token_dtype):
            # Torch's permutations have no such argument.
            options["token_dtype"] = token_dtype
        else:
            hidden_states, options["scales"] = quantize(hidden_states, token_dtype)
            options["column_major"] = code_format(token_dtype)[1].column_major
    return hidden_states, options


def _check_shapes(
    hidden_states: Tensor,
    topk_ids: Tensor,
    row_weights: Tensor | None,
    scales: Tensor | None,
) -> None:
    """Kernels would read beyond tensors that do not fit together."""
    if hidden_states.dim() != 2 or hidden_states.shape[1] == 0:
        raise InputError(f"hidden_states: expected [T, H] with H >= 1, got {list(hidden_states.shape)}")
    num_tokens, ids = hidden_states.shape[:1], topk_ids.shape
    if ids[:1] != num_tokens or len(ids) != 2:
        raise InputError(f"topk_ids: expected [{num_tokens[0]}, K] for {num_tokens[0]} tokens, got {list(ids)}")
    if scales is not None and (scales.dim() != 2 or scales.shape[:1] != num_tokens):
        raise InputError(f"scales: expected [{num_tokens[0]}, G], got {list(scales.shape)}")
    if row_weights is None:
        return
    if row_weights.shape != ids:
        raise InputError(f"row_weights: expected {list(ids)} of topk_ids, got {list(row_weights.shape)}")
    if _are_codes(hidden_states):
        raise InputError(f"row_weights multiply float tokens, got {hidden_states.dtype}: weight the experts' outputs")


def _check_rounding(
    hidden_states: Tensor,
    token_dtype: TokenDtype,
    row_weights: Tensor | None,
    scales: Tensor | None,
    column_major: bool,
) -> None:
    """Beside `token_dtype` is nothing that it already says, and nothing that is done before it."""
    if scales is not None or not code_format(token_dtype)[1].group:
        raise InputError(f"token_dtype: float tokens are rounded on the way, to scales of groups; got {token_dtype}")
    if _are_codes(hidden_states):
        raise InputError(
            f"token_dtype: float tokens are rounded to {token_dtype}, got {hidden_states.dtype}: "
            "give codes with their `scales`, and no token_dtype"
        )
    if column_major:
        raise InputError(f"column_major: {token_dtype} says how its scales lie; leave it out, or name another layout")
    if row_weights is not None:
        raise InputError("row_weights multiply rows before they are rounded: give fp32 tokens, and `quantize` the rows")


def _are_codes(tensor: Tensor) -> bool:
    """Whether numbers mean something only beside scales: integers, and floats of one byte."""
    return tensor.itemsize == 1 or not tensor.is_floating_point()


def _check_rows(rows: Tensor, real: Tensor | None, activation: ActivationSpec | None) -> None:
    if rows.dim() not in (2, 3) or rows.shape[-1] == 0:
        raise InputError(f"rows: expected [R, C] or [L, M, C] with C >= 1, got {list(rows.shape)}")
    if _are_codes(rows):
        raise InputError(f"rows: expected a float dtype of two bytes or more, got {rows.dtype}")
    if activation is not None and activation.gated and rows.shape[-1] % 2:
        raise InputError(f"rows before a gated activation: expected [.., 2 I], got {list(rows.shape)}")
    if real is not None and list(real.shape) != [rows.shape[0]]:
        raise InputError(f"real: expected [{rows.shape[0]}] for rows {list(rows.shape)}, got {list(real.shape)}")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _uses_triton(tensor: Tensor) -> bool:
    # The compiler fuses torch's operations itself, and cannot look into launches.
    return tensor.is_cuda and not torch.compiler.is_compiling() and _has_triton()


@functools.cache
def _has_codes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device converts to `dtype`: e4m3 is in NVIDIA GPUs from compute capability 8.9 on."""
    if dtype == torch.int8 or device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _rounds_in_triton(tensor: Tensor, token_dtype: TokenDtype) -> bool:
    """Whether a kernel of Triton's rounds this tensor; else torch does."""
    return _uses_triton(tensor) and _has_codes(code_format(token_dtype)[0], tensor.device)
