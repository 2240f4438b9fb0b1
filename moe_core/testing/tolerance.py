"""How far an answer may be from the float64 one, derived from what is rounded on the way.

Weights need no allowance: the reference reads the same codes. What is left:

* Rounding to the layer's dtype, of relative size up to `u = 2 ** -(fraction bits + 1)` and so `u / sqrt(3)` on average
  (uniform over a step), at up to eight places: the first GEMM's result, the element-wise function, its product with
  the up half, the second GEMM's result, its product with the router weight, the sum over slots, the output, and a
  weight that was multiplied with its scale. The errors are independent, so that their squares add.
* Where a scheme rounds activations, a value near the middle between two codes falls on the other one if it was rounded
  to the layer's dtype before. A value that is off by `d` does so with probability `d / step` and is then off by a step:
  on average the square of the error is `d * step`. `d` is about `u / 2` of the value (the first GEMM's result and the
  activation were rounded), a step the fraction below. In a short row a few values that do so are more than the average:
  `(FEW * step) ** 2 / width`, judged by the limit of single tokens. The input of the layer itself was not rounded
  before, unless the router weight was multiplied with it.
* In fp32, sums of `H` and `I` terms in another order: `u * sqrt(H + I)`, and an exponential of 1e-6 relative error.

The activation function and the product of both halves make a relative error larger by up to 1.5 for these layers
(`CONDITION`), and a limit is twice what is expected (`MARGIN`): errors of one token scatter around the average.
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
#: Relative rounding of a scale to e4m3 or to a power of two moves every code of its group when the scale falls on the
#: other side; the group is then rounded anew, which is one more error of a step over sqrt(12) at each value.
SCALE_STEP = {"e4m3": 0.75 / 8, "e8m0": 0.5}
#: Places where an unquantized value is rounded to the layer's dtype.
ROUNDINGS = 8
#: Values of one row that may fall on the other code.
FEW = 2
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
    if request.weight_on_input:
        variance += _flips(request.local_quant.w13, unit, request.hidden_size)
    variance += _flips(request.local_quant.w2, unit, request.intermediate_size)
    if token_dtype is not None and token_dtype.scales != "none":
        variance += _wire(token_dtype, request.local_quant.w13)
    return MARGIN * CONDITION * math.sqrt(variance)


def _flips(scheme: QuantScheme, unit: float, width: int) -> float:
    """Mean square of the error that rounding already rounded activations `[.., width]` adds."""
    if scheme.activation_dtype not in STEP:
        return 0.0
    step = STEP[scheme.activation_dtype]
    variance = max(unit / 2 * step, (FEW * step / SCATTER) ** 2 / width)
    if scheme.activation_scale in SCALE_STEP:
        variance += unit / 2 / SCALE_STEP[scheme.activation_scale] * step**2 / 12
    return variance


def _wire(token_dtype: TokenDtype, scheme: QuantScheme) -> float:
    """Tokens that are sent as the scheme rounds them are what the reference sees; others are rounded another way."""
    code, group, scale = rounds_as(token_dtype)
    if (code, group, scale) == (scheme.activation_dtype, scheme.activation_group, scheme.activation_scale):
        return 0.0
    # In the scheme's own dtype but by other groups, the sent values stay as they are, and the reference rounds its own.
    return STEP[code] ** 2 / 12 * (2 if code == scheme.activation_dtype else 1)
