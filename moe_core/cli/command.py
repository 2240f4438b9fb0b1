"""The class of all commands: what refuses a value repeats it, which typer's own messages do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose errors about values say what was typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of its base; raises `typer.BadParameter` with the option's values behind its text."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            typed = list(map(repr, _values(words, () if error.param is None else error.param.opts)))
            if typed and not any(value in error.message for value in typed):
                error.message = f"{error.message.rstrip('.')}, got {', '.join(typed)}"
            raise


def _values(words: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """What stands behind an option, each time that it was typed: `--tokens 1`, `--tokens=1`, `-j 1`."""
    for word, following in itertools.zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name in names and (equals or following is not None):
            yield value if equals else following
