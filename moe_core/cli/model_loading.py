"""Load a Hugging Face model from disk and let moe-core run its experts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from moe_core.cli.progress import progress_bar, stage
from moe_core.errors import MoeCoreError, UnsupportedModelError
from moe_core.integrations.transformers import NAME, LoadedModel, PreparedExperts, prepare, register
from moe_core.integrations.transformers import load_model as load_with_quantized_experts
from moe_core.integrations.transformers.arguments import float_dtype, reachable_device
from moe_core.integrations.transformers.layout import read_layout
from moe_core.integrations.transformers.loading_checks import call_transformers, require_loaded, require_whole_experts
from moe_core.integrations.transformers.model_shell import ModelShell
from moe_core.integrations.transformers.prepared import Preparer
from moe_core.integrations.transformers.traits import configured_top_k, is_experts
from moe_core.manager import default_manager
from moe_core.model_config import quantization_of, read_config
from moe_core.payloads import TORCH_DTYPES
from moe_core.weights.checkpoint import SINGLE_FILE, Checkpoint


def require_transformers() -> Any:
    """The transformers module, quiet; raises `MoeCoreError` with what to install if it is missing."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MoeCoreError(
            f"models are loaded with transformers, which cannot be imported here ({error}); "
            "install it: pip install 'moe-core[transformers]'"
        ) from error
    # This command shows its own progress.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def read_text_config(folder: Path) -> Any:
    """Transformers' configuration of the text part of the model in `folder`; no weights are read.

    Raises:
        UnsupportedModelError: transformers does not know it.
    """
    transformers = require_transformers()
    return call_transformers(
        folder, lambda: transformers.AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    )


def is_quantized(folder: Path) -> bool:
    """Whether the configuration of the model in `folder` says that its weights are."""
    return quantization_of(read_config(folder)) is not None


def load_served(
    folder: Path,
    dtype: str | None,
    device: str | None,
    a2a_backend: str | None,
    runner_backend: str | None,
    *,
    title: str = "loading",
    before_preparing: Callable[[Any], None] | None = None,
) -> LoadedModel:
    """The model in `folder`, quantized or not, its experts served by moe-core; says on stderr how long each step took.

    Args:
        folder: As of `load_model`.
        dtype: As of `load_model`; quantized experts stay as they are.
        device: As of `load_model`.
        a2a_backend: Pin of the dispatcher.
        runner_backend: Pin of the runner.
        title: What the loading is called.
        before_preparing: Called with an unquantized model while its experts are still eager; a layout of the runner's
            own may then take the place of the weights that eager reads.

    Raises:
        MoeCoreError: What `load_model`, `prepare_experts` and the loading of quantized models raise.
    """
    if is_quantized(folder):
        with progress_bar(title) as progress:
            return load_quantized(folder, dtype, device, a2a_backend, runner_backend, progress)
    if a2a_backend is not None or runner_backend is not None:
        refuse_pins(folder, dtype, device, a2a_backend, runner_backend)
    with stage(title):
        network = load_model(folder, dtype, device)
    if before_preparing is not None:
        before_preparing(network)
    with stage("preparing experts"):
        return LoadedModel(model=network, experts=prepare_experts(network, a2a_backend, runner_backend))


def load_model(folder: Path, dtype: str | None, device: str | None) -> Any:
    """The causal language model in `folder`, with eager experts, ready for inference.

    Args:
        folder: Where its `config.json` and weights lie; nothing is downloaded.
        dtype: `fp32`, `bf16` or `fp16`; None for the checkpoint's own.
        device: Device type; None for this machine's accelerator, else the CPU.

    Raises:
        UnsupportedModelError: transformers cannot load it.
        WeightsError: No safetensors, or they cannot be read, or a list of every tensor that is missing, unknown to the
            model, misshapen or not of floats.
        SpecError: This torch cannot reach such a device.
    """
    transformers = require_transformers()
    target = find_device(device)
    # Where both are, transformers takes the single file.
    single = folder / SINGLE_FILE
    with Checkpoint(single if single.is_file() else folder) as checkpoint:
        require_whole_experts(folder, {name: checkpoint.shape(name) for name in checkpoint.names})
        dtypes = {name: checkpoint.dtype(name) for name in checkpoint.names}
    model, info = call_transformers(
        folder,
        lambda: transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto" if dtype is None else float_dtype(dtype),
            local_files_only=True,
            experts_implementation="eager",
            # They are errors all the same, with those that transformers only warns of.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        ),
    )
    require_loaded(folder, model, info, dtypes)
    return model.to(target).eval()


def load_quantized(
    folder: Path,
    dtype: str | None,
    device: str | None,
    a2a_backend: str | None,
    runner_backend: str | None,
    progress: Callable[[int, int], None],
) -> LoadedModel:
    """The model of a quantized checkpoint, its experts served by moe-core; arguments and errors as `load_model`.

    Args:
        folder: As above.
        dtype: As above.
        device: As above.
        a2a_backend: Pin of the dispatcher.
        runner_backend: Pin of the runner.
        progress: Called with (bytes read, bytes to read).
    """
    require_transformers()
    return load_with_quantized_experts(
        folder,
        dtype=dtype,
        device=find_device(device),
        a2a_backend=a2a_backend,
        runner_backend=runner_backend,
        progress=progress,
    )


def refuse_pins(
    folder: Path, dtype: str | None, device: str | None, a2a_backend: str | None, runner_backend: str | None
) -> None:
    """Raise now what preparing the experts would say about pins once the weights are loaded; arguments as above.

    Raises:
        ResolutionError: A pin does not fit one of the model's layers.
        UnsupportedModelError: transformers does not know the model, or its experts have a trait that is not understood.
    """
    require_transformers()
    register()
    target, shell = find_device(device), ModelShell(folder)
    word = dtype or shell.configured_dtype
    if word is None:
        # The weights tell.
        return
    preparer = Preparer(manager=default_manager(), a2a_backend=a2a_backend, runner_backend=runner_backend)
    for module in shell.sketch().to(TORCH_DTYPES[word]).modules():
        if is_experts(module):
            layout = attrs.evolve(read_layout(module, with_data=False), device_type=target.type)
            preparer.plan(layout, configured_top_k(module), keeps_weights=True)


def find_device(device: str | None) -> torch.device:
    """The device of that type; for None this machine's accelerator, else the CPU."""
    if device is not None:
        return reachable_device(device)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def prepare_experts(model: Any, a2a_backend: str | None, runner_backend: str | None) -> dict[str, PreparedExperts]:
    """Switch a model's experts to moe-core.

    Returns:
        Name of each experts module -> what serves it.

    Raises:
        UnsupportedModelError: The model has no experts that can be switched.
        ResolutionError: Nothing fits one of its layers, or a pin does not.
    """
    register()
    try:
        model.set_experts_implementation(NAME)
    except ValueError as error:
        raise UnsupportedModelError(f"{type(model).__name__}: its experts cannot be switched: {error}") from error
    return prepare(model, runner_backend=runner_backend, a2a_backend=a2a_backend)
