"""The options that describe a layer, shared by the commands that take a layer or a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moe_core.cli.options import LARGEST_COUNT
from moe_core.cli.requests import ACTIVATIONS, DEFAULTS
from moe_core.quant import SCHEMES
from moe_core.tuning.shapes import SHAPES
from moe_core.vocabulary import FLOAT_DTYPES


def _option(name: str, metavar: str, what: str) -> Any:
    return typer.Option(metavar=metavar, help=what, show_default=str(DEFAULTS[name]))


def tokens_option(default: str) -> Any:
    """The option `--tokens` of a command that takes these, in words, where there is none."""
    return typer.Option(
        metavar="T", min=1, max=LARGEST_COUNT, help="Number of tokens; may be repeated.", show_default=default
    )


def _scheme_option(more: str = "") -> Any:
    return typer.Option(
        metavar="NAME",
        help=f"Scheme of the weights: {', '.join(SCHEMES)}{more}.",
        show_default="the model's, or unquantized",
    )


_REPEATED = "; may be repeated"

Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME",
        help=f"Sizes of a known model: {', '.join(SHAPES)}{_REPEATED}; with float weights unless a scheme is named.",
    ),
]
Model = Annotated[Path | None, typer.Option(metavar="DIR|FILE", help="Take the layers from this model's config.json.")]
NumExperts = Annotated[int | None, _option("num_experts", "N", "Experts over all ranks.")]
TopK = Annotated[int | None, _option("top_k", "N", "Experts per token.")]
HiddenSize = Annotated[int | None, _option("hidden_size", "N", "Size of a token, H.")]
IntermediateSize = Annotated[int | None, _option("intermediate_size", "N", "I of one expert, before TP.")]
Activation = Annotated[str | None, _option("activation", "NAME", f"One of {', '.join(ACTIVATIONS)}.")]
Bias = Annotated[bool | None, typer.Option("--bias", help="Experts have biases.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=f"Dtype of the layer: {', '.join(FLOAT_DTYPES)}.", show_default="the model's, or bf16"
    ),
]
QuantScheme = Annotated[str | None, _scheme_option()]
QuantSchemes = Annotated[list[str] | None, _scheme_option(_REPEATED)]
#: Of commands that take times, and how many samples they take unless told otherwise.
REPEATS = 15
Repeats = Annotated[int, typer.Option(min=1, metavar="N", help="Samples of each figure.")]
TpSize = Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks.")]
