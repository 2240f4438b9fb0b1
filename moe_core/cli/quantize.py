"""`moe-core quantize`: write a float checkpoint again with its experts quantized."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_core.cli.options import ModelFolder, TextWindow, Verbose, check_model_folder, read_text
from moe_core.cli.output import fields, print_error, stdout
from moe_core.cli.progress import progress_bar, stage
from moe_core.cli.stopping import exit_on_signals
from moe_core.errors import SpecError, counted
from moe_core.quantizer.words import SHORT_WORDS, WRITABLE, ecosystem_of, scheme_name

if TYPE_CHECKING:
    from moe_core.quantizer.input_amax import ModelInputs
    from moe_core.quantizer.output import WrittenCheckpoint

_ECOSYSTEMS = sorted({name for names in WRITABLE.values() for name in names})
_SHORT = ", ".join(f"{word} for {name}" for word, name in SHORT_WORDS.items())


def quantize(
    model: ModelFolder,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder to make; if it exists it must be empty.")],
    scheme: Annotated[
        str, typer.Option(metavar="NAME", help=f"What to write: {', '.join(WRITABLE)}; or, in short, {_SHORT}.")
    ],
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
    window: TextWindow = 256,
    input_scale: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="nvfp4: activation scale of experts that no calibration saw; loaders take 1 where there is none.",
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Write a model again with its experts quantized.

    The experts must be floats. The rest is copied, and the files are laid out as the scheme's ecosystem reads them.
    """
    word, scheme = scheme, scheme_name(scheme)
    ecosystem = ecosystem_of(scheme, ecosystem)
    check_model_folder(model)
    text = None if calibrate is None else read_text(calibrate)
    with stage("importing torch"):
        from moe_core.quantizer.checkpoint import quantize_checkpoint, require_quantizable
        from moe_core.quantizer.layouts import find_layout
        from moe_core.quantizer.output import stale_folders

    _require_scales(scheme, find_layout(scheme, ecosystem).static_inputs, text, input_scale)
    # Before minutes of calibration.
    require_quantizable(model, output, scheme, ecosystem)
    for stale in stale_folders(output):
        print_error(f"{stale} is left of a run that was killed, unless one is still writing; delete it", "warning")
    inputs = _inputs(model, text, window, input_scale)
    with exit_on_signals(), progress_bar(f"writing {scheme} for {ecosystem}") as progress:
        written = quantize_checkpoint(model, output, scheme, ecosystem=ecosystem, inputs=inputs, progress=progress)
    _print_result(written, word, ecosystem)


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
    from moe_core.quantizer.nvfp4 import largest_input

    try:
        default = None if input_scale is None else largest_input(input_scale)
    except SpecError as error:
        raise SpecError(f"--input-scale: {error}") from error
    if text is None:
        return None if default is None else ModelInputs(default=default)
    return _calibrated(source, text, window, default)


def _calibrated(source: Path, text: str, window: int, default: float | None) -> ModelInputs:
    import torch

    from moe_core.cli.encoded_text import encode
    from moe_core.cli.model_loading import find_device, load_model
    from moe_core.quantizer.calibration import calibrate

    ids = torch.tensor([encode(source, text).ids])
    if not ids.numel():
        raise SpecError("the calibration text is empty; give at least one token")
    device = find_device(None).type
    with stage("loading"):
        # Magnitudes are those of bf16 up to its rounding, and many CPUs have no instructions for it.
        network = load_model(source, "fp32" if device == "cpu" else None, device)
    windows = torch.split(ids, window, dim=1)
    with progress_bar(f"calibrating over {counted(ids.numel(), 'token')}", "windows") as progress:
        return calibrate(network, windows, default=default, progress=lambda done: progress(done, len(windows)))


def _print_result(written: WrittenCheckpoint, word: str, ecosystem: str) -> None:
    before, after = written.expert_bytes_before, written.expert_bytes_after
    kept, scheme = written.kept_bytes, written.stored.scheme.label
    meant = "" if word == scheme else f" ({word} is short for it)"
    stdout().print(
        fields(
            {
                "written": str(written.folder),
                "scheme": f"{scheme}{meant}, in the layout of {ecosystem}",
                "experts": f"{written.num_experts}: {_megabytes(before)} -> {_megabytes(after)}",
                "unchanged": _megabytes(kept),
                "in all": f"{_megabytes(before + kept)} -> {_megabytes(after + kept)}",
            }
        )
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
