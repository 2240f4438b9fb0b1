"""A whole checkpoint: read tensor by tensor, experts quantized one by one, the rest copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from moe_core.errors import MoeCoreError, SpecError
from moe_core.expert_names import is_of_experts
from moe_core.payloads import Tensor
from moe_core.quantizer.card import CARD, model_card, moved_cards, with_links
from moe_core.quantizer.experts import ExpertSource, find_experts, require_sizes
from moe_core.quantizer.input_amax import ModelInputs
from moe_core.quantizer.layout import Contents, Expert, Layout
from moe_core.quantizer.layouts import find_layout
from moe_core.quantizer.output import SHARD_BYTES, ShardWriter, WrittenCheckpoint, new_folder, require_new, write_json
from moe_core.quantizer.source import Source, open_source

#: `(bytes of source weights dealt with, bytes in all) -> None`.
ProgressFn = Callable[[int, int], None]


def quantize_checkpoint(
    source: Path,
    out: Path,
    scheme: str,
    *,
    ecosystem: str | None = None,
    inputs: ModelInputs | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: ProgressFn | None = None,
) -> WrittenCheckpoint:
    """Write the checkpoint in `source` to `out` with its experts quantized.

    Tensors are read one by one and at most one shard waits in memory. Experts may lie one by one
    (`experts.3.gate_proj.weight`, `experts.3.w1.weight`) or all of a layer in one tensor (`experts.gate_up_proj`
    `[E, 2I, H]`, gate first); the latter are written one by one. All other tensors are copied, and all files beside the
    weights: the tokenizer, generation settings, code. Not copied are folders, weights in other formats (`.bin`,
    `.gguf`, `.onnx` ...) and indices of weight files; `config.json` is written again. What describes the model
    (`README.md`, `README_zh.md`, `BASE_README.md`) gets `BASE_` in front of its name, and a new card says what was
    done.

    Args:
        source: Folder of a Hugging Face checkpoint in safetensors with bf16, fp16 or fp32 experts.
        out: Folder to make; it appears when it is complete.
        scheme: A name of `words.WRITABLE`, or a word of `words.SHORT_WORDS`.
        ecosystem: Whose layout; None for the usual one of the scheme.
        inputs: Largest magnitudes of the experts' inputs, where the scheme scales activations statically.
        shard_bytes: Largest size of a weight file.
        progress: Told after every tensor and every expert; headers of files count in the bytes in all.

    Raises:
        UnknownNameError: No such scheme.
        SpecError: The layout is not written, no MoE checkpoint lies in `source`, it is quantized already, its sizes do
            not fit the scheme, `out` is not empty, or `inputs` are missing or not wanted.
        WeightsError: Tensors that cannot be read or are not understood.
        MoeCoreError: The operating system refused to read or write.
    """
    layout = find_layout(scheme, ecosystem)
    if layout.static_inputs != (inputs is not None):
        raise SpecError(
            f"scheme {layout.stored.scheme.label!r} scales activations "
            + ("statically and needs `inputs`" if layout.static_inputs else "from the data and takes no `inputs`")
        )
    try:
        with open_source(source) as opened:
            experts = find_experts(opened.checkpoint)
            require_sizes(experts, layout)
            with new_folder(out) as folder:
                writer = _Writer(opened, folder, layout, inputs, shard_bytes, progress)
                return writer.write(experts, out)
    except OSError as error:
        raise MoeCoreError(f"{source} could not be written to {out}, nothing was left there: {error}") from error


def require_quantizable(source: Path, out: Path, scheme: str, ecosystem: str | None = None) -> None:
    """Raise what `quantize_checkpoint` would raise before it reads the first weight."""
    layout = find_layout(scheme, ecosystem)
    require_new(out)
    with open_source(source) as opened:
        require_sizes(find_experts(opened.checkpoint), layout)


class _Writer:
    """The steps of one checkpoint."""

    def __init__(
        self,
        source: Source,
        folder: Path,
        layout: Layout,
        inputs: ModelInputs | None,
        shard_bytes: int,
        progress: ProgressFn | None,
    ) -> None:
        self._source, self._folder, self._layout, self._inputs = source, folder, layout, inputs
        self._shards = ShardWriter(folder, layout.file_stem, shard_bytes)
        self._progress = progress
        self._done, self._total = 0, source.num_bytes
        self._quantized: list[str] = []
        self._moved = moved_cards(path.name for path in source.other_files())

    def write(self, experts: list[ExpertSource], out: Path) -> WrittenCheckpoint:
        kept_modules = self._copy_tensors()
        kept_bytes = self._done
        for expert in experts:
            self._quantize(expert)
        self._shards.close()
        kept = tuple(name for name in self._source.checkpoint.names if not is_of_experts(name))
        self._describe(Contents(quantized=tuple(self._quantized), kept=kept, kept_modules=kept_modules))
        written = WrittenCheckpoint(
            folder=out,
            stored=self._layout.stored,
            num_experts=len(experts),
            expert_bytes_before=self._done - kept_bytes,
            expert_bytes_after=self._shards.total_bytes - kept_bytes,
            kept_bytes=kept_bytes,
        )
        card = model_card(self._source.folder.resolve().name, written, self._inputs, self._moved.values())
        (self._folder / CARD).write_text(card, encoding="utf-8")
        return written

    def _copy_tensors(self) -> tuple[str, ...]:
        """Copy everything but experts; the names of modules whose weight is a matrix, which readers could quantize."""
        modules = {"lm_head"}
        for name in self._source.checkpoint.names:
            if not is_of_experts(name):
                copied = self._source.checkpoint.read(name)
                self._shards.add(name, copied)
                self._advance(copied.nbytes)
                if name.endswith(".weight") and copied.dim() == 2:
                    modules.add(name.removesuffix(".weight"))
        return tuple(sorted(modules))

    def _quantize(self, expert: ExpertSource) -> None:
        weights: dict[str, Tensor] = {half: part.read() for half, part in expert.projections.items()}
        amax: Mapping[str, float] = self._inputs.of(expert.layer, expert.index, expert.module) if self._inputs else {}
        stored = self._layout.store(Expert(weights=weights, input_amax=amax))
        for half, tensors in stored.items():
            for suffix, tensor in tensors.items():
                name = f"{expert.projections[half].name}.{suffix}"
                self._shards.add(name, tensor)
                self._quantized.append(name)
        self._advance(sum(weight.nbytes for weight in weights.values()))

    def _describe(self, contents: Contents) -> None:
        description = self._layout.describe(contents)
        for path in self._source.other_files():
            if path.name in self._moved:
                card = with_links(path.read_bytes(), self._moved)
                (self._folder / self._moved[path.name]).write_bytes(card)
            else:
                shutil.copyfile(path, self._folder / path.name)
        config = dict(self._source.config)
        if description.quantization_config is not None:
            config["quantization_config"] = description.quantization_config
        write_json(self._folder / "config.json", config)
        for name, content in description.files.items():
            write_json(self._folder / name, content)

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
