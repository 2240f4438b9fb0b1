"""A text cut into windows that a model sees one at a time, so that every token is predicted at most once."""

from __future__ import annotations

import attrs

from moe_core.errors import SpecError, counted


@attrs.frozen(kw_only=True)
class Window:
    """A piece of a text, as positions of its tokens.

    Attributes:
        start: First token that the model sees.
        stop: The token after its last.
        first_target: First token that counts as predicted here; those before it are context.
    """

    start: int
    stop: int
    first_target: int


def cut_windows(num_tokens: int, window: int, stride: int) -> tuple[Window, ...]:
    """Windows that begin `stride` tokens apart and together reach the end of the text.

    A token is predicted in the first window that holds it and something before it. With `stride == window` the windows
    lie side by side, and the first token of each is predicted nowhere; with a smaller stride every token but the text's
    first is, with at least `window - stride` tokens before it from the second window on.

    Args:
        num_tokens: Tokens of the text.
        window: Tokens per window, at most what the model was trained on; the last one may be shorter.
        stride: From the start of one window to the start of the next.

    Raises:
        SpecError: A size that makes no sense, or a text with nothing to predict.
    """
    if window < 2:
        raise SpecError(f"a window of {counted(window, 'token')} predicts nothing; give at least 2")
    if not 1 <= stride <= window:
        raise SpecError(f"stride {stride} is not in 1..{window}: a larger one than the window would skip tokens")
    if num_tokens < 2:
        raise SpecError(f"the text has {counted(num_tokens, 'token')}; predicting needs at least 2")
    windows, covered = [], 0
    for start in range(0, num_tokens, stride):
        stop = min(start + window, num_tokens)
        first_target = max(covered, start + 1)
        if first_target < stop:
            windows.append(Window(start=start, stop=stop, first_target=first_target))
        covered = stop
    return tuple(windows)
