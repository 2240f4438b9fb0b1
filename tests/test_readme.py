"""The README's programs run as they stand there."""

from __future__ import annotations

import re
import types
from pathlib import Path

import torch
from layers import exact, random_tensors, random_tokens, torch_manager
from reference_moe import rel

from moe_core import Environment, LayerRequest, MoELayer, RawWeights
from moe_core.testing import Kit
from moe_core.vocabulary import FORMATS, PHASES, TIERS, TOKEN_PLACEMENTS

README = Path(__file__).parents[1] / "README.md"


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
