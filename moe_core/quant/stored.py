"""How a checkpoint stores a scheme: which tensors, in which packing. The numbers are the scheme's.

Every word of `STORAGES` has one reader in `moe_core.weights`. Suffixes below are what follows the projection's name
(`...experts.3.gate_proj.`); `[N, K]` is output x input; int32 words hold eight 4-bit values, the first in the lowest
bits unless said otherwise; `g` is the scheme's group along K. Float scales may be stored in bf16 or fp16 where the
scheme says fp32: widening is exact, and configurations do not tell. Scales that the scheme calls e8m0 may be stored as
exponent bytes (uint8 or e8m0) or as fp32 powers of two.

- `plain`: `weight [N, K]`, float.
- `scaled`: `weight [N, K]`, e4m3 or int8 (int4 too: one to an int8); `weight_scale` or `weight_scale_inv` (both
  multiply), one per tensor, row, group or tile; `input_scale` or `activation_scale` where activations are static.
- `packed_fp4`: `weight` int8 or uint8 `[N, K/2]`, the even channel in the low half of a byte; `weight_scale`,
  `weight_scale_inv` or `scale` `[N, K/g]`; `input_scale` where activations are static.
- `compressed_tensors_packed`: `weight_packed` int32 of codes + 8, `[N, K/8]` (int8: codes + 128, `[N, K/4]`);
  `weight_scale [N, K/g]`; for asymmetric ones `weight_zero_point` int32 `[N/8, K/g]`, packed along N; `weight_shape`.
- `compressed_tensors_nvfp4`: `weight_packed` uint8 `[N, K/2]`; `weight_scale` e4m3 `[N, K/16]`; `weight_global_scale`
  and `input_global_scale`, which are divisors.
- `compressed_tensors_mxfp4`: `weight_packed` uint8 `[N, K/2]`; `weight_scale` exponent bytes `[N, K/32]`.
- `modelopt_nvfp4`: `weight` uint8 `[N, K/2]`; `weight_scale` e4m3 `[N, K/16]`; `weight_scale_2` and `input_scale`,
  which multiply.
- `gpt_oss_mxfp4`: all experts in one tensor, `_blocks` uint8 `[E, N, K/32, 16]` and `_scales` uint8 `[E, N, K/32]`.
- `gptq`: `qweight` int32 `[K/8, N]`; `qzeros` int32 `[K/g, N/8]` of zero points - 1; `scales [K/g, N]`; `g_idx [K]`.
  For int8 a word holds four values.
- `gptq_v2`: the same with `qzeros` of zero points.
- `awq`: `qweight` int32 `[K, N/8]`, a word holding its outputs in the order 0 2 4 6 1 3 5 7; `qzeros` int32
  `[K/g, N/8]` alike; `scales [K/g, N]`.
- `quark_int4`: `weight` int32 `[K, N/8]` of two's complement in the order of `awq`; `weight_scale [K/g, N]`;
  `weight_zero_point` int32 `[K/g, N/8]` alike. They may be called as in `awq`.
- `quark_uint4`: the same of unsigned codes and zero points.
- `quark_int4_channel`, `quark_uint4_channel`: the same per output, not transposed and packed along K: `weight` int32
  `[N, K/8]`, `weight_scale [N]`, `weight_zero_point` int32 `[N/8]`.
- `quark_int4_fp8`: as `quark_int4_channel` with `weight_scale_2 [N]` and `weight_zero_point_2`; `weight_scale` is a
  number that multiplies.
- `quark_nvfp4`: as `modelopt_nvfp4`, but `input_scale_2`.
- `modelslim_w8a8`: `weight` int8 `[N, K]`; `weight_scale` and `weight_offset` (zeros) `[N, 1]`.
- `modelslim_w4a8`: `weight` int8 `[N/2, K]`, two outputs per byte; `weight_scale`, `weight_offset` `[N, 1]`;
  `scale_bias`, which only a kernel that splits activations needs.
- `modelslim_w4a4`: `weight` int8 `[N, K]`, one value per byte; `weight_scale`, `weight_offset` `[N, 1]`.

In `gptq` and `awq`, a scheme without zero point means that every zero point is 8 (int8: 128); zero points of the others
are then 0.
"""

from __future__ import annotations

import attrs

from moe_core.quant.layer import LayerQuant
from moe_core.quant.scheme import QuantScheme
from moe_core.vocabulary import one_of

STORAGES = (
    "plain",
    "scaled",
    "packed_fp4",
    "compressed_tensors_packed",
    "compressed_tensors_nvfp4",
    "compressed_tensors_mxfp4",
    "modelopt_nvfp4",
    "gpt_oss_mxfp4",
    "gptq",
    "gptq_v2",
    "awq",
    "quark_int4",
    "quark_int4_channel",
    "quark_int4_fp8",
    "quark_nvfp4",
    "quark_uint4",
    "quark_uint4_channel",
    "modelslim_w8a8",
    "modelslim_w4a8",
    "modelslim_w4a4",
)


@attrs.frozen
class StoredScheme:
    """A scheme, and the word of `STORAGES` for the tensors that hold it."""

    scheme: QuantScheme = attrs.field(validator=attrs.validators.instance_of(QuantScheme))
    storage: str = attrs.field(default="plain", validator=one_of(*STORAGES))


@attrs.frozen
class StoredLayer:
    """What both projections of a layer are, and as what they are stored."""

    w13: StoredScheme = attrs.field(validator=attrs.validators.instance_of(StoredScheme))
    w2: StoredScheme = attrs.field(validator=attrs.validators.instance_of(StoredScheme))

    @property
    def quant(self) -> LayerQuant:
        """The schemes alone, as a `LayerRequest` takes them."""
        return LayerQuant(self.w13.scheme, self.w2.scheme)
