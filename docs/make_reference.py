"""Write the reference pages for authors, docs/hooks.md, docs/capabilities.md and docs/payloads.md, from docstrings."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Iterable
from pathlib import Path

from moe_core import hookspecs, payloads, vocabulary
from moe_core.activation import ActivationPattern
from moe_core.plugin_checks import HOOKS
from moe_core.quant import SCHEMES, QuantScheme
from moe_core.specs import (
    BufferSize,
    DeviceGeneration,
    DispatcherSpec,
    Limit,
    PluginSpec,
    Requirement,
    RunnerSpec,
    Setting,
    TokenDtype,
)

FOLDER = Path(__file__).parent
DECLARATIONS = (
    PluginSpec,
    RunnerSpec,
    DispatcherSpec,
    TokenDtype,
    QuantScheme,
    ActivationPattern,
    Limit,
    Requirement,
    Setting,
    BufferSize,
    DeviceGeneration,
)
PAYLOADS = (
    payloads.RawWeights,
    payloads.PreparedWeights,
    payloads.PreparedTensor,
    payloads.StandardTokens,
    payloads.ContiguousTokens,
    payloads.MaskedTokens,
    payloads.DownGemmOverlap,
    payloads.ExpertGroup,
)
#: What has no docstring of its own but a comment above it.
FUNCTIONS = ("DispatchFn", "SendFn", "CombineFn", "ExpertsFn", "FusedFn", "ActivationFn", "PostNormFn")
WORDS = (
    "FORMATS",
    "TOKEN_DTYPES",
    "SCALE_LAYOUTS",
    "PHASES",
    "TIERS",
    "TOKEN_PLACEMENTS",
    "ID_SPACES",
    "LIMIT_FIELDS",
    "DEVICE_TYPES",
)
#: Characters of a line; tables and code are shorter.
_WIDTH = 140
_WRITTEN = "Written by `python docs/make_reference.py` from docstrings; a test compares."
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Warning|Example|Since): ?(.*)$")


def hooks_page() -> str:
    """Every hook: purpose, when it is called, arguments, result, example."""
    introduction = (inspect.getdoc(hookspecs) or "").partition("\n\n")[2]
    parts = ["# The hooks", _WRITTEN, introduction]
    for name in HOOKS:
        function = getattr(hookspecs, name)
        arguments = ",\n".join(f"    {n}: {t}" for n, t in function.__annotations__.items() if n != "return")
        inner = f"\n{arguments},\n" if arguments else ""
        signature = f"def {name}({inner}) -> {function.__annotations__['return']}"
        parts += [f"## `{name}`", f"```python\n{signature}\n```", _text(inspect.getdoc(function) or "")]
    return _folded("\n\n".join(parts))


def capabilities_page() -> str:
    """Every value of a declaration, field by field."""
    introduction = (
        "A declaration is a promise: the resolver never asks for what is not declared, and the conformance kit tries "
        "what is.\nEvery limit that is left out becomes a wrong answer or a crash on somebody's model."
    )
    parts = ["# Capabilities", _WRITTEN, introduction]
    for declaration in DECLARATIONS:
        parts += [f"## `{declaration.__name__}`", _text(inspect.getdoc(declaration) or "")]
    parts += ["## Words", "What a field that is one of several words may say.", *map(_words, WORDS)]
    parts += ["## Schemes with names", f"Constants of `moe_core.quant`, in capitals: {_listed(SCHEMES)}."]
    return _folded("\n\n".join(parts))


def _words(name: str) -> str:
    comments = {word: note for word, note in re.findall(r'"(\w+)",  # (.*)', _source_of(vocabulary, name))}
    words = getattr(vocabulary, name)
    if not comments:
        return f"**`{name}`** {_comment_above(vocabulary, name)}: {_listed(words)}."
    listed = [f"* `{word}`{': ' if word in comments else ''}{comments.get(word, '')}" for word in words]
    return f"**`{name}`** {_comment_above(vocabulary, name)}:\n\n" + "\n".join(listed)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _source_of(module: types.ModuleType, name: str) -> str:
    """An assignment of a module, to its end."""
    text = inspect.getsource(module).partition(f"\n{name}")[2]
    end = re.search(r"\n(?=[^\s)])", text)
    return text[: end.start()] if end else text


def _comment_above(module: types.ModuleType, name: str) -> str:
    """The lines `#: ...` above an assignment, as one text without its full stop."""
    before = inspect.getsource(module).partition(f"\n{name}")[0].splitlines()
    lines = list(itertools.takewhile(lambda line: line.startswith("#:"), reversed(before)))
    text = " ".join(line.removeprefix("#: ") for line in reversed(lines)).rstrip(".")
    return f"({text[:1].lower()}{text[1:]})"


def payloads_page() -> str:
    """Every object that holds tensors, and every function that is bound."""
    introduction = (inspect.getdoc(payloads) or "").partition("\n\n")[2]
    parts = ["# Payloads", _WRITTEN, "Classes of `moe_core.payloads`. " + introduction, "## What is bound"]
    weights = f"Names of canonical tensors: {_listed(payloads.WEIGHT_NAMES)}."
    parts += ["\n".join(f"* `{name}`: {_comment_above(payloads, name)[1:-1]}." for name in FUNCTIONS), weights]
    for payload in PAYLOADS:
        parts += [f"## `{payload.__name__}`", _text(inspect.getdoc(payload) or "")]
    return _folded("\n\n".join(parts))


def _text(docstring: str) -> str:
    """Sections as bold words, arguments and attributes as lists, examples as sessions."""
    lines: list[str] = []
    section = ""
    for line in docstring.splitlines():
        heading = _SECTION.match(line)
        if heading:
            lines += _end(section)
            section = heading[1]
            lines += [f"**{section}** {heading[2]}".rstrip(), ""]
            lines += ["```pycon"] if section == "Example" else []
        else:
            lines.append(_line(line, section))
    return "\n".join(_single_blanks([*lines, *_end(section)])).strip()


def _end(section: str) -> list[str]:
    return ["```", ""] if section == "Example" else []


def _line(line: str, section: str) -> str:
    if section in ("Args", "Attributes", "Raises"):
        named = re.match(r"^    (\w[\w, ]*): (.*)$", line)
        return f"* `{named[1]}`: {named[2]}" if named else line.replace("        ", "  ", 1)
    return line.removeprefix("    ") if section else line


def _single_blanks(lines: Iterable[str]) -> list[str]:
    """Without blank lines at the end of an example, and none twice in a row."""
    kept: list[str] = []
    for line in lines:
        if kept and not kept[-1].strip() and (not line.strip() or line == "```"):
            kept.pop()
        kept.append(line)
    return kept


def _folded(page: str) -> str:
    """The page without lines that are longer than a reader's; list items go on below their first words."""
    return "".join(f"{_fold(line)}\n" for line in page.splitlines())


def _fold(line: str) -> str:
    indent = "  " if line.startswith("* ") else ""
    wrap = functools.partial(textwrap.fill, width=_WIDTH, subsequent_indent=indent)
    # Names are found and copied whole.
    return wrap(line, break_long_words=False, break_on_hyphens=False) if len(line) > _WIDTH else line


PAGES = {"hooks.md": hooks_page, "capabilities.md": capabilities_page, "payloads.md": payloads_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
