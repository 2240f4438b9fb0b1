"""Where a checkpoint keeps the experts of a layer: module names, projection names, and names of stored tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

import attrs

from moe_core.errors import WeightsError, some_of
from moe_core.expert_names import FUSED, INTERLEAVED, PROJECTIONS, expert_name, is_draft, is_of_experts, layer_index
from moe_core.payloads import bias_name
from moe_core.quant import StoredLayer, StoredScheme
from moe_core.weights.checkpoint import TensorSource
from moe_core.weights.storages import BIAS, CANONICAL, TENSORS, StoredTensor

#: Spellings of the projections: of gate and up, one after the other or together, and of down.
_GATED = (
    *((word,) for word in FUSED if word not in INTERLEAVED),
    *zip(PROJECTIONS["gate"], PROJECTIONS["up"], strict=True),
)
#: Without a gate the first of `w1` and `w2` is the up projection.
_NOT_GATED = (("up_proj",), ("w1",), ("input_linear",))
_DOWN = tuple((word,) for word in PROJECTIONS["down"])


@attrs.frozen(kw_only=True)
class Part:
    """One stored matrix of each expert, with its scales.

    Attributes:
        projection: `w13` or `w2`.
        halves: What it holds: (0,) gate, (1,) up, (0, 1) both; (0,) for `w2` and layers without gate.
        base: Name before the suffixes; holds `{}` for the expert unless `stacked`.
        stacked: All experts lie in one tensor, the expert first.
        storage: How it is stored, and what the numbers are.
        tensors: Its stored tensors.
        canonical: The names are canonical ones (`w13_scale`, `b13`), not a checkpoint's.
    """

    projection: str
    halves: tuple[int, ...]
    base: str
    stacked: bool
    storage: StoredScheme
    tensors: tuple[StoredTensor, ...]
    canonical: bool = False

    def spellings(self, tensor: StoredTensor, expert: int) -> Iterator[str]:
        """Names that `tensor` of one expert may have, in the order of preference."""
        if self.canonical:
            yield bias_name(self.base) if tensor.role == "bias" else _joined(self.base, tensor.suffixes[0])
            return
        for suffix in tensor.suffixes:
            if not self.stacked:
                yield f"{self.base.format(expert)}.{suffix}"
            else:
                yield f"{self.base}.{suffix}"
                yield f"{self.base}_{suffix}"
                yield _joined(self.base, suffix.removeprefix("weight_"))

    def find(self, names: frozenset[str], tensor: StoredTensor, expert: int) -> str | None:
        """The name of `tensor` of one expert among `names`, or None."""
        return next((name for name in self.spellings(tensor, expert) if name in names), None)


def _joined(base: str, suffix: str) -> str:
    """`gate_up_proj` and `weight` -> `gate_up_proj`; with `scale_inv` -> `gate_up_proj_scale_inv`."""
    return base if suffix == "weight" else f"{base}_{suffix}"


def experts_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Dotted names of all modules with experts, sorted by layer: `model.layers.3.mlp.experts`."""
    found = {parts.module for name in names if (parts := expert_name(name))}
    return tuple(sorted(found, key=_by_number))


def experts_module(names: Iterable[str], layer: int | str) -> str:
    """The experts module of one layer.

    Args:
        names: Names of the checkpoint's tensors.
        layer: Index in the model's own stack, or a part of the module's name that says which (`mtp.layers.0`).

    Raises:
        WeightsError: No module fits, or several do; lists those that are there.
    """
    return choose_module(experts_modules(names), layer)


def choose_module(modules: Collection[str], layer: int | str) -> str:
    """The one of all experts modules that `experts_module` finds, for callers with many layers; errors as there."""
    path = f"layers.{layer}" if isinstance(layer, int) else layer
    if isinstance(layer, int):
        fitting = [module for module in modules if layer_index(module) == layer and not is_draft(module)]
    else:
        fitting = [module for module in modules if f".{path}." in f".{module}."]
    if len(fitting) != 1:
        problem = "several experts modules fit" if fitting else "no experts module fits"
        raise WeightsError(f"{problem} {path!r}; there are {_some(fitting or modules) or 'none'}")
    return fitting[0]


def names_below(source: TensorSource, module: str) -> frozenset[str]:
    """Names of the tensors of experts below a module, which may hold their router too.

    Raises:
        WeightsError: There are none; lists the modules with experts.
    """
    below = frozenset(filter(is_of_experts, source.under(module)))
    if not below:
        found = _some(experts_modules(source.names)) or "no module"
        raise WeightsError(f"no tensors under {module}; experts lie in {found}")
    return below


def find_parts(
    below: Collection[str], module: str, stored: StoredLayer, *, gated: bool, bias: bool
) -> tuple[Part, ...]:
    """The stored matrices of the experts in `module`.

    Args:
        below: Names of the tensors below the module; there are some.
        module: Dotted name of the experts module.
        stored: How both projections are stored.
        gated: Whether there is a gate.
        bias: Whether every projection has a bias.

    Raises:
        WeightsError: The names are of no known form; lists what is there.
    """
    parts = []
    for projection, spellings, storage in (
        ("w13", _GATED if gated else _NOT_GATED, stored.w13),
        ("w2", _DOWN, stored.w2),
    ):
        found = next(
            (
                (words, stacked)
                for words in spellings
                for stacked in (False, True)
                if all(_is_there(below, module, word, stacked) for word in words)
            ),
            None,
        )
        if found is None:
            known = ", ".join(" + ".join(words) for words in spellings)
            raise WeightsError(f"{module}: {projection} is stored under none of {known}; there are {_some(below)}")
        words, stacked = found
        tensors = (*TENSORS[storage.storage], *((BIAS,) if bias else ()))
        for index, word in enumerate(words):
            together = projection == "w13" and gated and len(words) == 1
            parts.append(
                Part(
                    projection=projection,
                    halves=(0, 1) if together else (index,),
                    base=f"{module}.{word}" if stacked else f"{module}.{{}}.{word}",
                    stacked=stacked,
                    storage=storage,
                    tensors=tensors,
                )
            )
    return tuple(parts)


def canonical_parts(stored: StoredLayer, *, gated: bool, bias: bool) -> tuple[Part, ...]:
    """The same for canonical tensors in memory."""
    tensors = (*CANONICAL, *((BIAS,) if bias else ()))
    return tuple(
        Part(
            projection=projection,
            halves=(0, 1) if gated and projection == "w13" else (0,),
            base=projection,
            stacked=True,
            storage=storage,
            tensors=tensors,
            canonical=True,
        )
        for projection, storage in (("w13", stored.w13), ("w2", stored.w2))
    )


def _is_there(below: Collection[str], module: str, word: str, stacked: bool) -> bool:
    middle = "" if stacked else r"\d+\."
    pattern = re.compile(rf"{re.escape(module)}\.{middle}{word}{'([._].+)?' if stacked else '[.].+'}")
    return any(pattern.fullmatch(name) for name in below)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts `layers.10` behind `layers.9`."""
    # Not every digit is one of a number, and Python makes none of thousands of them.
    return [(int(word), "") if re.fullmatch(r"\d{1,9}", word) else (-1, word) for word in name.split(".")]


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names, key=_by_number)
    return some_of(ordered)
