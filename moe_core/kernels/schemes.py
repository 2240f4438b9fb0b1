"""The quantization schemes that the kernels here compute, as a pattern; free of torch, so that a spec may import it."""

from __future__ import annotations

from moe_core.quant import QuantScheme
from moe_core.vocabulary import ANY

#: Weights are read by element type and tile, activations rounded by their fields: no scheme is left out.
EVERY_SCHEME = QuantScheme(
    weight_dtype=ANY,
    weight_block=ANY,
    weight_scale=ANY,
    global_scale=ANY,
    zero_point=ANY,
    activation_dtype=ANY,
    activation_scaling=ANY,
    activation_group=ANY,
    activation_scale=ANY,
)
