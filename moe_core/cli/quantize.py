"""`moe-core quantize`: write a float checkpoint again with its experts quantized."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_core.cli.options import Verbose, read_text
from moe_core.cli.output import fields, progress_bar, stage, stdout
from moe_core.errors import SpecError
from moe_core.quantizer.words import WRITABLE, ecosystem_of

if TYPE_CHECKING:
    from moe_core.quantizer.checkpoint import WrittenCheckpoint
    from moe_core.quantizer.input_amax import ModelInputs

_ECOSYSTEMS = sorted({name for names in WRITABLE.values() for name in names})


def quantize(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a Hugging Face MoE model in floats.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; if it exists it must be empty.")],
    scheme: Annotated[str, typer.Option(metavar="NAME", help=f"What to write: {', '.join(WRITABLE)}.")],
    ecosystem: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Whose layout: {', '.join(_ECOSYSTEMS)}.", show_default="the scheme's usual one"
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="nvfp4: run the model over this UTF-8 text to find its activation scales."),
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window of that text.")] = 256,
    input_scale: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="nvfp4: activation scale of experts that no calibration saw; loaders take 1 where there is none.",
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Quantize the experts of a model and copy the rest, in the layout that the scheme's ecosystem reads."""
    ecosystem = ecosystem_of(scheme, ecosystem)
    if not source.is_dir():
        raise SpecError(f"no model at {source}: expected a folder with a config.json and weights")
    text = None if calibrate is None else read_text(calibrate)
    from moe_core.quantizer.checkpoint import quantize_checkpoint, require_quantizable
    from moe_core.quantizer.storages import find_storage

    _require_scales(scheme, find_storage(scheme, ecosystem).static_inputs, text, input_scale)
    # Before minutes of calibration.
    require_quantizable(source, out, scheme, ecosystem)
    inputs = _inputs(source, text, window, input_scale)
    with progress_bar(f"writing {scheme} for {ecosystem}") as progress:
        written = quantize_checkpoint(source, out, scheme, ecosystem=ecosystem, inputs=inputs, progress=progress)
    _print_result(written)


def _require_scales(scheme: str, wanted: bool, text: str | None, input_scale: float | None) -> None:
    given = text is not None or input_scale is not None
    if wanted and not given:
        raise SpecError(
            f"scheme {scheme!r} stores activation scales: find them with --calibrate FILE, a text like those the model "
            "will read, or accept one for all experts with --input-scale 1"
        )
    if given and not wanted:
        raise SpecError(
            f"scheme {scheme!r} scales activations from the data: --calibrate and --input-scale do not apply"
        )


def _inputs(source: Path, text: str | None, window: int, input_scale: float | None) -> ModelInputs | None:
    from moe_core.quantizer.input_amax import ModelInputs
    from moe_core.quantizer.number_formats import NVFP4_MAX

    default = None if input_scale is None else input_scale * NVFP4_MAX
    if text is None:
        return None if default is None else ModelInputs(default=default)
    import torch

    from moe_core.cli.model_loading import load_model
    from moe_core.cli.text_codec import load_codec
    from moe_core.quantizer.calibration import calibrate

    with stage("loading"):
        network = load_model(source, None, None)
        codec = load_codec(source, int(network.config.get_text_config().vocab_size))
    ids = torch.tensor([codec.encode(text)])
    if not ids.numel():
        raise SpecError("the calibration text is empty; give at least one token")
    with stage(f"calibrating over {ids.numel()} tokens"):
        return calibrate(network, torch.split(ids, window, dim=1), default=default)


def _print_result(written: WrittenCheckpoint) -> None:
    before, after = written.expert_bytes_before, written.expert_bytes_after
    kept = written.kept_bytes
    stdout().print(
        fields(
            {
                "written": str(written.folder),
                "scheme": f"{written.stored.scheme}, stored as {written.stored.storage}",
                "experts": f"{written.num_experts}: {_megabytes(before)} -> {_megabytes(after)}",
                "unchanged": _megabytes(kept),
                "in all": f"{_megabytes(before + kept)} -> {_megabytes(after + kept)}",
            }
        )
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
