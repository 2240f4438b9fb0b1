"""Tiny random instances of every experts class that the installed transformers can dispatch.

The classes are found by reading the modeling sources for `@use_experts_implementation`, so a newer transformers brings
its newer classes. Instances start with the `eager` implementation; to switch, set `config._experts_implementation` on
an experts module, or call `set_experts_implementation` on a model.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tests.integrations.hf_tiny_config import tiny_config

_DECORATOR = "use_experts_implementation"

# By experts class: further arguments of its constructor.
_EXPERTS_ARGUMENTS: dict[str, dict[str, Any]] = {"Ernie4_5_VLMoeMoeExperts": {"intermediate_size": 24}}


@attrs.frozen(kw_only=True)
class DecoratedClass:
    """An experts class found in the sources; nothing is imported before a build or one of the class properties."""

    name: str
    module_name: str
    config_reads: frozenset[str]  # attributes of the configuration that its constructor reads

    @property
    def experts_class(self) -> type[torch.nn.Module]:
        found: type[torch.nn.Module] = getattr(importlib.import_module(self.module_name), self.name)
        return found

    @property
    def config_class(self) -> type[PreTrainedConfig]:
        """The configuration that has every attribute read; of several, the one named most like the experts class.

        Annotations are no guide: some name the composite configuration that only contains the right one.
        """
        found = [c for c in _own_classes(self.module_name, PreTrainedConfig) if self.config_reads <= _readable(c)]
        best: type[PreTrainedConfig] = min(
            found, key=lambda c: (-_common_prefix(c.__name__, self.name), len(c.__name__))
        )
        return best

    @property
    def model_classes(self) -> list[type[PreTrainedModel]]:
        """Models over that very configuration: causal language models first, then bare models, then other heads."""
        models = [m for m in _own_classes(self.module_name, PreTrainedModel) if m.config_class is self.config_class]
        concrete = [m for m in models if not m.__name__.endswith("PreTrainedModel")]
        return sorted(concrete, key=lambda m: (not m.__name__.endswith("ForCausalLM"), "For" in m.__name__))

    def build_config(self) -> PreTrainedConfig:
        """A tiny configuration that selects the `eager` experts."""
        config = tiny_config(self.config_class)
        config._experts_implementation = "eager"
        return config

    def build_experts(self, dtype: torch.dtype, seed: int) -> torch.nn.Module:
        """The experts module alone, with random weights of `dtype`; `.config` is its own."""
        module = self.experts_class(self.build_config(), **_EXPERTS_ARGUMENTS.get(self.name, {}))
        randomize_(module, torch.Generator().manual_seed(seed))
        return module.to(dtype).eval()

    def build_model(self, seed: int) -> PreTrainedModel | None:
        """The tiny fp32 model around the experts, or None if no model class over this configuration holds them."""
        for model_class in self.model_classes:
            torch.manual_seed(seed)
            model = model_class(self.build_config()).eval()
            if modules := self.experts_in(model):
                generator = torch.Generator().manual_seed(seed)
                for module in modules.values():
                    randomize_(module, generator)
                return model
        return None

    def experts_in(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The experts modules of this class in a model, by their name there."""
        return {name: module for name, module in model.named_modules() if isinstance(module, self.experts_class)}


@functools.cache
def decorated_classes() -> tuple[DecoratedClass, ...]:
    """Every class in transformers' modeling files that carries the decorator of the general experts registry."""
    found = (_decorated_in(path) for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")))
    return tuple(entry for entries in found for entry in entries)


def randomize_(experts: Any, generator: torch.Generator) -> None:
    """Fill the parameters in place: nothing is zero, no two rows are alike, clamped gates do clamp.

    The first projection's outputs get a deviation of 4 for unit inputs, so that limits of 7 and 10 are reached.
    """
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            if parameter.dim() == 3:
                fan_in = parameter.shape[1 if experts.is_transposed else 2]
                gain = 1.0 if name == "down_proj" else 4.0
                parameter.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)
            elif name.endswith("_bias"):
                parameter.normal_(generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)


class Routed(NamedTuple):
    """What a router hands to experts: `[T, H]`, int64 `[T, K]` distinct per token, and `[T, K]` that adds up to 1."""

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor


def routed_tokens(
    experts: Any, num_tokens: int, seed: int, weights_dtype: torch.dtype = torch.float32, top_k: int = 2
) -> Routed:
    """Random tokens of the module's dtype and width, each sent to `top_k` of its experts."""
    generator = torch.Generator().manual_seed(seed)
    # Read off the weights: the attribute `hidden_dim` is the model's width even where experts work on fewer columns.
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    hidden_states = torch.randn(num_tokens, width, generator=generator).to(experts.down_proj.dtype)
    scores, index = torch.rand(num_tokens, experts.num_experts, generator=generator).topk(top_k, dim=-1)
    return Routed(hidden_states, index, (scores / scores.sum(-1, keepdim=True)).to(weights_dtype))


@torch.no_grad()
def run_two_steps(model: PreTrainedModel, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill all tokens but the last, then decode the last one from the cache; returns logits, or hidden states.

    A model without a cache (an encoder) sees the last token alone.
    """
    prefill = model(**_model_input(model, input_ids[:, :-1]), use_cache=True)
    # Recent versions answer with both names and warn when both, or the old one, are given.
    name = "cache" if "cache" in prefill else "past_key_values"
    cache = {name: prefill[name]} if name in prefill else {}
    decode = model(**_model_input(model, input_ids[:, -1:]), use_cache=True, **cache)
    return prefill[0], decode[0]


def _model_input(model: PreTrainedModel, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    if hasattr(model, "codec_embedding"):  # a speech decoder that embeds nothing by itself
        return {"inputs_embeds": model.codec_embedding(input_ids)}
    return {"input_ids": input_ids}


def _decorated_in(path: Path) -> list[DecoratedClass]:
    source = path.read_text(encoding="utf-8")
    if f"@{_DECORATOR}" not in source:
        return []
    module_name = f"transformers.models.{path.parent.name}.{path.stem}"
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return [
        DecoratedClass(name=node.name, module_name=module_name, config_reads=_config_reads(node))
        for node in classes
        if any(_is_general_decorator(decorator) for decorator in node.decorator_list)
    ]


def _is_general_decorator(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return ast.unparse(node) == _DECORATOR
    # Another `experts_interface` is another registry, such as the one of the FP8 experts.
    return ast.unparse(node.func) == _DECORATOR and all(word.arg != "experts_interface" for word in node.keywords)


def _config_reads(node: ast.ClassDef) -> frozenset[str]:
    init = next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
    attributes = (item for item in ast.walk(init) if isinstance(item, ast.Attribute))
    return frozenset(item.attr for item in attributes if ast.unparse(item.value) == "config")


def _own_classes(module_name: str, base: type) -> list[Any]:
    """Subclasses of `base` in the namespace of a modeling module, `base` itself and other models' classes left out."""
    package = module_name.rpartition(".")[0]
    members = vars(importlib.import_module(module_name)).values()
    classes = {member for member in members if isinstance(member, type) and issubclass(member, base)}
    return sorted((c for c in classes if c.__module__.startswith(f"{package}.")), key=lambda c: c.__name__)


def _readable(config_class: type[PreTrainedConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)


def _common_prefix(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
