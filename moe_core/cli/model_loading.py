"""Load a Hugging Face model from disk and let moe-core run its experts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_core.environment import probe_environment
from moe_core.errors import MoeCoreError, UnsupportedModelError
from moe_core.integrations.transformers import NAME, LoadedModel, PreparedExperts, prepare, register
from moe_core.integrations.transformers import load_model as load_with_quantized_experts
from moe_core.payloads import TORCH_DTYPES


def require_transformers() -> Any:
    """The transformers module, quiet; raises `MoeCoreError` with what to install if it is missing."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MoeCoreError(
            f"moe-core run loads models with transformers, which cannot be imported here ({error}); "
            "install it: pip install 'moe-core[transformers]'"
        ) from error
    # This command shows its own progress.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def load_model(folder: Path, dtype: str | None, device: str | None) -> Any:
    """The causal language model in `folder`, with eager experts, ready for inference.

    Args:
        folder: Where its `config.json` and weights lie; nothing is downloaded.
        dtype: `fp32`, `bf16` or `fp16`; None for the checkpoint's own.
        device: Device type; None for this machine's accelerator, else the CPU.

    Raises:
        UnsupportedModelError: transformers cannot load it, or cannot switch its experts.
    """
    transformers = require_transformers()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=TORCH_DTYPES[dtype] if dtype else "auto",
            local_files_only=True,
            experts_implementation="eager",
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UnsupportedModelError(f"model {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    return model.to(_device(device)).eval()


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
        device=_device(device),
        a2a_backend=a2a_backend,
        runner_backend=runner_backend,
        progress=progress,
    )


def _device(device: str | None) -> torch.device:
    if device is not None:
        return torch.device(probe_environment(device_type=device).device_type)
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
