"""Fields of a layer request in messages, spelled as the options of the command that was typed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import typer
from typer.core import TyperCommand

from moe_core.explanation import IN_FULL

#: `token_placement='replicated'`, `LayerRequest(allow_fallback=True)`, `LayerRequest, field 'ep_size'`.
_FIELD = re.compile(
    r"LayerRequest, field '(?P<checked>\w+)'"
    r"|(?P<call>LayerRequest\()?\b(?P<given>\w+)=(?:'(?P<word>[^']*)'|True)(?(call)\))"
)
_NAME = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
#: `explain(full=True)`, `error.decision.explain(full=True)`.
_IN_FULL = re.compile(rf"(?:\w+\.)*{re.escape(IN_FULL)}")
#: How a workload gets its bound; the option names its phase, too.
_BOUND = "Workload(max_tokens=...)"
_CALL = re.compile(r"LayerRequest\((\w+)=")


def options_of(command: TyperCommand) -> dict[str, str]:
    """Names of a command's parameters -> how they are typed; arguments have no such word."""
    return {str(param.name): param.opts[0] for param in command.params if param.opts[0].startswith("--")}


def speller(context: typer.Context) -> Callable[[str], str]:
    """`in_options` for the command that runs."""
    return partial(in_options, options=options_of(cast(TyperCommand, context.command)))


def in_options(text: str, options: Mapping[str, str]) -> str:
    """A message in the words of a command line.

    Fields that the command has no option for stay as they are; a line that advises to set one in a `LayerRequest(...)`
    is left out, since nobody could follow it. How to have every reason is said for the command, or for `resolve`.
    """
    every = "--explain -v" if "explain" in options else "moe-core resolve --model DIR --explain -v"
    text = _IN_FULL.sub(every, text)
    if "workload" in options:
        text = text.replace(_BOUND, f"{options['workload']} PHASE:TOKENS")
    lines = [line for line in text.split("\n") if (call := _CALL.search(line)) is None or call[1] in options]
    return _FIELD.sub(partial(_typed, options), "\n".join(_of_request(line, options) for line in lines))


def _of_request(line: str, options: Mapping[str, str]) -> str:
    """A sentence about several fields of one request, which names it first."""
    before, named, sentence = line.partition("LayerRequest: ")
    return before + _NAME.sub(lambda match: options.get(match[0], match[0]), sentence) if named else line


def _typed(options: Mapping[str, str], match: re.Match[str]) -> str:
    option = options.get(match["checked"] or match["given"])
    return match[0] if option is None else " ".join(filter(None, (option, match["word"])))
