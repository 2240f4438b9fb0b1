"""A transformers model made around experts that it does not hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_core.errors import SpecError, UnsupportedModelError
from moe_core.integrations.transformers.loading_checks import (
    call_transformers,
    require_loaded,
    require_whole_experts,
)
from moe_core.integrations.transformers.traits import DTYPE_NAMES, NAME
from moe_core.payloads import TORCH_DTYPES, Tensor

_GENERATION_FILE = "generation_config.json"
_QUANTIZATION_FIELDS = ("quantization_config", "compression_config")


class ModelShell:
    """The configuration and the class of a checkpoint's causal language model, or of the text part that is one.

    Attributes:
        config: The configuration, without quantization, with moe-core's experts selected.
        model_class: The class.
    """

    config: Any
    model_class: Any

    def __init__(self, path: Path) -> None:
        """Read the configuration.

        Raises:
            UnsupportedModelError: transformers does not know the model, or no causal language model of it.
        """
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

        self._path = path
        self.config = call_transformers(path, lambda: AutoConfig.from_pretrained(path, local_files_only=True))
        if type(self.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            kind = self.config.model_type
            raise UnsupportedModelError(f"model {path}: transformers has no causal language model for {kind!r}")
        self.model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        if self.model_class.config_class is self.config.sub_configs.get("text_config"):
            # Of a model for text and images it is the text part, which loads from the whole one's checkpoint.
            self.config = self.config.get_text_config()
        for part in (self.config, self.config.get_text_config()):
            for field in _QUANTIZATION_FIELDS:
                vars(part).pop(field, None)
        self.config._experts_implementation = NAME

    @property
    def configured_dtype(self) -> str | None:
        """Word of the configured dtype, None if there is none."""
        found = (getattr(part, "dtype", None) for part in (self.config, self.config.get_text_config()))
        return next((DTYPE_NAMES[dtype] for dtype in found if dtype in DTYPE_NAMES), None)

    @property
    def dtype(self) -> str:
        """Word of the configured dtype; raises `SpecError` if there is none."""
        word = self.configured_dtype
        if word is None:
            raise SpecError(
                f"the model configuration names no dtype of {', '.join(TORCH_DTYPES)}; say which one to use"
            )
        return word

    def sketch(self) -> torch.nn.Module:
        """The model without data."""
        with torch.device("meta"):
            model: torch.nn.Module = call_transformers(self._path, lambda: self.model_class(self.config))
        return model

    def build(self, dtype: str, tensors: dict[str, Tensor], replace: Callable[[torch.nn.Module], None]) -> Any:
        """The model with its parameters, loaded as transformers loads them.

        Args:
            dtype: Word of its dtype.
            tensors: Everything outside the replaced modules, by the names of an unquantized checkpoint.
            replace: Puts other modules in the place of some, before anything is allocated.

        Raises:
            UnsupportedModelError: transformers cannot load it.
            WeightsError: Lists every tensor that is missing, unknown to the model, misshapen or not of floats.
        """
        from transformers import GenerationConfig

        require_whole_experts(self._path, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        model_class = self.model_class

        def __init__(model: Any, config: Any, *arguments: Any, **more: Any) -> None:
            model_class.__init__(model, config, *arguments, **more)
            replace(model)

        # transformers allocates every parameter that a model has when its constructor returns.
        fields = {"__init__": __init__, "__module__": model_class.__module__}
        derived: Any = type(model_class.__name__, (model_class,), fields)
        model, info = call_transformers(
            self._path,
            lambda: derived.from_pretrained(
                None,
                config=self.config,
                state_dict=tensors,
                dtype=TORCH_DTYPES[dtype],
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            ),
        )
        require_loaded(self._path, model, info, {name: tensor.dtype for name, tensor in tensors.items()})
        model.__class__ = model_class
        if (self._path / _GENERATION_FILE).is_file():
            # Loaded from tensors, transformers looks for no such file.
            model.generation_config = call_transformers(
                self._path, lambda: GenerationConfig.from_pretrained(self._path, local_files_only=True)
            )
        return model
