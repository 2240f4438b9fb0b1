"""Quantized checkpoints as transformers models whose experts moe-core runs, whatever transformers itself can read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from moe_core.environment import Environment
from moe_core.integrations.transformers.arguments import float_dtype, reachable_device
from moe_core.integrations.transformers.bridge import prepare_modules
from moe_core.integrations.transformers.dense import read_dense
from moe_core.integrations.transformers.layer_stack import LayerStack
from moe_core.integrations.transformers.loading_progress import LoadingProgress
from moe_core.integrations.transformers.model_shell import ModelShell
from moe_core.integrations.transformers.prepared import PreparedExperts, Preparer
from moe_core.integrations.transformers.quantized_experts import QuantizedExperts
from moe_core.integrations.transformers.registry import register
from moe_core.integrations.transformers.stored_experts import StoredExperts, dense_names, find_stored_experts
from moe_core.manager import BackendManager, default_manager
from moe_core.measurements import MeasurementTable
from moe_core.model_config import quantization_of, read_config
from moe_core.weights.checkpoint import Checkpoint
from moe_core.weights.loading import load_experts
from moe_core.weights.names import experts_modules


@attrs.frozen(eq=False, kw_only=True)
class LoadedModel:
    """A model that was loaded, and what serves its experts.

    Attributes:
        model: The transformers model, in inference mode.
        experts: Name of each experts module -> what serves it.
    """

    model: Any
    experts: dict[str, PreparedExperts]

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; the model itself counts those without quantized experts."""
        return int(self.model.num_parameters()) + sum(experts.num_weights for experts in self._quantized)

    @property
    def is_quantized(self) -> bool:
        """Whether any experts are, so that eager cannot compute them."""
        return bool(self._quantized)

    @property
    def _quantized(self) -> list[QuantizedExperts]:
        return [module for module in self.model.modules() if isinstance(module, QuantizedExperts)]


def load_model(
    path: str | Path,
    *,
    dtype: str | None = None,
    device: str | torch.device = "cpu",
    environment: Environment | None = None,
    runner_backend: str | None = None,
    a2a_backend: str | None = None,
    manager: BackendManager | None = None,
    measurements: MeasurementTable | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load a causal language model with quantized experts from its folder; nothing is downloaded.

    The experts go from the file into the layout of the chosen runner; they never exist as floats. Everything else
    becomes the model's own parameters: matrices that are stored quantized are dequantized to the model's dtype. Experts
    of layers that are not quantized are loaded as transformers does. Which combination runs is decided, and refused,
    before anything is read.

    Args:
        path: The folder: `config.json` and safetensors.
        dtype: `fp32`, `bf16` or `fp16`; default: the configuration's.
        device: Where the model will lie; it cannot be moved later.
        environment: The machine; default: this one, probed, as seen from `device`.
        runner_backend: Pin of the runner.
        a2a_backend: Pin of the dispatcher.
        manager: The plugins; default: the installed ones.
        measurements: Measured times that rank the candidates; default: the user's and the shipped ones; an empty table
            leaves them out.
        progress: Called with (bytes dealt with, bytes in all).

    Raises:
        UnknownNameError: No such dtype.
        SpecError: There is no such device, the configuration is missing, or its quantization is not understood.
        UnsupportedModelError: transformers does not know the model, or its experts have a trait that is not understood.
        ResolutionError: No combination fits a layer, or a pin does not.
        WeightsError: Lists every tensor that is missing, unknown, misshapen or stored in a way that is not understood,
            or that is of a layer past those that the configuration declares.
    """
    register()
    path, device = Path(path), reachable_device(device)
    if dtype is not None:
        float_dtype(dtype)
    quantization = quantization_of(read_config(path))
    shell = ModelShell(path)
    dtype = dtype or shell.dtype
    preparer = Preparer(
        manager=manager or default_manager(),
        environment=environment,
        runner_backend=runner_backend,
        a2a_backend=a2a_backend,
        measurements=measurements,
    )
    with Checkpoint(path) as checkpoint:
        stack = LayerStack.of(shell.config, experts_modules(checkpoint.names))
        stack.require_declared(path, checkpoint.names)
        modules = find_stored_experts(shell.sketch(), checkpoint.names, quantization, dtype, device)
        for module in modules:
            preparer.plan(module.layout, module.top_k)
        dense = dense_names(checkpoint.names, modules, stack)
        report = LoadingProgress(checkpoint, dense, modules, progress)
        model = shell.build(
            dtype,
            read_dense(checkpoint, dense, quantization, dtype, report.advance),
            partial(_replace_experts, modules=modules, preparer=preparer),
        )
        report.finish_dense()
        model = model.to(device).eval()
        for module in modules:
            _fill(model.get_submodule(module.name), checkpoint, module, device, report)
    loaded = {module.name: model.get_submodule(module.name).prepared for module in modules}
    return LoadedModel(model=model, experts=loaded | prepare_modules(model, preparer, may_be_none=bool(modules)))


def _replace_experts(model: torch.nn.Module, modules: Iterable[StoredExperts], preparer: Preparer) -> None:
    """Put modules that serve stored weights in the place of a model's own."""
    for module in modules:
        original = model.get_submodule(module.name)
        model.set_submodule(module.name, QuantizedExperts(original, module.layout, preparer, module.top_k))


def _fill(
    served: QuantizedExperts,
    checkpoint: Checkpoint,
    module: StoredExperts,
    device: torch.device,
    report: LoadingProgress,
) -> None:
    """Load the weights of one module."""
    advance = partial(report.advance_experts, module)
    request = served.plan.request
    served.load(load_experts(checkpoint, module.stored_as, request, module.stored, device=device, progress=advance))
    report.finish_experts(module)
