"""The mean of a quantity over tokens, and how far it may be from the mean over other text of the same kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Estimate:
    """A mean over tokens.

    Attributes:
        mean: In the unit of the values.
        standard_error: In the same unit; None where there is one window only.
    """

    mean: float
    standard_error: float | None


def estimate_mean(values: Sequence[Tensor]) -> Estimate:
    """Mean over all tokens, with its standard error from the spread between windows.

    Neighbouring tokens are correlated (one unusual sentence, one wrongly routed token in the cache), so that the spread
    between tokens over the root of their number would be too small. A window is taken as one draw of `(sum, tokens)`;
    the mean is the ratio of both totals, and its variance the usual one of a ratio estimator over W clusters:
    `W / (W - 1) * sum over windows of (sum - mean * tokens)**2 / (all tokens)**2` (Cochran, Sampling Techniques, 3rd
    edition, section 9A). For windows of one size this is the spread of the window means over the root of W. What
    correlates one window with the next is not in it.

    Args:
        values: One `[n]` tensor per window, n > 0; at least one window.
    """
    sums = torch.stack([window.double().sum() for window in values])
    counts = torch.tensor([window.numel() for window in values], dtype=torch.float64)
    mean = float(sums.sum() / counts.sum())
    if len(values) < 2:
        return Estimate(mean, None)
    spread = float((sums - mean * counts).square().sum()) * len(values) / (len(values) - 1)
    return Estimate(mean, math.sqrt(spread) / float(counts.sum()))
