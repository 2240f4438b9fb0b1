"""What a command says of an error that is none of the project's: memory ran out, or a plugin failed in a forward."""

from __future__ import annotations

from moe_core.errors import in_words, out_of_memory
from moe_core.plugin_frames import origin_of


def failure(error: BaseException) -> str:
    """The message for an error that ends a command; "" for a fault of this program, whose traceback is what is wanted.

    A hook that fails is told where it is called; what was raised in a forward has a note that says by whose function.
    """
    origin = origin_of(error)
    if short := out_of_memory(error):
        advice = f"{short}; take fewer tokens, a smaller or quantized model, or another device"
        return f"{advice}\n{origin}" if origin else advice
    return f"{in_words(error)}\n{origin}\nthe traceback: -v" if origin else ""
