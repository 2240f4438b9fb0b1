"""What is raised in a forward says whose function raised it, and is otherwise the error that it was."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import CPU, bare_plugin, dispatcher, fake_plugin, runner

from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.discovery import Found
from moe_core.errors import InputError, PluginError
from moe_core.manager import BackendManager
from moe_core.payloads import PreparedTensor, PreparedWeights, StandardTokens
from moe_core.testing.outcome import Case

pytestmark = pytest.mark.error_path

LAYER = LayerRequest(num_experts=2, top_k=1, hidden_size=8, intermediate_size=8)
TOKENS = (torch.ones(3, 8, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
PLUGIN = f"plugin 'toy' (acme-toy 2.1, entry point {__name__})"
RAN = "in the forward of toy:toy.standard + toy:toy.standard"
STEPS = ("dispatch", "experts", "combine")


def _prepare(weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    tensors = {name: PreparedTensor(data=tensor, owned=False) for name, tensor in weights.tensors.items()}
    return PreparedWeights(layout="canonical", tensors=tensors)


def _layer(monkeypatch: pytest.MonkeyPatch, bind: Callable[..., Any], experts: Callable[..., Any]) -> MoELayer:
    """A layer whose functions are these, of a plugin that lies in this module."""
    module = types.ModuleType("toy_dispatch")
    module.bind = bind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_dispatch", module)
    hooks = {"process_weights_after_loading": _prepare, "fused_experts": lambda weights: experts}
    parts = [dispatcher(binder="toy_dispatch:bind", token_placements=("replicated",))], [runner()]
    plugin, manager = fake_plugin("toy", *parts, hooks), BackendManager()
    manager.register(
        "toy", plugin, Found(name="toy", load=lambda: plugin, value=__name__, distribution="acme-toy", version="2.1")
    )
    layer = MoELayer(LAYER, environment=CPU, manager=manager)
    shapes = {"w13": (2, 16, 8), "w2": (2, 8, 8)}
    layer.load_weights(RawWeights(tensors={n: torch.ones(s, dtype=torch.bfloat16) for n, s in shapes.items()}))
    return layer


def _failing_at(monkeypatch: pytest.MonkeyPatch, step: str, fail: Callable[..., Any]) -> MoELayer:
    def dispatch(hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        return hidden_states, None

    def experts(tokens: Any) -> Any:
        return tokens

    def combine(rows: Any, handle: Any) -> Any:
        return rows

    functions = {"dispatch": dispatch, "experts": experts, "combine": combine} | {step: fail}
    return _layer(monkeypatch, lambda *_: (functions["dispatch"], functions["combine"]), functions["experts"])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [InputError("too many rows"), ValueError("no such tile"), KeyError(3)], ids=repr)
def test_an_error_keeps_its_class_and_text_and_names_the_function(
    monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    def fail(*arguments: Any) -> Any:
        raise error

    layer = _failing_at(monkeypatch, step, fail)
    # A plugin may raise the same object every time.
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            layer(*TOKENS)
        assert caught.value is error
    function = f"{__name__}.test_an_error_keeps_its_class_and_text_and_names_the_function.<locals>.fail"
    assert error.__notes__ == [f"raised by {PLUGIN}, function {function}, {RAN}"]
    del error.__notes__


@pytest.mark.parametrize("step", STEPS)
def test_what_a_library_raises_that_was_bound_as_it_is_names_the_combination(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    layer = _failing_at(monkeypatch, step, torch.nn.functional.linear)
    with pytest.raises((TypeError, RuntimeError)) as caught:
        layer(*TOKENS)
    assert caught.value.__notes__ == [f"raised {RAN}"]


def test_an_exit_becomes_an_error_and_an_interrupt_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _failing_at(monkeypatch, "experts", lambda tokens: sys.exit(3))
    with pytest.raises(PluginError, match=rf"<lambda>, {RAN.replace('+', '.')}: SystemExit: 3") as caught:
        layer(*TOKENS)
    assert str(caught.value).startswith(PLUGIN)

    def interrupted(tokens: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        _failing_at(monkeypatch, "experts", interrupted)(*TOKENS)
    assert not hasattr(stopped.value, "__notes__")


def test_what_the_caller_does_meanwhile_is_no_function_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _failing_at(monkeypatch, "experts", lambda tokens: tokens)
    with pytest.raises(TypeError, match="argument") as caught:
        layer(*TOKENS, overlap=torch.nn.functional.silu)
    assert caught.value.__notes__ == [f"raised {RAN}"]


def test_an_error_of_the_core_before_the_plugins_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _failing_at(monkeypatch, "experts", lambda tokens: tokens)
    with pytest.raises(InputError, match="expected shape") as caught:
        layer(TOKENS[0][:, 1:], *TOKENS[1:])
    assert not hasattr(caught.value, "__notes__")


def test_an_error_of_a_binder_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(plan: Any, route: Any, group: Any) -> Any:
        raise InputError("a fabric needs two ranks")

    with pytest.raises(InputError) as caught:
        _layer(monkeypatch, bind, lambda tokens: tokens)
    assert str(caught.value) == "a fabric needs two ranks"
    assert caught.value.__notes__ == [f"raised by {PLUGIN}, dispatcher toy:toy.standard, binder 'toy_dispatch:bind'"]


def test_a_hook_that_raises_one_object_again_is_noted_once() -> None:
    error, manager = InputError("never"), BackendManager()

    def choose(candidates: Any) -> Any:
        raise error

    manager.register("toy", fake_plugin("toy", [dispatcher()], [runner()]))
    manager.register("policy", bare_plugin("policy", {"select_dispatcher": choose}))
    for _ in range(2):
        with pytest.raises(InputError, match="never"):
            MoELayer(LAYER, environment=CPU, manager=manager)
    assert error.__notes__ == ["raised by plugin 'policy' (entry point fake_policy), hook select_dispatcher"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, ", whose experts gave NoneType in place of rows"),
        (torch.ones(2, 8), ", whose experts gave [2, 8] for rows [3, 8]"),
        (torch.ones(3, 8), ""),
    ],
    ids=["nothing", "fewer", "right"],
)
def test_a_combine_that_fails_on_other_rows_is_told_beside_them(
    monkeypatch: pytest.MonkeyPatch, rows: Any, said: str
) -> None:
    def dispatch(hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        return StandardTokens(hidden_states=hidden_states, topk_ids=topk_ids, topk_weights=topk_weights), None

    layer = _layer(monkeypatch, lambda *_: (dispatch, torch.nn.functional.linear), lambda tokens: rows)
    with pytest.raises(TypeError) as caught:
        layer(*TOKENS)
    assert caught.value.__notes__ == [f"raised {RAN}{said}"]


def test_the_kit_says_which_function_raised() -> None:
    def check() -> None:
        error = ValueError("no such tile")
        error.add_note("raised by plugin 'toy'")
        raise error

    result = Case(check="answer", subject="toy", function=check).run()
    assert (result.status, result.text) == ("failed", "it raised ValueError: no such tile; raised by plugin 'toy'")
