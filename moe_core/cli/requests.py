"""From the options that describe layers to their requests: by sizes, by a shape's name, or by a model's config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import typer

from moe_core.activation import GEGLU, GEGLU_TANH, RELU2, SWIGLU, SWIGLU_OAI
from moe_core.cli.options import known_word
from moe_core.cli.output import print_error, stderr
from moe_core.deprecated import bf16_dispatch_requested
from moe_core.errors import SpecError
from moe_core.model_config import LayerGroup, draft_layer_groups, layer_groups, read_config
from moe_core.quant import SCHEMES, QuantScheme
from moe_core.request import LayerRequest, Workload
from moe_core.tuning.shapes import SHAPES
from moe_core.vocabulary import FLOAT_DTYPES, PHASES, TOKEN_DTYPES

#: Sizes of a layer that is not described: those of Qwen3-30B-A3B.
DEFAULTS: dict[str, Any] = {
    "num_experts": 128,
    "top_k": 8,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "activation": "silu",
    "bias": False,
}
#: Those of them that are numbers.
SIZES = ("num_experts", "top_k", "hidden_size", "intermediate_size")
#: For a scheme that nobody knows.
_OF_CORE = "Schemes are of moe-core itself: plugins say which of them they run, and add none."
ACTIVATIONS = {
    "silu": SWIGLU,
    "gelu": GEGLU,
    "gelu_tanh": GEGLU_TANH,
    "swiglu_oai": SWIGLU_OAI,
    "relu2": RELU2,
}


def requested_groups(
    shapes: Sequence[str],
    model: Path | None,
    layer: Mapping[str, Any],
    dtype: str | None,
    schemes: Sequence[str],
    shared: Mapping[str, Any],
) -> Iterator[tuple[str, LayerGroup]]:
    """What to resolve, in every scheme: layers of each named shape, with its name, or of a model or by sizes, with "".

    Args:
        shapes: Names of `SHAPES`; none for a model, or for a layer by sizes.
        model: Folder or `config.json`, None for a layer by sizes.
        layer: The options of `DEFAULTS`, None where not given; what is no size holds for shapes, too.
        dtype: Layer dtype, None for the model's or bf16.
        schemes: Names of quantization schemes; none for the model's or none.
        shared: Further fields of every `LayerRequest`: parallelism, workloads, pins.
    """
    for name in shapes:
        known_word("shape", name, SHAPES)
    sizes = next(iter(SHAPES.values())).sizes
    if shapes and (model is not None or any(layer[size] is not None for size in sizes)):
        raise typer.BadParameter("--shape cannot be combined with --model or with sizes")
    layers = [(name, {**layer, **SHAPES[name].sizes}) for name in shapes] or [("", dict(layer))]
    for name, described in layers:
        for scheme in schemes or (None,):
            yield from ((name, group) for group in _groups(model, described, dtype, scheme, shared))


def assumed(shape: str, request: LayerRequest, schemes: Sequence[str]) -> str:
    """What is to know of a known shape's weights if nobody named a scheme: the model may be published in another.

    Args:
        shape: Name of the shape, "" for a layer by sizes or of a model.
        request: What was made of it.
        schemes: As of `requested_groups`.
    """
    if not shape or schemes or SHAPES[shape].published == request.quant.label:
        return ""
    scheme = SHAPES[shape].published
    return f"weights {request.quant.label}; {shape} is published with others: --quant-scheme {scheme}"


def tell_assumed(groups: Iterable[tuple[str, LayerGroup]], schemes: Sequence[str]) -> None:
    """Say on stderr what `assumed` has to say of each group; for commands that measure, which may take long."""
    for shape, group in groups:
        if taken := assumed(shape, group.request, schemes):
            stderr().print(f"{shape}: {taken}", style="dim", soft_wrap=True)


def _groups(
    model: Path | None, layer: Mapping[str, Any], dtype: str | None, quant: str | None, shared: Mapping[str, Any]
) -> tuple[LayerGroup, ...]:
    """The groups of a model, draft layers last, or one group without layer numbers; arguments as above."""
    if dtype is not None:
        known_word("dtype", dtype, FLOAT_DTYPES)
    scheme = None if quant is None else SCHEMES[known_word("quantization scheme", quant, SCHEMES, _OF_CORE)]
    if shared["dispatch_dtype"] is not None:
        known_word("dispatch dtype", shared["dispatch_dtype"], TOKEN_DTYPES)
    variable = bf16_dispatch_requested(os.environ, shared["dispatch_dtype"])
    shared = {**shared, "bf16_dispatch_variable": variable}
    given = {name: value for name, value in layer.items() if value is not None}
    if model is not None:
        if given:
            raise typer.BadParameter(f"{', '.join(_option(name) for name in given)} cannot be combined with --model")
        config = read_config(model)
        groups = layer_groups(config, dtype=dtype, quant=scheme) + _draft_groups(config, dtype, scheme)
        return tuple(attrs.evolve(group, request=attrs.evolve(group.request, **shared)) for group in groups)
    fields = {**DEFAULTS, **given, **shared, "dtype": dtype or "bf16"}
    fields["activation"] = ACTIVATIONS[known_word("activation", fields["activation"], ACTIVATIONS)]
    if scheme is not None:
        fields["quant"] = scheme
        if dtype is None and scheme.weight_dtype in FLOAT_DTYPES:
            fields["dtype"] = scheme.weight_dtype
    try:
        return (LayerGroup(layers=(), request=LayerRequest(**fields)),)
    except SpecError as error:
        # Whoever named some sizes need not know the others.
        taken = [f"{_option(name)} {DEFAULTS[name]}" for name in SIZES if name not in given and name in error.sizes]
        if not given or not taken:
            raise
        raise SpecError(f"{error}; {', '.join(taken)} is taken where it is not given") from error


def _draft_groups(config: Mapping[str, Any], dtype: str | None, scheme: QuantScheme | None) -> tuple[LayerGroup, ...]:
    """A model runs without its draft layers: what is not understood of them alone is a warning."""
    try:
        return draft_layer_groups(config, dtype=dtype, quant=scheme)
    except SpecError as error:
        print_error(f"draft layers are left out: {error}", label="warning")
        return ()


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def workloads(words: Sequence[str]) -> tuple[Workload, ...]:
    """Workloads from `phase[:max_tokens][:graph]` words; one for any phase if there are none."""
    found = tuple(map(_workload, words)) or (Workload(),)
    kinds = [(workload.phase, workload.max_tokens) for workload in found]
    for word, kind in zip(words, kinds, strict=False):
        if kinds.count(kind) > 1:
            raise SpecError(f"workload {word!r}: expected each phase once, or again with another limit of tokens")
    return found


def _workload(word: str) -> Workload:
    phase, *rest = word.split(":")
    known_word("workload phase", phase, PHASES)
    graph = "graph" in rest
    numbers = [part for part in rest if part != "graph"]
    if len(numbers) > 1 or not all(number.isdecimal() for number in numbers):
        raise SpecError(f"workload {word!r}: expected phase[:max_tokens][:graph], for example decode:128:graph")
    try:
        return Workload(phase=phase, max_tokens=int(numbers[0]) if numbers else None, graph_capture=graph)
    except SpecError as error:
        raise SpecError(f"workload {word!r}: expected at least 1 token, for example decode:128:graph") from error
