"""What a plugin says before anything runs: its import, its specs, its hooks' signatures, and plans of others."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from moe_core import hookspecs
from moe_core.declared import Candidate, DeclaredRunner
from moe_core.errors import MoeCoreError
from moe_core.payloads import PreparedWeights
from moe_core.plugin_checks import HOOKS, SELECT_HOOKS, argument_names
from moe_core.specs import Limit
from moe_core.testing.backend import HELPER, Backend
from moe_core.testing.bench import Bench
from moe_core.testing.cells import cells_of
from moe_core.testing.outcome import NotRun, require

#: What importing a plugin must not bring along, besides what the plugin itself requires.
_HEAVY = ("torch", "numpy", "transformers", "triton")
_SECONDS = 120

_SCRIPT = """
import importlib, json, os, sys
name, path = sys.argv[1:]
before = dict(os.environ)
module = importlib.import_module(name)
declare = getattr(module, "declare_backends", None)
spec = repr(declare()) if declare is not None else ""
found = {"modules": sorted(sys.modules), "environ": sorted(set(os.environ.items()) ^ set(before.items())), "spec": spec}
with open(path, "w") as file:
    json.dump(found, file)
"""


@functools.lru_cache(maxsize=16)
def _imported_alone(module: str) -> tuple[dict[str, Any], str]:
    """What a process that imports only this plugin finds, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, module, str(answer)],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        cause = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        problem = f"importing {module} in a fresh process fails: {cause}\n{done.stderr}".rstrip()
        require(done.returncode == 0 and answer.exists(), problem)
        return json.loads(answer.read_text(encoding="utf-8")), done.stdout + done.stderr


def check_import(backend: Backend) -> None:
    """Importing the plugin and declaring need no torch and no kernel library, print nothing and change nothing."""
    name = backend.module.__name__
    if not backend.is_importable:
        raise NotRun(f"module {name} has no file, so that no other process can import it")
    found, printed = _imported_alone(name)
    # A requirement that the declarative half of the core has anyway is no news.
    heavy = sorted({*_HEAVY, *_required_modules(backend)} & set(found["modules"]) - {"moe_core", "attrs", "packaging"})
    require(not heavy, f"importing {name} imports {', '.join(heavy)}; import inside the hooks")
    require(not printed, f"importing {name} prints {printed[:200]!r}")
    changed = sorted({variable for variable, _ in found["environ"]})
    require(not changed, f"importing {name} changes the environment variables {', '.join(changed)}")


def _required_modules(backend: Backend) -> set[str]:
    parts = [backend.spec, *(part.spec for part in backend.own_parts)]
    return {requirement.module for part in parts for requirement in part.requirements}


def check_specs(backend: Backend) -> None:
    """The declaration is the same every time and in every process, can be pickled, and its API number is literal."""
    declare = getattr(backend.module, "declare_backends", None)
    if declare is None:
        raise NotRun("a policy declares nothing")
    first, second = declare(), declare()
    require(first == second, "declare_backends gives another declaration every time")
    require(pickle.loads(pickle.dumps(first)) == first, "the declaration does not survive pickling")
    if backend.is_importable:
        found, _ = _imported_alone(backend.module.__name__)
        require(found["spec"] == repr(first), "another process gets another declaration; is it made from a set?")
    for node in ast.walk(_parsed(declare)):
        if isinstance(node, ast.keyword) and node.arg == "hook_api":
            literal = isinstance(node.value, ast.Constant)
            require(
                literal, "hook_api must be written as a number: an imported constant fits every version of the core"
            )
    for part in backend.own_parts:
        _check_limits(part.full_name, part.spec.limits)


def _parsed(function: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, SyntaxError, TypeError):
        return ast.Module(body=[], type_ignores=[])


def _check_limits(name: str, limits: Sequence[Limit]) -> None:
    for field in dict.fromkeys(limit.field for limit in limits):
        own = [limit for limit in limits if limit.field == field]
        texts = ", ".join(map(str, own))
        require(any(_allow(own, size) for size in _sizes_to_try(own)), f"{name}: no size keeps all of {texts}")


def _allow(limits: Sequence[Limit], size: int) -> bool:
    return all(limit.allows(size) for limit in limits)


def _sizes_to_try(limits: Sequence[Limit]) -> Iterable[int]:
    """Sizes of which one keeps the limits of one field if any size does."""
    least, step = 1, 1
    for limit in limits:
        if isinstance(limit.value, tuple):
            return limit.value
        least = max(least, limit.value) if limit.relation == ">=" else least
        step = math.lcm(step, limit.value) if limit.relation == "multiple_of" else step
    return (-(-least // step) * step,)


def check_signatures(backend: Backend) -> None:
    """Each hook's annotations are those of its specification, compared as texts; loading compared its arguments."""
    implemented = [hook for hook in HOOKS if vars(backend.module).get(hook) is not None]
    for hook in implemented:
        function = inspect.unwrap(getattr(backend.module, hook))
        specified = getattr(hookspecs, hook).__annotations__
        for name, annotation in function.__annotations__.items():
            require(isinstance(annotation, str), f"{hook}: begin the module with `from __future__ import annotations`")
            is_known = _words(annotation) <= _words(specified[name]) or annotation in ("Any", "object")
            require(is_known, f"{hook}: {name} is annotated {annotation!r}, the hook says {specified[name]!r}")


def _words(annotation: str) -> set[str]:
    return {word.strip().rpartition(".")[2] for word in annotation.split("|")}


def check_foreign_plans(backend: Backend) -> None:
    """Weights are labelled by what they are, not by what a plan asks for; select hooks answer with a candidate."""
    _check_selection(backend)
    runner = next((part for part in backend.own_parts if isinstance(part, DeclaredRunner)), None)
    pair = next((pair for pair in backend.pairs if pair.runner == runner), None)
    if runner is None or pair is None:
        return
    bench = Bench(backend, cells_of(pair)[0])
    foreign = DeclaredRunner("someone_else", attrs.evolve(runner.spec, name="other", weight_layout="other_layout"))
    route = attrs.evolve(bench.plan.routes[0], runner=foreign)
    plan = attrs.evolve(bench.plan, routes=(route,), weight_layout="other_layout")
    try:
        prepared = _call(backend, "process_weights_after_loading", plan=plan, weights=bench.raw(), out=None)
    except (MoeCoreError, ValueError, KeyError, TypeError, RuntimeError):
        return
    label = prepared.layout if isinstance(prepared, PreparedWeights) else None
    advice = "write the tag of the layout that was made, so that a plan for another one is noticed"
    require(label != "other_layout", f"weights are labelled {label!r} because a plan says so; {advice}")


def _check_selection(backend: Backend) -> None:
    asked_hooks = [hook for hook in SELECT_HOOKS if vars(backend.module).get(hook) is not None]
    if not asked_hooks:
        return
    pairs = tuple(Backend(HELPER, environment=backend.environment, device=backend.device).pairs)
    pair: Candidate = pairs[0]
    request = cells_of(pair)[0].request(cells_of(pair)[0].base_sizes())
    tokens = pair.runner.spec.reads
    asked: dict[str, dict[str, Any]] = {
        "select_dispatcher": {"request": request, "candidates": pairs},
        "select_output_dtype": {
            "request": request,
            "dispatcher": pair.dispatcher.spec if pair.dispatcher else None,
            "runner": pair.runner.spec,
            "candidates": tokens,
        },
    }
    for hook in asked_hooks:
        answer = _call(backend, hook, **asked[hook])
        known = answer is None or answer in asked[hook]["candidates"]
        require(known, f"{hook} answers {answer}, which is none of the candidates that it was asked about")


def _call(backend: Backend, hook: str, **arguments: Any) -> Any:
    function = getattr(backend.module, hook)
    return function(*(arguments[name] for name in argument_names(function)))
