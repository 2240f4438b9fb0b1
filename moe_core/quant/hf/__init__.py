"""The quantization configurations of Hugging Face checkpoints, one module per ecosystem.

A reader answers for one `Weight`; this file finds the reader and puts the answers together. What a reader does not
understand is an error (`SpecError`): a scheme that is nearly right computes fluent nonsense.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from moe_core.errors import SpecError
from moe_core.quant.hf.auto_round import read_auto_round
from moe_core.quant.hf.compressed_tensors import read_compressed_tensors
from moe_core.quant.hf.fields import text
from moe_core.quant.hf.fp8 import read_fp8, read_mxfp8
from moe_core.quant.hf.gptq_awq import read_awq, read_gptq
from moe_core.quant.hf.modelopt import read_modelopt
from moe_core.quant.hf.modelslim import is_description, read_modelslim
from moe_core.quant.hf.mxfp4 import read_mxfp4
from moe_core.quant.hf.quark import read_quark
from moe_core.quant.hf.weight import UnreadableNameError, Weight, experts_and_halves
from moe_core.quant.stored import StoredLayer, StoredScheme

Reader = Callable[[Mapping[str, Any], Weight], StoredScheme]

#: `quant_method` -> who reads it.
READERS: dict[str, Reader] = {
    "auto-round": read_auto_round,
    "auto_round": read_auto_round,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "intel/auto-round": read_auto_round,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "modelopt_fp8": read_modelopt,
    "modelopt_mixed": read_modelopt,
    "modelslim": read_modelslim,
    "mxfp4": read_mxfp4,
    "mxfp8": read_mxfp8,
    "quark": read_quark,
}


def read_layer(
    config: Mapping[str, Any] | None,
    experts_module: str,
    dtype: str = "bf16",
    *,
    gated: bool = True,
    num_experts: int | None = None,
) -> StoredLayer:
    """What both projections of an experts module are stored as.

    Args:
        config: The `quantization_config` of `config.json`, the content of `hf_quant_config.json` or of
            `quant_model_description.json`, or None.
        experts_module: Dotted name of the experts module, as the checkpoint's tensors have it.
        dtype: Layer dtype, which unquantized weights have.
        gated: Whether `w13` has a gate.
        num_experts: How many experts the layer has; without it, a list that names them one by one is an error.

    Raises:
        SpecError: As `QuantScheme.from_hf`, or gate and up differ, which share one GEMM.
    """
    if experts_and_halves(experts_module)[0] != experts_module:
        raise SpecError(f"read_layer: {experts_module!r} is a projection, expected the experts module above it")
    w13 = ("gate", "up") if gated else ("up",)
    first, second = (_agreed(config, experts_module, halves, dtype, num_experts) for halves in (w13, ("down",)))
    return StoredLayer(first, second)


def read_scheme(config: Mapping[str, Any] | None, module_name: str, dtype: str) -> StoredScheme:
    """What one projection is stored as, or a module whose projections are alike; else as `QuantScheme.from_hf`."""
    experts, halves = experts_and_halves(module_name)
    return _agreed(config, experts, halves, dtype)


def _agreed(
    config: Mapping[str, Any] | None,
    experts: str,
    halves: tuple[str, ...],
    dtype: str,
    num_experts: int | None = None,
) -> StoredScheme:
    weights = [Weight(experts, half, dtype, num_experts) for half in halves]
    found = {str(weight): _read(config, weight) for weight in weights}
    first = found[str(weights[0])]
    if any(stored != first for stored in found.values()):
        listed = ", ".join(f"{name} is {stored.scheme} as {stored.storage}" for name, stored in found.items())
        raise SpecError(
            f"quantization_config: {listed}; gate and up share one scheme, ask for w13 and w2 one by one (read_layer), "
            "and for a layer without gate with gated=False"
        )
    return first


def _read(config: Mapping[str, Any] | None, weight: Weight) -> StoredScheme:
    if config is None:
        return weight.unquantized()
    if not isinstance(config, Mapping):
        raise weight.error(f"expected fields with values or None, got {config!r}")
    if not config:
        return weight.unquantized()
    method = text(config, "quant_method", weight) or _method_by_content(config)
    if method not in READERS:
        raise weight.error(
            f"quant_method {method!r} is not read{_meant(method or '')}; known: {', '.join(READERS)}. "
            "Give the scheme as a value (QuantScheme) instead"
        )
    try:
        return READERS[method](config, weight)
    except UnreadableNameError as error:
        raise weight.error(str(error)) from error


def _meant(method: str) -> str:
    """`; did you mean 'gptq'?` for a known method in other letters by one at most, or in another order, else "".

    A letter in another's place may be another method (`vptq`, `mxfp6`), and advice to change it would change numbers.
    """
    written = _letters(method)
    for known, letters in ((known, _letters(known)) for known in READERS):
        if (written - letters).total() + (letters - written).total() <= 1:
            return f"; did you mean {known!r}?"
    return ""


def _letters(method: str) -> Counter[str]:
    return Counter(filter(str.isalnum, method.lower()))


def _method_by_content(config: Mapping[str, Any]) -> str | None:
    """The method of a file that has another place than `config.json` and so does not name it."""
    if "quant_algo" in config or isinstance(config.get("quantization"), Mapping):
        return "modelopt"
    return "modelslim" if is_description(config) else None
