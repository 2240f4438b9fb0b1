"""The closed words of the project and the validators that keep value objects inside them.

Names of plugins, dispatchers and runners are open; everything in this file is closed, so that a typing
error is an error and two plugins mean the same thing by the same word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from moe_core.errors import SpecError

#: Matches every value of a field in a declared pattern.
ANY = "any"

#: How dispatched tokens lie in memory; with it, who applies the top-k weights.
FORMATS = ("standard", "contiguous", "masked", "fused")
#: Element types of tokens on the wire and of the layer's input and output.
FLOAT_DTYPES = ("fp32", "bf16", "fp16")
TOKEN_DTYPES = (*FLOAT_DTYPES, "fp8", "int8", "int4", "nvfp4", "mxfp8", "mxfp4")
#: How the scales of quantized tokens lie beside them.
SCALE_LAYOUTS = (
    "none",  # unquantized tokens
    "row_128",  # fp32 [rows, H/128], row-major
    "column_128",  # fp32 [rows, H/128], stride 1 along rows, row stride padded to 16 bytes
    "ue8m0_128",  # int32 words of four exponent bytes along H, column-major
    "tensor",  # one fp32 for all rows
    "token",  # fp32 [rows]
    "block_16",  # e4m3 per 16 channels and one fp32 global scale
    "e8m0_32",  # one exponent byte per 32 channels
)
#: What a workload is; `any` stands for a layer that does not tell its phases apart.
PHASES = (ANY, "prefill", "decode", "verify")
#: Declared speed class of a runner, slowest first; ranks where no measurement does.
TIERS = ("reference", "generic", "tuned", "fused")
#: Where a rank's tokens are: its own share, or all tokens of the group on every rank.
TOKEN_PLACEMENTS = ("distributed", "replicated")
#: Id space in which a dispatcher takes ids.
ID_SPACES = ("global", "local")
DEVICE_TYPES = ("cpu", "cuda", "npu", "xpu", "mps", "meta")

#: Every code a `Reason` may carry.
REASON_CODES = (
    "plugin",  # the plugin failed to load, conflicts, or was excluded
    "excluded",  # the user excluded it
    "pin",  # another combination was pinned
    "package",  # a required distribution is missing
    "version",  # a required distribution is too old
    "device",  # other device type
    "arch",  # other device generation
    "scheme",  # quantization scheme
    "activation",  # activation variant
    "dtype",  # layer dtype
    "bias",  # expert biases
    "weighting",  # router weight on the input
    "post-norm",  # norm after each expert
    "phase",  # workload phase
    "limit",  # a declared size limit
    "tokens",  # distributed or replicated tokens
    "graph",  # graph capture
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
        raise SpecError(f"{where}: {value!r} is not one of {', '.join(known)}")


def _place(instance: Any, attribute: attrs.Attribute[Any]) -> str:
    name = getattr(instance, "name", "")
    label = f" {name!r}" if isinstance(name, str) and name else ""
    return f"{type(instance).__name__}{label}, field {attribute.name!r}"


def one_of(*words: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """An attrs validator: the value is one of `words`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        require_word(value, words, _place(instance, attribute))

    return check


def each_one_of(*words: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """An attrs validator: every element of a tuple is one of `words`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        for element in value:
            require_word(element, words, _place(instance, attribute))

    return check


def at_least(minimum: int) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """An attrs validator: an int (not a bool) of at least `minimum`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise SpecError(f"{_place(instance, attribute)}: expected an int >= {minimum}, got {value!r}")

    return check


def instance_of(*types: type) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """An attrs validator: the value, or every element of a tuple value, is of one of `types`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        for element in value if isinstance(value, tuple) else (value,):
            if not isinstance(element, types):
                names = " or ".join(t.__name__ for t in types)
                raise SpecError(f"{_place(instance, attribute)}: expected {names}, got {element!r}")

    return check


def as_tuple(value: Any) -> tuple[Any, ...]:
    """An attrs converter for ordered alternatives: a bare string is an error, not a tuple of letters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SpecError(f"expected a tuple of alternatives, got {value!r}; write ({value!r},)")
    return tuple(value)


def as_sorted_tuple(value: Any) -> tuple[Any, ...]:
    """An attrs converter for unordered alternatives: sorted, so that equal sets are equal values."""
    return tuple(sorted(as_tuple(value)))
