from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from moe_core import hookspecs
from moe_core.backends.torch import plugin as torch_plugin
from moe_core.plugin_checks import HOOKS, RUNNER_HOOKS, SELECT_HOOKS

SPECS: dict[str, Callable[..., Any]] = {name: getattr(hookspecs, name) for name in HOOKS}


def test_the_hooks() -> None:
    assert ("declare_backends", *SELECT_HOOKS, *RUNNER_HOOKS) == HOOKS


@pytest.mark.parametrize("name", HOOKS)
def test_the_manual_of_a_hook_is_complete(name: str) -> None:
    text = inspect.getdoc(SPECS[name]) or ""
    first, _, rest = text.partition("\n\n")
    assert first.endswith(".")
    assert "\n" not in first
    assert rest.startswith("Called ")
    for section in ("Returns:", "Example:", "Since: hook API 1."):
        assert section in text, section
    arguments = list(inspect.signature(SPECS[name]).parameters)
    section = re.search(r"Args:\n(.*?)\n\n", text, re.DOTALL)
    documented = re.findall(r"^    (\w+):", section[1], re.MULTILINE) if section else []
    assert documented == arguments


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_of_a_hook_runs(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(SPECS[name], name, globs={})
    assert test.examples
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert result.failed == 0


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_shows_an_implementation_of_its_hook(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(SPECS[name], name, globs={})
    source = "".join(example.source for example in test.examples)
    assert f"@hookimpl\ndef {name}(" in source


@pytest.mark.parametrize("name", sorted(set(HOOKS) & set(vars(torch_plugin))))
def test_the_built_in_plugin_agrees_with_the_annotations(name: str) -> None:
    # Compared as texts: the names exist for type checkers only.
    spec, implementation = SPECS[name].__annotations__, getattr(torch_plugin, name).__annotations__
    for argument, annotation in implementation.items():
        assert set(annotation.split(" | ")) <= set(spec[argument].split(" | ")), argument
