"""What transformers says about loading, as errors of this project: its exceptions, and what it only warns of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_core.errors import MoeCoreError, UnsupportedModelError, WeightsError
from moe_core.expert_names import expert_name
from moe_core.integrations.transformers.layer_stack import LayerStack
from moe_core.integrations.transformers.traits import is_experts
from moe_core.payloads import TORCH_DTYPES

_Answer = TypeVar("_Answer")
#: What a parameter of floats may be stored in; other floats have scales beside them.
_FLOATS = (torch.float64, *TORCH_DTYPES.values())


def call_transformers(path: Path, function: Callable[[], _Answer]) -> _Answer:
    """What transformers answers about the model in `path`.

    Raises:
        UnsupportedModelError: It raised something else than an error of this project, which is the cause.
    """
    try:
        return function()
    except MoeCoreError:
        raise
    # The libraries below transformers have exceptions of their own, with no base in common.
    except Exception as error:
        raise UnsupportedModelError(f"model {path} cannot be loaded: {type(error).__name__}: {error}") from error


def require_whole_experts(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `WeightsError` for experts that transformers could not stack, or would stack as other experts.

    It stacks experts that are stored one by one in the order of their numbers, whatever these are.

    Args:
        path: Where the checkpoint lies.
        shapes: Name and shape of each tensor that is loaded.
    """
    stacks: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in shapes:
        parts = expert_name(name)
        if parts is not None and parts.expert is not None:
            stacks.setdefault((parts.module, parts.projection, parts.rest), {})[parts.expert] = name
    counts: dict[str, int] = {}
    for (module, _, _), experts in stacks.items():
        counts[module] = max(counts.get(module, 0), 1 + max(experts))
    problems = []
    for (module, projection, rest), experts in stacks.items():
        end = f"{projection}.{rest}" if rest else projection
        absent = sorted(set(range(counts[module])) - set(experts))
        problems += [f"{module}.{number}.{end}: missing" for number in absent]
        expected = shapes[experts[min(experts)]]
        problems += [
            f"{name}: has shape {list(shapes[name])}, that of expert {min(experts)} is {list(expected)}"
            for name in experts.values()
            if shapes[name] != expected
        ]
    _refuse(f"{path}: experts are not complete", problems)


def require_loaded(
    path: Path, model: torch.nn.Module, info: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Raise `WeightsError` unless every parameter of a model of floats was read, and everything stored has its place.

    Left in the file may be draft layers that the configuration declares, and what the model's class ignores.

    Args:
        path: Where the checkpoint lies.
        model: What was loaded.
        info: What transformers says about it (`output_loading_info`).
        dtypes: Name and stored dtype of each tensor.
    """
    stack = LayerStack.of(model.config, [name for name, module in model.named_modules() if is_experts(module)])
    problems = [f"{name}: missing" for name in sorted(info["missing_keys"])]
    unknown = sorted(name for name in info["unexpected_keys"] if not stack.is_of_draft(name))
    problems += [f"{name}: unknown to the model" for name in unknown]
    for name, found, expected in sorted(info["mismatched_keys"]):
        problems.append(f"{name}: has shape {list(found)}, the model {list(expected)}")
    for name in _codes(model, dtypes):
        if not stack.is_of_draft(name):
            dtype = str(dtypes[name]).removeprefix("torch.")
            problems.append(
                f"{name}: holds {dtype}, the model floats; if it is quantized, the configuration must say how"
            )
    _refuse(f"{path}: tensors do not fit {type(model).__name__}", problems)


def _codes(model: torch.nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[str]:
    """Names of what is stored in other numbers than floats, except tables of integers that the model has as such."""
    state = chain(model.named_parameters(), model.named_buffers())
    # The last part alone: transformers renames on the way.
    tables = {name.rpartition(".")[2] for name, tensor in state if not tensor.is_floating_point()}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for name in sorted(name for name, dtype in dtypes.items() if dtype not in _FLOATS):
        if name.rpartition(".")[2] not in tables and not any(pattern.search(name) for pattern in ignored):
            yield name


def _refuse(title: str, problems: list[str]) -> None:
    if problems:
        raise WeightsError.listing(f"{title}; nothing was loaded:", problems)
