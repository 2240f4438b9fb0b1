"""How far an answer may be from the float64 one where no code is in doubt, derived from what is rounded on the way.

Weights need no allowance: the reference reads the same codes. Activations that a scheme rounds need none either: of
those in doubt the nearest code counts (`doubts`). What is left:

* Rounding to the layer's dtype, of relative size up to `u = 2 ** -(fraction bits + 1)` and so `u / sqrt(3)` on average
  (uniform over a step), at up to eight places: the first GEMM's result, the element-wise function, its product with
  the up half, the second GEMM's result, its product with the router weight, the sum over slots, the output, and a
  weight that was multiplied with its scale. The errors are independent, so that their squares add.
* In fp32, sums of `H` and `I` terms in another order: `u * sqrt(H + I)`, and an exponential of 1e-6 relative error.
* Tokens that are rounded for the wire in another way than the scheme's: a step over `sqrt(12)` at each value.

The activation function and the product of both halves make a relative error larger by up to 1.5 for these layers
(`CONDITION`), and a limit is twice what is expected (`MARGIN`): errors of one token scatter around the average.

A single element's error scatters twice, with the element's size and with the error. Both are nearly normal, and the
product of two such is above `s ** 2` averages with a probability of about `exp(-s ** 2)`: 1e-8 where `s ** 2` is
`SCATTER ** 2 * MARGIN`, for a kernel that rounds at all eight places. A token's error is the norm of `H` such errors,
and scatters less.
"""

from __future__ import annotations

import math

from moe_core.quant import QuantScheme
from moe_core.request import LayerRequest
from moe_core.specs import TokenDtype
from moe_core.testing.tokens import rounds_as

#: Explicit fraction bits of each layer dtype.
FRACTION_BITS = {"fp32": 23, "bf16": 7, "fp16": 10}
#: Distance between neighbouring codes over the size of an average value of its group. Floats: 2 ** -fraction bits,
#: times 0.75 on average over a binade. Integers: the largest of some hundred values is about four times the average.
STEP = {"fp8": 0.75 / 8, "int8": 4 / 127, "int4": 4 / 7, "fp4": 0.75 / 2}
#: Places where an unquantized value is rounded to the layer's dtype.
ROUNDINGS = 8
CONDITION = 1.5
MARGIN = 2.0
#: A single token's error may be larger than the whole output's by this, a single element's by the square.
SCATTER = 3.0
_EXPONENTIAL = 1e-6


def tolerance(request: LayerRequest, token_dtype: TokenDtype | None = None) -> float:
    """Largest relative error of the whole output's norm (see `compare` for single tokens).

    Args:
        request: The layer.
        token_dtype: What tokens are between dispatch and the runner; rounding them for the wire is an error of its own.
    """
    unit = 2.0 ** -(FRACTION_BITS[request.dtype] + 1)
    variance = ROUNDINGS * unit**2 / 3
    if request.dtype == "fp32":
        variance += unit**2 * (request.hidden_size + request.intermediate_size) + _EXPONENTIAL**2
    if token_dtype is not None and token_dtype.scales != "none":
        variance += _wire(token_dtype, request.local_quant.w13)
    return MARGIN * CONDITION * math.sqrt(variance)


def wire_tolerance(token_dtype: TokenDtype) -> float:
    """Largest relative error of the norm of tokens that were rounded to a dtype of the wire, whatever the scheme's."""
    return 0.0 if token_dtype.scales == "none" else MARGIN * STEP[rounds_as(token_dtype)[0]] / math.sqrt(12)


def _wire(token_dtype: TokenDtype, scheme: QuantScheme) -> float:
    """Tokens that are sent as the scheme rounds them are what the reference sees; others are rounded another way."""
    code, group, scale = rounds_as(token_dtype)
    if (code, group, scale) == (scheme.activation_dtype, scheme.activation_group, scheme.activation_scale):
        return 0.0
    # In the scheme's own dtype but by other groups, the sent values stay as they are, and the reference rounds its own.
    return STEP[code] ** 2 / 12 * (2 if code == scheme.activation_dtype else 1)
