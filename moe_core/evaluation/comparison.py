"""One model, or two, run over a text window by window.

Models are functions from token ids to logits, so that anything that has logits can be evaluated. Of each model the
logits of one window are alive at a time; kept are a few numbers per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from moe_core.errors import InputError
from moe_core.evaluation.estimate import Estimate, estimate_mean
from moe_core.evaluation.scores import divergences, log_likelihoods, same_top
from moe_core.evaluation.windows import Window

#: Ids of S tokens -> logits `[S, V]` on the CPU; row i is about the token after token i.
LogitsFn = Callable[[Sequence[int]], Tensor]
#: Takes (windows done, windows in all).
Progress = Callable[[int, int], None]


@attrs.frozen(kw_only=True)
class Prediction:
    """How well one model predicts a text.

    Attributes:
        num_tokens: Tokens that were predicted.
        num_windows: Windows they lie in.
        log_likelihood: Nats per predicted token, below 0.
    """

    num_tokens: int
    num_windows: int
    log_likelihood: Estimate

    def perplexity(self, units_per_token: float = 1.0) -> Estimate:
        """`exp` of the negative log-likelihood per unit; 1 is perfect prediction.

        Args:
            units_per_token: The text's length in other units over its length in tokens, for example bytes per token.
        """
        exponent = -self.log_likelihood.mean / units_per_token
        # Beyond the largest float64.
        value = math.exp(exponent) if exponent < 700 else math.inf
        error = self.log_likelihood.standard_error
        return Estimate(value, None if error is None else value * error / units_per_token)


@attrs.frozen(kw_only=True)
class Comparison:
    """How far a model is from a reference on one text.

    Attributes:
        model: How well the model predicts the text.
        reference: How well the reference does.
        divergence: Kullback-Leibler divergence of the model from the reference, nats per token: what it costs to expect
            the model's words where the reference speaks.
        median_divergence: Of the tokens; the mean is far above it where a few tokens were routed to other experts.
        largest_divergence: Of the tokens.
        same_top: Share of the tokens for which both rank the same token first.
        gain: Log-likelihood of the model less that of the reference, nats per token, paired token by token: its error
            is far below those of the two log-likelihoods, which vary together with the text.
    """

    model: Prediction
    reference: Prediction
    divergence: Estimate
    median_divergence: float
    largest_divergence: float
    same_top: Estimate
    gain: Estimate


def evaluate(
    model: LogitsFn, ids: Sequence[int], windows: Sequence[Window], *, progress: Progress | None = None
) -> Prediction:
    """Let a model predict a text.

    Args:
        model: From ids to logits.
        ids: The whole text.
        windows: Of that text, as `cut_windows` makes them.
        progress: Called after every window with how many are done, and of how many.

    Raises:
        InputError: The model gives a token that came no probability, or its logits hold NaN.
    """
    return _prediction([_score(model, ids, window, "the model")[1] for window in _counted(windows, progress)])


def compare(
    model: LogitsFn,
    reference: LogitsFn,
    ids: Sequence[int],
    windows: Sequence[Window],
    *,
    progress: Progress | None = None,
) -> Comparison:
    """Run two models over a text; arguments and errors as of `evaluate`.

    Raises:
        InputError: Also where the model excludes a token that the reference does not, or the vocabularies differ.
    """
    scores = [_compare_window(model, reference, ids, window) for window in _counted(windows, progress)]
    ours, theirs, divergence, same = zip(*scores, strict=True)
    pooled = torch.cat(divergence)
    return Comparison(
        model=_prediction(ours),
        reference=_prediction(theirs),
        divergence=estimate_mean(divergence),
        median_divergence=float(pooled.median()),
        largest_divergence=float(pooled.max()),
        same_top=estimate_mean(same),
        gain=estimate_mean([own - other for own, other in zip(ours, theirs, strict=True)]),
    )


@torch.inference_mode()
def prompt_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits `[S, V]` of one forward of a causal language model of transformers, fp32 on the CPU."""
    batch = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
    logits: Tensor = model(input_ids=batch, use_cache=False).logits
    return logits[0].float().cpu()


def _counted(windows: Sequence[Window], progress: Progress | None) -> Iterator[Window]:
    """The windows, each told to be done when the next one is asked for."""
    for done, window in enumerate(windows, start=1):
        yield window
        if progress is not None:
            progress(done, len(windows))


def _compare_window(
    model: LogitsFn, reference: LogitsFn, ids: Sequence[int], window: Window
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both log-likelihoods, the divergence and whether the top tokens agree, `[targets]` each."""
    logits, ours = _score(model, ids, window, "the model")
    reference_logits, theirs = _score(reference, ids, window, "the reference")
    if logits.shape != reference_logits.shape:
        raise InputError(
            f"the model's vocabulary has {logits.shape[1]} tokens, the reference's {reference_logits.shape[1]}; "
            "models can be compared over the same tokens only"
        )
    divergence = _finite(divergences(reference_logits, logits), window, "divergence of the model from the reference")
    return ours, theirs, divergence, same_top(reference_logits, logits)


def _score(model: LogitsFn, ids: Sequence[int], window: Window, whose: str) -> tuple[Tensor, Tensor]:
    """Logits `[targets, V]` before each target of a window, and the targets' log-likelihoods."""
    logits = model(ids[window.start : window.stop])[window.first_target - window.start - 1 : -1]
    targets = torch.tensor(ids[window.first_target : window.stop])
    return logits, _finite(log_likelihoods(logits, targets), window, f"log-likelihood of {whose}")


def _prediction(log_likelihood: Sequence[Tensor]) -> Prediction:
    return Prediction(
        num_tokens=sum(window.numel() for window in log_likelihood),
        num_windows=len(log_likelihood),
        log_likelihood=estimate_mean(log_likelihood),
    )


def _finite(values: Tensor, window: Window, what: str) -> Tensor:
    bad = (~values.isfinite()).nonzero()
    if bad.numel():
        index = int(bad[0])
        raise InputError(
            f"{what} is {float(values[index])} at token {window.first_target + index} of the text: the logits hold "
            "NaN, or give no probability to what needs some"
        )
    return values
