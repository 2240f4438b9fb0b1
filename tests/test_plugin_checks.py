from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from fakes import bare_plugin, dispatcher, expect, fake_plugin, plugin, runner

from moe_core.discovery import Found
from moe_core.errors import PluginError
from moe_core.hookspecs import hookimpl
from moe_core.manager import BackendManager
from moe_core.specs import Limit, RunnerSpec
from moe_core.testing import Kit

pytestmark = pytest.mark.error_path


def _good(name: str = "toy") -> types.ModuleType:
    return fake_plugin(name, [dispatcher()], [runner()])


def _with_hook(function: Any) -> types.ModuleType:
    return fake_plugin(hooks={"select_dispatcher": function})


def _marked(value: Any) -> types.ModuleType:
    """A plugin with something else than a function behind a hook's name."""
    value.moe_core_impl = {"specname": None}
    module = _good()
    module.select_dispatcher = value  # type: ignore[attr-defined]
    return module


class _Partial(functools.partial):  # type: ignore[type-arg]
    """What a decorator may leave in place of a function."""


async def _asynchronous(candidates: Any) -> Any:
    return candidates[0]


def _generator(candidates: Any) -> Any:
    yield candidates[0]


def _two_functions() -> types.ModuleType:
    module = _good()
    module.mine = hookimpl(specname="fused_experts")(lambda plan: None)  # type: ignore[attr-defined]
    return module


class _Subclass(RunnerSpec):
    """A declaration that is no value: what it says may change after all checks."""

    @property
    def variables(self) -> tuple[str, ...]:
        raise ZeroDivisionError


def _subclassed() -> RunnerSpec:
    usual = runner()
    return _Subclass(**{field.name: getattr(usual, field.name) for field in attrs.fields(RunnerSpec)})


class Stopped(KeyboardInterrupt):
    pass


class _Names(str, enum.Enum):  # noqa: UP042 - it is written into a message as `_Names.TOY`
    TOY = "toy"


def _raise(error: BaseException) -> Any:
    raise error


def _declaring(declare: Callable[[], object]) -> types.ModuleType:
    return bare_plugin("toy", {"declare_backends": declare})


REFUSED = [
    pytest.param(
        lambda: _marked(_Partial(print)), "select_dispatcher: expected a function, got _Partial", id="partial"
    ),
    pytest.param(lambda: _marked(type("Hook", (), {})), "select_dispatcher: expected a function, got type", id="class"),
    pytest.param(lambda: _with_hook(_asynchronous), "select_dispatcher is async", id="async"),
    pytest.param(lambda: _with_hook(_generator), "select_dispatcher yields", id="generator"),
    pytest.param(
        lambda: _with_hook(lambda request, runner: None),
        "hook select_dispatcher takes runner; it may take request, candidates",
        id="renamed argument",
    ),
    pytest.param(
        lambda: _with_hook(lambda self, candidates, /: None),
        "hook select_dispatcher takes self; it may take request, candidates",
        id="self",
    ),
    pytest.param(_two_functions, "fused_experts is implemented by two functions", id="two functions"),
    pytest.param(
        lambda: _declaring(lambda: plugin(runners=[_subclassed()])),
        "returned _Subclass, expected RunnerSpec",
        id="subclass",
    ),
    pytest.param(
        lambda: _declaring(lambda: plugin(runners=[runner(name=_Names.TOY)])),
        "expected letters, digits, '_' and '-', at most 64, got <_Names.TOY",
        id="enumeration",
    ),
    pytest.param(lambda: _declaring(lambda: _raise(GeneratorExit())), "GeneratorExit", id="generator's exit"),
    pytest.param(
        lambda: _declaring(lambda: plugin(description="two\nlines")), "expected one printable line", id="description"
    ),
]


@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_a_refused_plugin_costs_only_itself(make: Callable[[], types.ModuleType], match: str) -> None:
    manager = BackendManager()
    with pytest.raises(PluginError, match=match):
        manager.register("toy", make())
    manager.load([Found(name="toy", load=make), Found(name="a", load=lambda: _good("a"))])
    expect(manager.names() == ("a",))
    (failed,) = manager.failures()
    expect((failed.found.name, failed.stage) == ("toy", "register"), failed)


def test_arguments_may_be_positional_only() -> None:
    manager = BackendManager()
    manager.register("toy", _with_hook(lambda candidates, /: None))
    expect(manager.names() == ("toy",))


@pytest.mark.parametrize("error", [GeneratorExit(), BaseExceptionGroup("two", [SystemExit()]), SystemExit(3)])
def test_what_a_hook_raises_names_its_plugin(error: BaseException) -> None:
    manager = BackendManager()
    manager.register("toy", _with_hook(lambda: _raise(error)))
    with pytest.raises(PluginError, match=f"'toy' .*hook select_dispatcher: {type(error).__name__}"):
        manager._ask("toy", "select_dispatcher")


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), BaseExceptionGroup("two", [SystemExit(), ExceptionGroup("", [OSError()]), Stopped()])],
)
def test_an_interrupt_passes_through_a_hook_alone_or_in_a_group(error: BaseException) -> None:
    manager = BackendManager()
    manager.register("toy", _with_hook(lambda: _raise(error)))
    with pytest.raises(type(error)) as caught:
        manager._ask("toy", "select_dispatcher")
    expect(caught.value is error)


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ([("top_k", "<=", 2), ("top_k", ">=", 5)], False),
        ([("hidden_size", "<=", 100), ("hidden_size", "multiple_of", 128)], False),
        ([("top_k", "in", (2, 4)), ("top_k", "in", (3, 6))], False),
        ([("hidden_size", "in", (100, 200)), ("hidden_size", "multiple_of", 64)], False),
        ([("hidden_size", ">=", 100), ("hidden_size", "<=", 191), ("hidden_size", "multiple_of", 64)], True),
        ([("hidden_size", "multiple_of", 6), ("hidden_size", "multiple_of", 4), ("hidden_size", "<=", 11)], False),
        ([("top_k", "in", (2, 4)), ("top_k", ">=", 3), ("hidden_size", "<=", 2)], True),
    ],
)
def test_limits_that_no_layer_keeps(limits: list[tuple[str, str, Any]], fits: bool) -> None:
    module = fake_plugin("toy", [dispatcher()], [runner(limits=[Limit(*limit) for limit in limits])])
    case = next(case for case in Kit(module, device="cpu").cases() if case.check == "specs")
    result = case.run()
    expect((result.status == "passed") == fits, result.text)
    expect(fits or "toy:toy.standard: no size keeps all of " in result.text, result.text)
