"""The README's programs run as they stand there."""

from __future__ import annotations

import re
import shlex
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from layers import exact, random_tensors, random_tokens, torch_manager
from reference_moe import rel

from moe_core import Environment, LayerRequest, MoELayer, RawWeights
from moe_core.cli import main
from moe_core.cli.app import app
from moe_core.testing import Kit
from moe_core.vocabulary import FORMATS, PHASES, TIERS, TOKEN_PLACEMENTS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("plugins/*/README.md")))
COMMANDS = typer.main.get_group(app).commands


def _program(containing: str) -> str:
    programs = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (found,) = (program for program in programs if containing in program)
    return str(found)


def test_one_layer() -> None:
    names: dict[str, object] = {}
    exec(_program("topk_ids = torch.tensor").replace("MoELayer(request)", 'MoELayer(request, device="cpu")'), names)
    output = names["output"]
    assert isinstance(output, torch.Tensor)
    assert output.shape == (4, 256)


def test_the_plugin() -> None:
    plugin = types.ModuleType("my_backend")
    exec(_program("my_backend/plugin.py"), plugin.__dict__)
    manager = torch_manager()
    manager.register("my_backend", plugin)
    request = LayerRequest(
        num_experts=5, top_k=2, hidden_size=32, intermediate_size=24, runner_backend="my_backend:my_runner"
    )
    environment = Environment(device_type="cpu", packages={"torch": torch.__version__})
    layer = MoELayer(request, environment=environment, manager=manager)
    tensors, tokens = random_tensors(request), random_tokens(request, 9)
    for _ in ("load", "reload"):
        layer.load_weights(RawWeights(tensors=tensors))
        # Every GEMM's result and the product of gate and up are rounded to bf16.
        assert rel(layer(*tokens).double(), exact(request, tensors, tokens)) < 2e-2


def test_the_plugin_passes_the_conformance_kit() -> None:
    plugin = types.ModuleType("my_backend")
    exec(_program("my_backend/plugin.py"), plugin.__dict__)
    results = [case.run() for case in Kit(plugin, device="cpu").cases()]
    # A module without a file cannot be imported by another process.
    assert [result for result in results if result.status != "passed" and result.check != "import"] == []


def test_every_word_that_the_commands_print_is_explained() -> None:
    words = README.read_text(encoding="utf-8").partition("## Words")[2].partition("\n## ")[0]
    terms = ("plugin", "variant", "spec", "pair", "combination", "scheme", "reason", "near miss", "workload", "phase")
    terms += ("plan", "route", "graph", "dispatch dtype", "weight layout", "canonical", "rank", "pin", "prefer")
    terms += ("policy", "measured", "tier", "draft layer", "cell", "floor")
    terms += (" T ", "top-", " H ", " I ", "**ep**", "**tp**")
    known = (*terms, *FORMATS, *PHASES, *TIERS, *TOKEN_PLACEMENTS)
    assert [term for term in known if term.lower() not in words.lower()] == []


def _commands(page: Path) -> list[list[str]]:
    """Words after `moe-core` of every command in the page's blocks; a line that ends in a backslash goes on."""
    blocks = re.findall(r"^```(\w*).*?\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(text for language, text in blocks if not language).replace("\\\n", " ").splitlines()
    typed = (re.fullmatch(r"(?:\w+=\S+ )*moe-core (.*)", line) for line in lines)
    return [shlex.split(found[1], comments=True) for found in typed if found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_typed_as_they_are_understood(page: Path) -> None:
    for name, *words in _commands(page):
        params = COMMANDS[name].params
        options: dict[str, Any] = {word: param for param in params for word in param.opts if word.startswith("-")}
        left = iter(words)
        for word in left:
            if word.startswith("-"):
                assert word in options, (name, words)
                if not options[word].is_flag:
                    assert not next(left).startswith("-"), (name, words)
            else:
                assert any(param.param_type_name == "argument" for param in params), (name, words)


def test_commands_are_found() -> None:
    assert {name for name, *_ in _commands(README)} == set(COMMANDS)


def test_the_shown_plan_is_what_the_model_gets(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"```text\n(plan of layers.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    with pytest.raises(SystemExit):
        main(["resolve", "--environment", "cpu", "--model", str(ROOT / "examples" / "tiny_moe"), "--no-measurements"])
    assert capsys.readouterr().out.endswith(f"\n{shown}")
