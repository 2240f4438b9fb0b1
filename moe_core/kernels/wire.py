"""Tokens as bytes: what one row of an all-to-all message holds, and the way back.

A row is the token in its wire dtype, its scales if it has any, `K` local ids (int32) and `K` weights (fp32).
"""

from __future__ import annotations

import torch

from moe_core.errors import SpecError
from moe_core.kernels import ops
from moe_core.kernels.scale_layouts import code_format
from moe_core.payloads import TORCH_DTYPES, StandardTokens, Tensor
from moe_core.specs import TokenDtype


def encode_message(hidden_states: Tensor, local_ids: Tensor, topk_weights: Tensor, token_dtype: TokenDtype) -> Tensor:
    """Rows of bytes `[T, B]`.

    Args:
        hidden_states: `[T, H]` in the layer's dtype.
        local_ids: `[T, K]` ids local to the receiving rank.
        topk_weights: `[T, K]`.
        token_dtype: Float in the layer's dtype, or `fp8/row_128`.

    Raises:
        SpecError: Another dtype than these.
    """
    parts = [hidden_states]
    if token_dtype.dtype not in TORCH_DTYPES:
        parts = list(_quantize(hidden_states, token_dtype))
    parts += [local_ids.int(), topk_weights.float()]
    return torch.cat([_bytes_of(part) for part in parts], dim=1)


def _bytes_of(part: Tensor) -> Tensor:
    """`[T, N]` -> uint8 `[T, N * size]`; an axis of length zero or one may have any stride, so its rows are counted."""
    return part.reshape(-1).contiguous().view(torch.uint8).view(part.shape[0], part.shape[1] * part.dtype.itemsize)


def decode_message(message: Tensor, hidden_size: int, top_k: int, token_dtype: TokenDtype) -> StandardTokens:
    """The tokens of a message of `encode_message`, uint8 `[R, B]` with any strides; quantized ones stay quantized."""
    dtypes = [(TORCH_DTYPES.get(token_dtype.dtype, torch.float8_e4m3fn), hidden_size)]
    is_quantized = token_dtype.dtype not in TORCH_DTYPES
    if is_quantized:
        dtypes.append((torch.float32, code_format(token_dtype)[1].num_groups(hidden_size)))
    dtypes += [(torch.int32, top_k), (torch.float32, top_k)]
    parts = torch.split(message, [dtype.itemsize * width for dtype, width in dtypes], dim=1)
    # Always a copy: a single row counts as contiguous, wherever it begins.
    tensors = [
        part.clone(memory_format=torch.contiguous_format).view(dtype)
        for part, (dtype, _) in zip(parts, dtypes, strict=True)
    ]
    return StandardTokens(
        hidden_states=tensors[0],
        scales=tensors[1] if is_quantized else None,
        topk_ids=tensors[-2],
        topk_weights=tensors[-1],
    )


def _quantize(hidden_states: Tensor, token_dtype: TokenDtype) -> tuple[Tensor, Tensor]:
    if token_dtype != TokenDtype("fp8", "row_128"):
        raise SpecError(f"tokens cannot be sent as {token_dtype}; fp8/row_128 and float dtypes can")
    return ops.quantize(hidden_states, token_dtype)
