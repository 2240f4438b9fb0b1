"""Run a model over a text and record the largest magnitudes of its experts' inputs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch

from moe_core.errors import UnsupportedModelError, WeightsError
from moe_core.expert_names import layer_index
from moe_core.integrations.transformers.layout import read_layout
from moe_core.integrations.transformers.traits import is_experts, local_parameters
from moe_core.payloads import Tensor
from moe_core.quantizer.input_amax import ExpertInputs, ModelInputs


@torch.inference_mode()
def calibrate(
    model: Any,
    windows: Iterable[Tensor],
    *,
    default: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> ModelInputs:
    """The largest magnitudes in front of both projections of every expert of a transformers model.

    Args:
        model: A causal language model with eager experts, whole on one device.
        windows: Token ids `[1, S]` to run it over.
        default: See `ModelInputs.default`.
        progress: Called after every window with how many are done.

    Raises:
        UnsupportedModelError: It has no experts modules, or one that is not understood.
        WeightsError: An input was infinite or NaN.
    """
    recorders: dict[int, _Recorder] = {}
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if is_experts(module):
                layer = layer_index(name)
                if layer is None or layer in recorders:
                    raise UnsupportedModelError(f"experts module {name}: expected one per numbered layer")
                recorders[layer] = hooks.enter_context(_Recorder(module, name))
        if not recorders:
            raise UnsupportedModelError(f"{type(model).__name__} has no experts modules of transformers to calibrate")
        for done, window in enumerate(windows, start=1):
            model(input_ids=window.to(model.device), use_cache=False)
            if progress is not None:
                progress(done)
    return ModelInputs(layers={layer: recorder.result() for layer, recorder in recorders.items()}, default=default)


class _Recorder:
    """Watches one experts module until the block ends."""

    def __init__(self, module: Any, name: str) -> None:
        self._flags = read_layout(module).flags
        self._name = name
        # `read_layout` has checked that it takes hidden states, ids and weights.
        self._signature = inspect.signature(type(module).forward)
        self._first = torch.zeros(module.num_experts)
        self._second = torch.zeros(module.num_experts)
        self._hook = module.register_forward_pre_hook(self._watch, with_kwargs=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def result(self) -> ExpertInputs:
        found = ExpertInputs(first=tuple(self._first.tolist()), second=tuple(self._second.tolist()))
        if not all(value < float("inf") for value in (*found.first, *found.second)):
            raise WeightsError(f"{self._name}: inputs of its experts were infinite or NaN in calibration")
        return found

    def _watch(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = self._signature.bind(module, *arguments, **keywords).args
        hidden_states, ids = given[1], given[2]
        for expert in ids.unique().tolist():
            if 0 <= expert < module.num_experts:
                rows = hidden_states[(ids == expert).any(-1)]
                self._first[expert] = torch.maximum(self._first[expert], rows.abs().amax().float().cpu())
                inner = self._inner(module, expert, rows)
                self._second[expert] = torch.maximum(self._second[expert], inner.abs().amax().float().cpu())

    def _inner(self, module: Any, expert: int, rows: Tensor) -> Tensor:
        """What the expert's down projection sees."""
        parameters, first = local_parameters(module), self._flags.first_name
        weight = parameters[first][expert]
        outputs = rows @ (weight if self._flags.is_transposed else weight.T)
        if self._flags.has_bias:
            outputs = outputs + parameters[f"{first}_bias"][expert]
        return getattr(module, self._flags.gate_name)(outputs)  # type: ignore[no-any-return]
