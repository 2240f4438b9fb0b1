"""`moe-core run`: generate text with a model whose experts run through moe-core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_core.cli.option_words import speller
from moe_core.cli.options import (
    A2aBackend,
    ComputedDtype,
    Device,
    ModelFolder,
    RunnerBackend,
    TextWindow,
    Verbose,
    check_model_folder,
    check_names,
    known_word,
    read_text,
)
from moe_core.cli.output import fields, stdout
from moe_core.cli.plan_view import layer_ranges, plan_view
from moe_core.cli.progress import progress_bar, stage
from moe_core.errors import MoeCoreError, SpecError, counted
from moe_core.expert_names import layer_index
from moe_core.vocabulary import FLOAT_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.cli.generation import Generated
    from moe_core.cli.text_codec import TextCodec
    from moe_core.evaluation import Progress, Window
    from moe_core.integrations.transformers import LoadedModel
    from moe_core.integrations.transformers.prepared import PreparedExperts

#: Models up to this many parameters are compared with eager unless told otherwise.
SMALL_MODEL = 2_000_000_000


def run(
    context: typer.Context,
    model: ModelFolder,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens to generate.")] = 64,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also measure perplexity on this UTF-8 text file.")
    ] = None,
    window: TextWindow = 256,
    compare_eager: Annotated[
        bool | None,
        typer.Option(
            "--compare-eager/--no-compare-eager",
            help="Compare the prompt's logits with transformers' eager experts.",
            show_default=f"up to {SMALL_MODEL // 10**9} billion parameters",
        ),
    ] = None,
    dtype: ComputedDtype = None,
    device: Device = None,
    a2a_backend: A2aBackend = None,
    runner_backend: RunnerBackend = None,
    verbose: Verbose = False,
) -> None:
    """Generate text with a model whose experts moe-core runs.

    Each token is the likeliest one. Attention and everything else around the experts is transformers'.
    """
    if dtype is not None:
        known_word("dtype", dtype, FLOAT_DTYPES)
    check_model_folder(model)
    check_names(a2a_backend, runner_backend)
    _check_prompt(prompt)
    sample = None if text is None else read_text(text)
    with stage("importing torch and transformers"):
        from moe_core.cli import generation, model_loading
        from moe_core.cli.encoded_text import encode
        from moe_core.evaluation import cut_windows, prompt_logits

        model_loading.require_transformers()
    if compare_eager and model_loading.is_quantized(model):
        raise SpecError(f"--compare-eager: the experts of {model} are quantized, eager computes float ones")
    encoded = encode(model, prompt)
    ids, codec = encoded.ids, encoded.codec
    if not ids:
        raise SpecError("the prompt is empty; give at least one token to continue")
    sample_ids = [] if sample is None else codec.encode(sample)
    windows = () if sample is None else cut_windows(len(sample_ids), window, window)
    eager = _EagerReference(ids, compare_eager)
    loaded = model_loading.load_served(
        model, dtype, device, a2a_backend, runner_backend, before_preparing=eager.compute
    )
    network = loaded.model
    _print_plans(loaded.experts, speller(context))
    # The first forward compiles and allocates; the figures below are of the second.
    with stage("warm-up"):
        logits = prompt_logits(network, ids)
    _refuse_nan(logits)
    with stage("generating"):
        generated = generation.generate(network, ids, max_new_tokens)
    figures = _figures(generated, codec, loaded)
    if eager.logits is not None:
        figures["difference"] = _difference(logits, eager.logits)
    elif compare_eager is None and loaded.is_quantized:
        figures["difference"] = "from eager not available: the experts exist in quantized form alone"
    if text is not None and sample is not None:
        with progress_bar("perplexity", "windows") as progress:
            described = f"{text}, windows of {window}"
            num_bytes = len(sample.encode("utf-8"))
            figures["perplexity"] = _perplexity(network, sample_ids, windows, num_bytes, described, progress)
    _print_result(f"{prompt}{codec.decode(generated.ids)}", figures)


def _check_prompt(prompt: str) -> None:
    """Raise `SpecError` for bytes that are no text; Python hands them on as halves of characters."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SpecError(
            "the prompt is not readable as UTF-8; in a locale of another encoding set PYTHONUTF8=1"
        ) from error


def _refuse_nan(logits: Tensor) -> None:
    """Raise `MoeCoreError` for logits of any shape that hold NaN: every further token would follow from it."""
    if logits.isnan().any():
        raise MoeCoreError(
            "the model answers the prompt with NaN: its weights hold some, a value was too large for its dtype, or its "
            "backend is wrong, which moe-core verify would tell"
        )


class _EagerReference:
    """What the eager experts of a model answer to the prompt, if that is wanted and the model has any."""

    def __init__(self, ids: list[int], wanted: bool | None) -> None:
        self.logits: Tensor | None = None
        self._ids, self._wanted = ids, wanted

    def compute(self, network: Any) -> None:
        from moe_core.evaluation import prompt_logits

        wanted = network.num_parameters() <= SMALL_MODEL if self._wanted is None else self._wanted
        if wanted:
            with stage("eager reference"):
                self.logits = prompt_logits(network, self._ids)


def _print_plans(experts: Mapping[str, PreparedExperts], spelled: Callable[[str], str]) -> None:
    """Every plan once, with the layers that share it."""
    groups: list[tuple[PreparedExperts, list[str]]] = []
    for name, prepared in experts.items():
        names = next((names for known, names in groups if known.plan == prepared.plan), None)
        if names is None:
            groups.append((prepared, [name]))
        else:
            names.append(name)
    for prepared, names in groups:
        layers = sorted(index for name in names if (index := layer_index(name)) is not None)
        title = layer_ranges(layers) if len(layers) == len(names) else ", ".join(names)
        stdout().print(plan_view(title, prepared.plan, prepared.decision, spelled))


def _print_result(text: str, figures: Mapping[str, str]) -> None:
    console = stdout()
    console.print("\ntext", style="bold")
    if console.is_terminal:
        console.print(text)
    else:
        # As it was generated, spaces included.
        typer.echo(text)
    console.print("\nfigures", style="bold")
    console.print(fields({f"  {label}": value for label, value in figures.items()}))


def _figures(generated: Generated, codec: TextCodec, loaded: LoadedModel) -> dict[str, str]:
    decode, network = generated.decode_rate, loaded.model
    return {
        "model": f"{type(network).__name__}, {loaded.num_parameters / 1e6:.1f} M parameters, "
        f"{str(network.dtype).removeprefix('torch.')} on {network.device}, {codec.name}",
        "prefill": f"{generated.prefill_rate:.1f} tokens/s ({counted(generated.prefill_tokens, 'token')})",
        "decode": "no token decoded"
        if decode is None
        else f"{decode:.1f} tokens/s ({counted(len(generated.ids) - 1, 'token')})",
    }


def _perplexity(
    network: Any, ids: list[int], windows: Sequence[Window], num_bytes: int, described: str, progress: Progress
) -> str:
    from moe_core.evaluation import evaluate, prompt_logits

    measured = evaluate(partial(prompt_logits, network), ids, windows, progress=progress)
    per_byte = measured.perplexity(num_bytes / len(ids))
    return (
        f"{per_byte.mean:.3f} per byte, {measured.perplexity().mean:.3f} per token "
        f"({counted(measured.num_tokens, 'token')} of {described})"
    )


def _difference(logits: Tensor, reference: Tensor) -> str:
    from moe_core.cli.generation import difference

    largest, magnitude, same = difference(logits, reference)
    return (
        f"largest difference from eager {largest:.2e} (logits up to {magnitude:.1f}); "
        f"same top token at {same} of {counted(len(reference), 'position')}"
    )
