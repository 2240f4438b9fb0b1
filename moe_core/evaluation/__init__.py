"""How well a causal language model predicts a text, and how far it is from another model on the same text.

```python
from functools import partial
from moe_core.evaluation import compare, cut_windows, prompt_logits

windows = cut_windows(len(ids), window=256, stride=256)
comparison = compare(partial(prompt_logits, quantized), partial(prompt_logits, original), ids, windows)
print(comparison.divergence.mean, comparison.divergence.standard_error)
```
"""

from __future__ import annotations

from moe_core.evaluation.comparison import Comparison, LogitsFn, Prediction, Progress, compare, evaluate, prompt_logits
from moe_core.evaluation.estimate import Estimate, estimate_mean
from moe_core.evaluation.scores import divergences, log_likelihoods, same_top
from moe_core.evaluation.windows import Window, cut_windows

__all__ = [
    "Comparison",
    "Estimate",
    "LogitsFn",
    "Prediction",
    "Progress",
    "Window",
    "compare",
    "cut_windows",
    "divergences",
    "estimate_mean",
    "evaluate",
    "log_likelihoods",
    "prompt_logits",
    "same_top",
]
