"""Building blocks on plain tensors that plugins share, without plugins or plans; importing this imports nothing.

`ops` is what plugins import: each block there is in torch here, and in Triton in `triton`. Its blocks are `checks`,
`permute`, `activation`, `quantize` (rows to codes and scales) and `combine`.

`experts` is all that a torch runner computes. Its products are in `grouped`, which takes torch's grouped GEMM, `linear`
(a loop over experts, on a CPU) or `blocks` (elsewhere); `dequantize` reads stored weights, and
`activation_rounding` rounds activations to the numbers that a scheme's codes stand for, as floats.
"""

from __future__ import annotations
