"""The closed words of the project and the validators that keep value objects inside them, by raising `SpecError`.

Names of plugins, dispatchers and runners are open, and device types for who names them; everything else in this file
is closed, so that a typing error is an error and two plugins mean the same thing by the same word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import attrs

from moe_core.errors import SpecError, did_you_mean

#: `(instance, attribute, value)`: raises `SpecError` for a value outside of a field's vocabulary.
Validator: TypeAlias = "Callable[[Any, attrs.Attribute[Any], Any], None]"

#: Matches every value of a field in a declared pattern.
ANY = "any"

#: How dispatched tokens lie in memory; with it, who applies the top-k weights.
FORMATS = ("standard", "contiguous", "masked", "fused")
#: Element types of a layer's input and output.
FLOAT_DTYPES = ("fp32", "bf16", "fp16")
#: Element types of tokens on the wire.
TOKEN_DTYPES = (*FLOAT_DTYPES, "fp8", "int8", "int4", "nvfp4", "mxfp8", "mxfp4")
#: How the scales of quantized tokens lie beside them.
SCALE_LAYOUTS = (
    "none",  # unquantized tokens
    "row_128",  # fp32 [rows, H/128], row-major
    "column_128",  # fp32 [rows, H/128], stride 1 along rows, row stride padded to 16 bytes
    "ue8m0_128",  # int32 words of four exponent bytes along H, column-major
    "tensor",  # one fp32 for all rows
    "token",  # fp32 [rows]
    "block_16",  # e4m3 per 16 channels and one calibrated fp32 scale for all
    "block_16_tiled",  # the same, each expert's in tiles of 128 rows by 4 scales, see `TokenDtype`
    "e8m0_32",  # one exponent byte per 32 channels
)
#: Those with a scale that is not among a token's own: the runner has it from its checkpoint, the dispatcher from there.
CALIBRATED_LAYOUTS = ("block_16", "block_16_tiled")
#: The weight layout that several plugins read: weights as they are stored. Every other one is its plugin's own.
CANONICAL = "canonical"
#: What a workload is; `any` stands for a layer that does not tell its phases apart.
PHASES = (ANY, "prefill", "decode", "verify")
#: Declared speed class of a runner, slowest first; ranks where no measurement does.
TIERS = ("reference", "generic", "tuned", "fused")
#: Where a rank's tokens are: its own share, or all tokens of the group on every rank.
TOKEN_PLACEMENTS = ("distributed", "replicated")
#: Id space in which a dispatcher takes ids.
ID_SPACES = ("global", "local")
#: Sizes of a request, on one rank where that differs, that a declaration may speak about.
LIMIT_FIELDS = (
    "top_k",
    "num_experts",
    "num_local_experts",
    "hidden_size",
    "intermediate_size",
    "ep_size",
    "tp_size",
    "max_tokens",  # the workload's maximum per rank
    "max_rows",  # rows that may then reach a rank, one per (token, local expert)
)
#: torch's device types that the core knows; plugins name further ones, `PluginSpec.device_types`.
DEVICE_TYPES = ("cpu", "cuda", "npu", "xpu", "mps", "meta")

#: Every code a `Reason` may carry.
REASON_CODES = (
    "excluded",  # the user excluded it, alone or with its plugin
    "pin",  # another combination was pinned
    "package",  # a required distribution is missing
    "version",  # a required distribution is too old
    "program",  # a program that a required distribution starts is missing
    "variable",  # an environment variable of a library
    "device",  # other device type
    "arch",  # other device generation
    "scheme",  # quantization scheme
    "activation",  # activation variant
    "dtype",  # layer dtype
    "bias",  # expert biases
    "weighting",  # router weight on the input instead of the output
    "post-norm",  # norm after each expert
    "phase",  # workload phase
    "limit",  # a declared size limit
    "tokens",  # distributed or replicated tokens
    "graph",  # graph capture
    "overlap",  # combine beginning before the second projection ends
    "determinism",  # bitwise repeatability
    "format",  # dispatcher and runner disagree about memory
    "dispatch-dtype",  # nothing that can be sent can be read
    "alignment",  # row alignment
    "weight-layout",  # phases need different weight layouts
)


def require_word(value: object, words: Iterable[str], where: str) -> None:
    """Raise `SpecError` unless `value` is one of `words`; `where` names the object and the field."""
    known = tuple(words)
    if value not in known:
        meant = did_you_mean(value, known) if isinstance(value, str) else ""
        raise SpecError(f"{where}: {value!r} is not one of {', '.join(known)}{meant}")


def _place(instance: Any, attribute: attrs.Attribute[Any]) -> str:
    name = getattr(instance, "name", "")
    label = f" {name[:_LONGEST_NAME]!r}" if isinstance(name, str) and name else ""
    return f"{type(instance).__name__}{label}, field {attribute.name!r}"


def one_of(*words: str) -> Validator:
    """An attrs validator: the value is one of `words`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in words:
            require_word(value, words, _place(instance, attribute))

    return check


def each_one_of(*words: str) -> Validator:
    """An attrs validator: every element of a tuple is one of `words`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        _require_tuple(value, instance, attribute)
        for element in value:
            if element not in words:
                require_word(element, words, _place(instance, attribute))

    return check


def at_least(minimum: int) -> Validator:
    """An attrs validator: an int (not a bool) of at least `minimum`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            place = _place(instance, attribute)
            raise SpecError(f"{place}: expected an int >= {minimum}, got {value!r}", (attribute.name,))

    return check


def instance_of(*types: type) -> Validator:
    """An attrs validator: the value is of one of `types`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, types):
            names = " or ".join(t.__name__ for t in types)
            raise SpecError(f"{_place(instance, attribute)}: expected {names}, got {value!r}")

    return check


def tuple_of(element_type: type) -> Validator:
    """An attrs validator: a tuple whose elements are all of `element_type`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        _require_tuple(value, instance, attribute)
        for element in value:
            if not isinstance(element, element_type):
                # A declaration in the wrong field fills a screen.
                found = repr(element) if isinstance(element, str | int) else f"of type {type(element).__name__}"
                expected = f"expected a tuple of {element_type.__name__}"
                raise SpecError(f"{_place(instance, attribute)}: {expected}, got the element {found}")

    return check


def _require_tuple(value: Any, instance: Any, attribute: attrs.Attribute[Any]) -> None:
    if not isinstance(value, tuple):
        advice = "its order counts: write a tuple" if isinstance(value, AbstractSet) else f"write ({value!r},)"
        raise SpecError(f"{_place(instance, attribute)}: expected a tuple of alternatives, got {value!r}; {advice}")


def is_line(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """An attrs validator: a text of one line that a terminal can show, "" included."""
    if not isinstance(value, str) or not value.isprintable():
        raise SpecError(f"{_place(instance, attribute)}: expected one printable line of text, got {value!r}")


#: Tables and messages say names whole.
_LONGEST_NAME = 64
_NAME = re.compile(f"[A-Za-z0-9_][A-Za-z0-9_-]{{0,{_LONGEST_NAME - 1}}}")


def is_name(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """An attrs validator: letters, digits, `_` and `-`, so that `plugin:name.mode` can be taken apart again.

    A plain text: members of an enumeration are written into messages by another name.
    """
    if type(value) is not str or not _NAME.fullmatch(value):
        expected = f"expected letters, digits, '_' and '-', at most {_LONGEST_NAME}"
        raise SpecError(f"{_place(instance, attribute)}: {expected}, got {repr(value)[:_LONGEST_NAME]}")


def is_arch(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """An attrs validator: device generations as they are compared, lower-case and without separators: `sm90`, `a3`."""
    _require_lower_case(instance, attribute, value, f"[a-z0-9]{{0,{_LONGEST_NAME}}}", "'sm90' or 'a3'")


def is_device_type(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """An attrs validator: device types as torch spells them, such as `npu`; who knows all plugins knows which exist."""
    _require_lower_case(instance, attribute, value, f"[a-z][a-z0-9_]{{0,{_LONGEST_NAME - 1}}}", "'cuda' or 'npu'")


def _require_lower_case(
    instance: Any, attribute: attrs.Attribute[Any], value: Any, pattern: str, examples: str
) -> None:
    """Raise `SpecError` unless a word, or each of a tuple of them, is a plain text of this pattern."""
    for word in value if isinstance(value, tuple) else (value,):
        # As of `is_name`.
        if type(word) is not str or not re.fullmatch(pattern, word):
            expected = f"expected lower-case like {examples}, at most {_LONGEST_NAME} letters"
            raise SpecError(f"{_place(instance, attribute)}: {expected}, got {repr(word)[:_LONGEST_NAME]}")


def as_tuple(value: Any) -> Any:
    """An attrs converter for ordered alternatives; what is none stays as it is, for the validator to name its field.

    A bare string is not a tuple of letters, and the order of a set differs from process to process.
    """
    if isinstance(value, (str, AbstractSet)) or not isinstance(value, Iterable):
        return value
    return tuple(value)


def as_sorted_tuple(value: Any) -> Any:
    """An attrs converter for unordered alternatives: sorted and without repetition; equal sets are equal values."""
    elements = tuple(value) if isinstance(value, AbstractSet) else as_tuple(value)
    try:
        return tuple(sorted(set(elements))) if isinstance(elements, tuple) else value
    except TypeError:
        return elements


def arch_order(arch: str) -> list[tuple[int, str]]:
    """What generations are sorted by: letters, then numbers as numbers, so that `sm90` is before `sm100`."""
    # Every second part is a number. The longer of two is the larger one, and Python makes none of thousands of digits.
    parts = enumerate(re.split("([0-9]+)", arch))
    return [(len(part.lstrip("0")), part.lstrip("0")) if place % 2 else (0, part) for place, part in parts]


def as_sorted_archs(value: Any) -> Any:
    """An attrs converter as `as_sorted_tuple`, in the order of generations."""
    archs = as_sorted_tuple(value)
    is_sorted = isinstance(archs, tuple) and all(isinstance(arch, str) for arch in archs)
    return tuple(sorted(archs, key=arch_order)) if is_sorted else archs
