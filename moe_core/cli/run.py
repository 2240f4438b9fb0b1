"""`moe-core run`: generate text with a model whose experts run through moe-core."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from moe_core.cli.options import A2aBackend, RunnerBackend, Verbose, check_model_folder, known_word, read_text
from moe_core.cli.output import fields, progress_bar, stage, stdout
from moe_core.cli.plan_view import layer_ranges, plan_view
from moe_core.errors import SpecError
from moe_core.model_config import quantization_of, read_config
from moe_core.plan import MoEPlan
from moe_core.vocabulary import DEVICE_TYPES, FLOAT_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.cli.generation import Generated
    from moe_core.cli.text_codec import TextCodec
    from moe_core.integrations.transformers import LoadedModel

#: Models up to this many parameters are compared with eager unless told otherwise.
SMALL_MODEL = 2_000_000_000
#: Pins of the dispatcher and of the runner.
_Pins: TypeAlias = tuple[str | None, str | None]
_LAYER_INDEX = re.compile(r"\blayers?\.(\d+)\.")


def run(
    model: Annotated[Path, typer.Option(metavar="DIR", help="Folder of a Hugging Face MoE model.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 64,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also measure perplexity on this UTF-8 text file.")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window of that text.")] = 256,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Dtype of the weights: {', '.join(FLOAT_DTYPES)}.", show_default="the checkpoint's"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Device type, for example cpu or cuda.", show_default="the accelerator, else cpu"),
    ] = None,
    compare_eager: Annotated[
        bool | None,
        typer.Option(
            "--compare-eager/--no-compare-eager",
            help="Compare the prompt's logits with transformers' eager experts.",
            show_default=f"up to {SMALL_MODEL // 10**9} billion parameters",
        ),
    ] = None,
    a2a_backend: A2aBackend = None,
    runner_backend: RunnerBackend = None,
    verbose: Verbose = False,
) -> None:
    """Load a Hugging Face MoE model, run its experts through moe-core, and generate text greedily."""
    if dtype is not None:
        known_word("dtype", dtype, FLOAT_DTYPES)
    if device is not None:
        known_word("device type", device, DEVICE_TYPES)
    check_model_folder(model)
    sample = None if text is None else read_text(text)
    pins = (a2a_backend, runner_backend)
    if quantization_of(read_config(model)) is None:
        loaded, reference = _load_floats(model, prompt, dtype, device, compare_eager, pins)
    elif compare_eager:
        raise SpecError(f"--compare-eager: the experts of {model} are quantized, eager computes float ones")
    else:
        loaded, reference = _load_quantized(model, dtype, device, pins), None
    from moe_core.cli import generation
    from moe_core.evaluation import prompt_logits

    network, (codec, ids) = loaded.model, _encoded(model, loaded.model, prompt)
    _print_plans({name: experts.plan for name, experts in loaded.experts.items()})
    # The first forward compiles and allocates; the figures below are of the second.
    with stage("warm-up"):
        logits = prompt_logits(network, ids)
    with stage("generating"):
        generated = generation.generate(network, ids, max_new_tokens)
    figures = _figures(generated, codec, loaded)
    if reference is not None:
        figures["difference"] = _difference(logits, reference)
    elif compare_eager is None and loaded.is_quantized:
        figures["difference"] = "from eager not available: the experts exist in quantized form alone"
    if text is not None and sample is not None:
        with stage("perplexity"):
            figures["perplexity"] = _perplexity(network, codec, sample, text, window)
    _print_result(f"{prompt}{codec.decode(generated.ids)}", figures)


def _load_floats(
    folder: Path, prompt: str, dtype: str | None, device: str | None, compare_eager: bool | None, pins: _Pins
) -> tuple[LoadedModel, Tensor | None]:
    """The model, and what its eager experts answer, if that is wanted."""
    from moe_core.cli import model_loading
    from moe_core.evaluation import prompt_logits
    from moe_core.integrations.transformers import LoadedModel

    with stage("loading"):
        network = model_loading.load_model(folder, dtype, device)
    _, ids = _encoded(folder, network, prompt)
    compare = network.num_parameters() <= SMALL_MODEL if compare_eager is None else compare_eager
    reference = None
    if compare:
        # Before preparing: a layout of its own may take the place of the weights that eager reads.
        with stage("eager reference"):
            reference = prompt_logits(network, ids)
    with stage("preparing experts"):
        bound = model_loading.prepare_experts(network, *pins)
    return LoadedModel(model=network, experts=bound), reference


def _load_quantized(folder: Path, dtype: str | None, device: str | None, pins: _Pins) -> LoadedModel:
    from moe_core.cli import model_loading

    with progress_bar("loading") as progress:
        return model_loading.load_quantized(folder, dtype, device, *pins, progress)


def _encoded(folder: Path, network: Any, prompt: str) -> tuple[TextCodec, list[int]]:
    """The codec of a model, and the prompt in tokens; raises `SpecError` if there is none."""
    from moe_core.cli.text_codec import load_codec

    codec = load_codec(folder, int(network.config.get_text_config().vocab_size))
    ids = codec.encode(prompt)
    if not ids:
        raise SpecError("the prompt is empty; give at least one token to continue")
    return codec, ids


def _print_plans(plans: Mapping[str, MoEPlan]) -> None:
    """Every plan once, with the layers that share it."""
    groups: list[tuple[MoEPlan, list[str]]] = []
    for name, plan in plans.items():
        names = next((names for known, names in groups if known == plan), None)
        if names is None:
            groups.append((plan, [name]))
        else:
            names.append(name)
    for plan, names in groups:
        found = [_LAYER_INDEX.search(name) for name in names]
        layers = sorted(int(match[1]) for match in found if match)
        title = layer_ranges(layers) if len(layers) == len(names) else ", ".join(names)
        stdout().print(plan_view(layers, plan, title))


def _print_result(text: str, figures: Mapping[str, str]) -> None:
    console = stdout()
    console.print("\ntext", style="bold")
    console.print(text, soft_wrap=not console.is_terminal)
    console.print("\nfigures", style="bold")
    console.print(fields({f"  {label}": value for label, value in figures.items()}))


def _figures(generated: Generated, codec: TextCodec, loaded: LoadedModel) -> dict[str, str]:
    decode, network = generated.decode_rate, loaded.model
    return {
        "model": f"{type(network).__name__}, {loaded.num_parameters / 1e6:.1f} M parameters, "
        f"{str(network.dtype).removeprefix('torch.')} on {network.device}, {codec.name}",
        "prefill": f"{generated.prefill_rate:.1f} tokens/s ({generated.prefill_tokens} tokens)",
        "decode": "no token decoded" if decode is None else f"{decode:.1f} tokens/s ({len(generated.ids) - 1} tokens)",
    }


def _perplexity(network: Any, codec: TextCodec, sample: str, source: Path, window: int) -> str:
    from moe_core.evaluation import cut_windows, evaluate, prompt_logits

    ids = codec.encode(sample)
    measured = evaluate(partial(prompt_logits, network), ids, cut_windows(len(ids), window, window))
    per_byte = measured.perplexity(len(sample.encode("utf-8")) / len(ids))
    return (
        f"{per_byte.mean:.3f} per byte, {measured.perplexity().mean:.3f} per token "
        f"({measured.num_tokens} tokens of {source}, windows of {window})"
    )


def _difference(logits: Tensor, reference: Tensor) -> str:
    from moe_core.cli.generation import difference

    largest, magnitude, same = difference(logits, reference)
    return (
        f"largest difference from eager {largest:.2e} (logits up to {magnitude:.1f}); "
        f"same top token at {same} of {len(reference)} positions"
    )
