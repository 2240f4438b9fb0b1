"""`moe-core run`: generate text with a model whose experts run through moe-core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from moe_core.cli.output import fields, print_error, stdout
from moe_core.cli.plan_view import layer_ranges, plan_view
from moe_core.cli.progress import progress_bar, stage
from moe_core.errors import MoeCoreError, SpecError, counted
from moe_core.expert_names import layer_index
from moe_core.vocabulary import FLOAT_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.cli.encoded_text import EncodedText
    from moe_core.cli.generation import Generated
    from moe_core.cli.text_codec import TextCodec
    from moe_core.evaluation import Window
    from moe_core.integrations.transformers import LoadedModel
    from moe_core.integrations.transformers.prepared import PreparedExperts

#: Models up to this many parameters are compared with eager unless told otherwise.
SMALL_MODEL = 2_000_000_000
_EMPTY = "the prompt is empty; give at least one token to continue"


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
    sample = None if text is None else _Sample(text, read_text(text), window)
    with stage("importing torch and transformers"):
        from moe_core.cli import model_loading
        from moe_core.cli.encoded_text import encode

        model_loading.require_transformers()
    if compare_eager and model_loading.is_quantized(model):
        raise SpecError(f"--compare-eager: the experts of {model} are quantized, eager computes float ones")
    encoded = encode(model, prompt)
    if not encoded.ids:
        raise SpecError(_EMPTY)
    if sample is not None:
        sample.cut(encoded.codec)
    _tell_context(encoded, max_new_tokens)
    eager = _EagerReference(encoded.ids, compare_eager)
    loaded = model_loading.load_served(
        model, dtype, device, a2a_backend, runner_backend, before_preparing=eager.compute
    )
    _print_plans(loaded.experts, speller(context))
    logits, generated = _generated(loaded, encoded.ids, max_new_tokens)
    figures = _figures(generated, encoded.codec, loaded) | eager.figure(logits, loaded)
    if sample is not None:
        figures["perplexity"] = sample.perplexity(loaded.model)
    _print_result(f"{prompt}{encoded.codec.decode(generated.ids)}", figures)


def _check_prompt(prompt: str) -> None:
    """Raise `SpecError` for nothing, and for bytes that are no text; Python hands them on as halves of characters."""
    if not prompt:
        raise SpecError(_EMPTY)
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SpecError(
            "the prompt is not readable as UTF-8; in a locale of another encoding set PYTHONUTF8=1"
        ) from error


def _generated(loaded: LoadedModel, ids: list[int], max_new_tokens: int) -> tuple[Tensor, Generated]:
    """The logits of the prompt, and what the model makes of it; errors as of `_refuse_nan`."""
    from moe_core.cli.generation import generate
    from moe_core.evaluation import prompt_logits

    # The first forward compiles and allocates; the figures are of the second.
    with stage("warm-up"):
        logits = prompt_logits(loaded.model, ids)
    _refuse_nan(logits, {name for prepared in loaded.experts.values() for name in prepared.plan.plugins})
    with stage("generating"):
        return logits, generate(loaded.model, ids, max_new_tokens)


def _tell_context(encoded: EncodedText, max_new_tokens: int) -> None:
    """Warn where more tokens are asked for than the model was made for: it would go on, with worse and worse text."""
    most = len(encoded.ids) + max_new_tokens
    if encoded.context is not None and most > encoded.context:
        print_error(
            f"the prompt has {counted(len(encoded.ids), 'token')}, with --max-new-tokens {max_new_tokens} that may "
            f"become {most}: {encoded.folder} was made for {encoded.context}",
            label="warning",
        )


def _refuse_nan(logits: Tensor, plugins: Iterable[str]) -> None:
    """Raise `MoeCoreError` for logits of any shape that hold NaN: every further token would follow from it."""
    if logits.isnan().any():
        raise MoeCoreError(
            "the model answers the prompt with NaN: its weights hold some, a value was too large for its dtype, or its "
            f"backend is wrong, which moe-core verify {' '.join(sorted(plugins))} would tell"
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

    def figure(self, logits: Tensor, loaded: LoadedModel) -> dict[str, str]:
        """How far logits are from it; why that is not known where nobody said that it need not be."""
        if self.logits is not None:
            return {"difference": _difference(logits, self.logits)}
        if self._wanted is None and loaded.is_quantized:
            return {"difference": "from eager not available: the experts exist in quantized form alone"}
        return {}


class _Sample:
    """A text whose perplexity is measured: cut before any weight is loaded, so that one that is too short is told."""

    def __init__(self, path: Path, text: str, window: int) -> None:
        self._path, self._text, self._window = path, text, window
        self._ids: list[int] = []
        self._windows: tuple[Window, ...] = ()

    def cut(self, codec: TextCodec) -> None:
        from moe_core.evaluation import cut_windows

        self._ids = codec.encode(self._text)
        self._windows = cut_windows(len(self._ids), self._window, self._window)

    def perplexity(self, network: Any) -> str:
        from moe_core.evaluation import evaluate, prompt_logits

        with progress_bar("perplexity", "windows") as progress:
            measured = evaluate(partial(prompt_logits, network), self._ids, self._windows, progress=progress)
        per_byte = measured.perplexity(len(self._text.encode("utf-8")) / len(self._ids))
        return (
            f"{per_byte.mean:.3f} per byte, {measured.perplexity().mean:.3f} per token "
            f"({counted(measured.num_tokens, 'token')} of {self._path}, windows of {self._window})"
        )


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


def _difference(logits: Tensor, reference: Tensor) -> str:
    from moe_core.cli.generation import difference

    largest, magnitude, same = difference(logits, reference)
    return (
        f"largest difference from eager {largest:.2e} (logits up to {magnitude:.1f}); "
        f"same top token at {same} of {counted(len(reference), 'position')}"
    )
