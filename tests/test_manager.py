from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from fakes import (
    BF16_TOKENS,
    CPU,
    FP8_ROW,
    TORCH,
    bare_plugin,
    dispatcher,
    expect,
    fake_plugin,
    manager_of,
    plugin,
    request,
    runner,
)

from moe_core.declared import Candidate, DeclaredDispatcher, DeclaredRunner
from moe_core.discovery import Found
from moe_core.errors import InputError, PluginConflictError, PluginError, UnknownNameError
from moe_core.hookspecs import hookimpl, select_dispatcher
from moe_core.manager import BackendManager
from moe_core.payloads import ExpertGroup, PreparedWeights
from moe_core.planner import make_plan
from moe_core.specs import DeviceGeneration, Requirement


def _found(name: str, load: Callable[[], object], distribution: str = "dist", version: str = "1.0") -> Found:
    return Found(name=name, load=load, value=f"{distribution}.plugin", distribution=distribution, version=version)


def _raise(error: BaseException) -> Any:
    raise error


def _good(name: str = "toy") -> types.ModuleType:
    return fake_plugin(name, [dispatcher()], [runner()])


def _declares(result: object) -> dict[str, Callable[..., Any]]:
    return {"declare_backends": lambda: result}


def _nothing_is_left(manager: BackendManager, name: str, module: object) -> None:
    """A refused plugin is gone from every place, so that a repaired one can take its name."""
    expect(manager.names() == ())
    expect(manager._pluggy.list_name_plugin() == [], manager._pluggy.list_name_plugin())
    expect(all(not caller.get_hookimpls() for caller in vars(manager._pluggy.hook).values()))
    manager.register(name, _good(name))
    expect(manager.names() == (name,))


def _unmarked() -> types.ModuleType:
    module = _good()
    module.select_dispatcher = lambda candidates: None  # type: ignore[attr-defined]
    return module


def _wrapper() -> types.ModuleType:
    module = _good()

    @hookimpl(wrapper=True)
    def wrapped(candidates: Any) -> Any:
        return (yield)

    module.select_dispatcher = wrapped  # type: ignore[attr-defined]
    return module


def _by_spec_name(function: Callable[..., Any]) -> types.ModuleType:
    module = _good()
    module.choose = hookimpl(specname="select_dispatcher")(function)  # type: ignore[attr-defined]
    return module


REFUSED = [
    pytest.param(lambda: object(), "a plugin is a module, got object", id="no module"),
    pytest.param(lambda: None, "a plugin is a module, got NoneType", id="None"),
    pytest.param(lambda: types.ModuleType("empty"), "hook declare_backends is missing", id="no hooks"),
    pytest.param(
        lambda: fake_plugin(hooks={"select_dispatchers": lambda: None}),
        "unknown hook 'select_dispatchers'",
        id="unknown",
    ),
    pytest.param(
        lambda: fake_plugin(hooks={"select_dispatcher": lambda request, runners: None}),
        "runners",
        id="unknown argument",
    ),
    pytest.param(
        lambda: fake_plugin(hooks={"select_dispatcher": lambda request, candidates=(): None}),
        "hook select_dispatcher: arguments must be named, positional and without defaults",
        id="default",
    ),
    pytest.param(
        lambda: _by_spec_name(lambda request, candidates=(): None), "hook select_dispatcher: arguments", id="specname"
    ),
    pytest.param(
        lambda: fake_plugin(hooks={"select_dispatcher": lambda *, candidates: None}),
        "hook select_dispatcher: arguments",
        id="keyword only",
    ),
    pytest.param(
        lambda: fake_plugin(hooks={"select_dispatcher": lambda **everything: None}),
        "hook select_dispatcher: arguments",
        id="var keywords",
    ),
    pytest.param(_wrapper, "hook select_dispatcher: wrappers are not supported", id="wrapper"),
    pytest.param(_unmarked, "select_dispatcher is not marked with @hookimpl", id="unmarked"),
    pytest.param(lambda: bare_plugin("toy", _declares(None)), "returned NoneType, expected PluginSpec", id="None spec"),
    pytest.param(lambda: bare_plugin("toy", _declares([])), "returned list, expected PluginSpec", id="list"),
    pytest.param(lambda: bare_plugin("toy", _declares(plugin("other"))), "says name 'other', the", id="other name"),
    pytest.param(
        lambda: fake_plugin(hook_api=2),
        "declares hook API 2, this moe-core speaks 1; install a newer moe-core",
        id="api",
    ),
    pytest.param(
        lambda: bare_plugin("toy", _declares(plugin(runners=[runner()]))),
        "does not implement process_weights_after_loading and fused_experts",
        id="required hooks",
    ),
    pytest.param(
        lambda: bare_plugin("toy", {"declare_backends": lambda: _raise(ZeroDivisionError("oops"))}),
        "ZeroDivisionError: oops",
        id="declare raises",
    ),
    pytest.param(
        lambda: bare_plugin("toy", {"declare_backends": lambda: sys.exit(3)}), "SystemExit: 3", id="declare exits"
    ),
]


@pytest.mark.error_path
@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_a_refused_plugin_leaves_nothing_behind(make: Callable[[], object], match: str) -> None:
    manager, module = BackendManager(), make()
    with pytest.raises(PluginError, match=match) as caught:
        manager.register("toy", module)
    expect("plugin 'toy' (entry point" in str(caught.value), caught.value)
    _nothing_is_left(manager, "toy", module)


@pytest.mark.error_path
@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_a_refused_plugin_costs_only_itself(make: Callable[[], object], match: str) -> None:
    manager = BackendManager()
    manager.load([_found("toy", make), _found("b", lambda: _good("b")), _found("a", lambda: _good("a"))])
    expect(manager.names() == ("a", "b"))
    (failed,) = manager.failures()
    expect((failed.found.name, failed.stage) == ("toy", "register"), failed)
    expect("Error" in failed.traceback or "SystemExit" in failed.traceback)
    statuses = [(row.name, row.status) for row in manager.reports()]
    expect(statuses == [("a", "ready"), ("b", "ready"), ("toy", "failed")], statuses)


@pytest.mark.error_path
def test_an_interrupt_passes_and_leaves_nothing_behind() -> None:
    manager = BackendManager()
    module = bare_plugin("toy", {"declare_backends": lambda: _raise(KeyboardInterrupt())})
    with pytest.raises(KeyboardInterrupt):
        manager.register("toy", module)
    _nothing_is_left(manager, "toy", module)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModuleNotFoundError("No module named 'foo'"), "ModuleNotFoundError: No module named 'foo'"),
        (SystemExit(2), "SystemExit: 2"),
        (RuntimeError("driver"), "RuntimeError: driver"),
    ],
)
def test_a_plugin_that_fails_on_import_raises_its_cause_when_asked_for(error: BaseException, text: str) -> None:
    manager = BackendManager()
    manager.load([_found("broken", lambda: _raise(error), "moe-plugin-broken", "0.3")])
    for _ in range(2):
        with pytest.raises(PluginError, match=r"'broken' \(moe-plugin-broken 0.3, .*\(load\)") as caught:
            manager.require("broken")
        expect(caught.value.__cause__ is error)
        expect(text in str(caught.value))


@pytest.mark.error_path
def test_an_interrupt_while_loading_passes() -> None:
    manager = BackendManager()
    with pytest.raises(KeyboardInterrupt):
        manager.load([_found("slow", lambda: _raise(KeyboardInterrupt()))])
    manager.load([_found("slow", lambda: _good("slow"))])
    expect(manager.names() == ("slow",))


@pytest.mark.error_path
def test_two_distributions_of_one_name_are_both_refused() -> None:
    neighbour = _good("b")
    rivals = [_found("toy", _good, "one"), _found("toy", _good, "two"), _found("b", lambda: neighbour)]
    manager = BackendManager()
    for plugins in (rivals, rivals[::-1]):
        manager.load(plugins)
        expect(manager.names() == ("b",))
        rows = [(row.name, row.distribution, row.status) for row in manager.reports()]
        expect(rows == [("b", "dist", "ready"), ("toy", "one", "conflict"), ("toy", "two", "conflict")], rows)
    with pytest.raises(PluginError, match=r"claimed by 'toy' \(one .* and 'toy' \(two .*Uninstall all but one"):
        manager.require("toy")


@pytest.mark.error_path
def test_a_taken_name_is_refused() -> None:
    manager = BackendManager()
    first = _good()
    manager.register("toy", first)
    manager.register("toy", first)
    with pytest.raises(PluginConflictError, match="'toy' is taken by 'toy'"):
        manager.register("toy", _good())
    manager.load([_found("toy", _good, "late")])
    expect([row.status for row in manager.reports()] == ["ready", "conflict"], manager.reports())
    expect([failed.stage for failed in manager.failures()] == ["conflict"])


@pytest.mark.error_path
def test_one_module_has_one_name() -> None:
    manager, module = BackendManager(), _good()
    manager.register("toy", module)
    with pytest.raises(PluginConflictError, match=r"'second' .* is already registered as 'toy'"):
        manager.register("second", module)


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["", None, 3, b"toy"])
def test_what_is_no_name_leaves_nothing_behind(name: Any) -> None:
    manager, module = BackendManager(), _good()
    with pytest.raises(PluginError, match=rf"a plugin's name is a text that is not empty, got {name!r}"):
        manager.register(name, module)
    manager.register("toy", module)
    expect(manager.names() == ("toy",))


@pytest.mark.error_path
def test_unregister_frees_the_name() -> None:
    manager = manager_of(plugin())
    manager.unregister("toy")
    expect(manager.names() == ())
    manager.register("toy", _good())
    with pytest.raises(UnknownNameError, match="unknown plugin 'tyo'; did you mean 'toy'"):
        manager.unregister("tyo")


def test_a_repaired_plugin_is_ready_when_loaded_again() -> None:
    manager = BackendManager()
    manager.load([_found("toy", lambda: _raise(ImportError("not yet")))])
    manager.load([_found("toy", lambda: _raise(ImportError("not yet")))])
    assert len(manager.failures()) == 1
    manager.load([_found("toy", _good)])
    assert manager.failures() == ()
    assert manager.names() == ("toy",)


def test_an_imported_hookspec_is_no_implementation() -> None:
    module = _good()
    module.select_dispatcher = select_dispatcher  # type: ignore[attr-defined]
    manager = BackendManager()
    manager.register("toy", module)
    assert manager.hooks("toy") == ("declare_backends", "process_weights_after_loading", "fused_experts")


def test_annotations_are_never_evaluated() -> None:
    def choose(candidates: Any) -> Any:
        return candidates[-1]

    choose.__annotations__ = {"candidates": "NamesThatOnlyTypeCheckersSee", "return": "Them"}
    assert _manager(choose).select_dispatcher(request(), [A, B], False) == (B, "toy")


def test_reading() -> None:
    needs = (Requirement(module="lib"),)
    manager = manager_of(
        TORCH, plugin("b", dispatchers=[dispatcher(requirements=needs)], requirements=(Requirement(module="base"),))
    )
    assert manager.names() == ("b", "torch")
    assert [spec.name for spec in manager.specs()] == ["b", "torch"]
    assert manager.modules_required() == ("base", "lib", "torch")
    assert manager.found("b").name == "b"


def test_generations_are_those_of_all_plugins() -> None:
    first, second = DeviceGeneration("npu", "A", "a1"), DeviceGeneration("xpu", "B", "b1")
    manager = manager_of(TORCH, plugin("c", generations=(second,)), plugin("b", generations=(first,)))
    assert manager.generations() == (first, second)


def test_a_fused_runner_is_told_its_ranks() -> None:
    told: list[Any] = []

    def bind(route: Any, group: Any) -> Any:
        told.append(group)
        return lambda hidden_states, topk_ids, topk_weights: hidden_states

    fused = runner("toy", "fused", format="fused", a2a="toy_fused")
    manager = BackendManager()
    manager.register("toy", fake_plugin("toy", runners=[fused], hooks={"fused_experts": bind}))
    made, _ = make_plan(manager, request(a2a_backend="toy_fused"), CPU)
    group = ExpertGroup(rank=1, size=2)
    manager.bind_experts(made, made.routes[0], PreparedWeights(layout="canonical", tensors={}), group)
    assert told == [group]


# Asking ---------------------------------------------------------------------------------------------------------

SPEC = plugin(dispatchers=[dispatcher(sends=(BF16_TOKENS, FP8_ROW))], runners=[runner("a"), runner("b")])
A, B = (Candidate(DeclaredDispatcher("toy", SPEC.dispatchers[0]), DeclaredRunner("toy", spec)) for spec in SPEC.runners)


def _manager(plugin_answer: Any = None, **policies: Any) -> BackendManager:
    manager = BackendManager()
    hooks = {"select_dispatcher": plugin_answer} if plugin_answer else {}
    manager.register("toy", fake_plugin("toy", SPEC.dispatchers, SPEC.runners, hooks))
    for name in reversed(sorted(policies)):
        manager.register(name, bare_plugin(name, {"select_dispatcher": policies[name]}))
    return manager


def _last(candidates: Any) -> Any:
    return candidates[-1]


@pytest.mark.parametrize(
    ("manager", "policy_only", "answer"),
    [
        pytest.param(_manager(), False, (A, "rank"), id="nobody"),
        pytest.param(_manager(_last), False, (B, "toy"), id="the runner's plugin"),
        pytest.param(_manager(_last), True, (A, "rank"), id="the user's order"),
        pytest.param(_manager(_last, policy=lambda: A), False, (A, "policy"), id="policy first"),
        pytest.param(_manager(policy=lambda candidates: candidates[-1]), True, (B, "policy"), id="policy always"),
        pytest.param(_manager(_last, policy=lambda: None), False, (B, "toy"), id="policy declines"),
        pytest.param(_manager(p=lambda: A, q=lambda: B), False, (A, "p"), id="policies by name"),
    ],
)
def test_who_is_asked(manager: BackendManager, policy_only: bool, answer: tuple[Candidate, str]) -> None:
    assert manager.select_dispatcher(request(), [A, B], policy_only) == answer


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda: "toy", r"plugin 'toy' .*, hook select_dispatcher: 'toy' is no candidate; they are: toy:toy.standard"),
        (
            lambda: B,
            r"toy:toy.standard \+ toy:b.standard is no candidate; they are: toy:toy.standard \+ toy:a.standard$",
        ),
        (lambda: _raise(KeyError("x")), r"hook select_dispatcher: KeyError: 'x'"),
        (lambda: sys.exit(1), r"hook select_dispatcher: SystemExit: 1"),
    ],
)
def test_a_wrong_answer_names_the_plugin(answer: Callable[[], Any], match: str) -> None:
    with pytest.raises(PluginError, match=match):
        _manager(answer).select_dispatcher(request(), [A], False)


@pytest.mark.error_path
def test_errors_of_the_project_pass_with_a_note() -> None:
    with pytest.raises(InputError, match="too many") as caught:
        _manager(lambda: _raise(InputError("too many"))).select_dispatcher(request(), [A], False)
    expect("plugin 'toy'" in caught.value.__notes__[0], caught.value.__notes__)


@pytest.mark.error_path
@pytest.mark.parametrize("answer", [BF16_TOKENS, FP8_ROW, "bf16"])
def test_the_dtype_hook(answer: Any) -> None:
    hooks = {"select_output_dtype": lambda candidates: answer}
    manager = BackendManager()
    manager.register("toy", fake_plugin("toy", SPEC.dispatchers, SPEC.runners, hooks))
    if answer == BF16_TOKENS:
        expect(manager.select_output_dtype(request(), A, (BF16_TOKENS,), False) == (BF16_TOKENS, "toy"))
        return
    with pytest.raises(PluginError, match=r"select_output_dtype: .* is no candidate; they are: bf16"):
        manager.select_output_dtype(request(), A, (BF16_TOKENS,), False)
