"""The words of the quantizer, free of torch: what can be written, in whose layout, and what short words mean."""

from __future__ import annotations

from moe_core.errors import SpecError, UnknownNameError, did_you_mean
from moe_core.quant import (
    FP8_BLOCK128,
    MXFP4_W4A16,
    NVFP4,
    SCHEMES,
    W4A4_INT4,
    W4A8_INT8,
    W8A8_INT8,
    QuantScheme,
    StoredScheme,
)

#: Ecosystem -> what can be written in its layouts. A scheme's usual ecosystem is the first that has it.
WRITTEN: dict[str, tuple[StoredScheme, ...]] = {
    "transformers": (StoredScheme(FP8_BLOCK128, "scaled"),),
    "modelopt": (StoredScheme(NVFP4, "modelopt_nvfp4"),),
    "compressed_tensors": (
        StoredScheme(W8A8_INT8, "scaled"),
        StoredScheme(NVFP4, "compressed_tensors_nvfp4"),
        StoredScheme(MXFP4_W4A16, "compressed_tensors_mxfp4"),
    ),
    "modelslim": (
        StoredScheme(W8A8_INT8, "modelslim_w8a8"),
        StoredScheme(W4A8_INT8, "modelslim_w4a8"),
        StoredScheme(W4A4_INT4, "modelslim_w4a4"),
    ),
}


def _ecosystems() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for ecosystem, written in WRITTEN.items():
        for stored in written:
            found[stored.scheme.label] = (*found.get(stored.scheme.label, ()), ecosystem)
    return found


#: Name of a scheme -> ecosystems whose layout of it can be written, the usual one first.
WRITABLE = _ecosystems()
#: Short word -> name of the scheme that it stands for. Elsewhere `mxfp4` is a scheme with quantized activations, too.
SHORT_WORDS: dict[str, str] = {
    "fp8_block": FP8_BLOCK128.label,
    "w4a8": W4A8_INT8.label,
    "w4a4": W4A4_INT4.label,
    "mxfp4": MXFP4_W4A16.label,
}


def scheme_name(word: str) -> str:
    """The name of the scheme that `word` says, or stands for.

    Raises:
        SpecError: A scheme that is read, but not written.
        UnknownNameError: No scheme.
    """
    name = SHORT_WORDS.get(word, word)
    if name in WRITABLE:
        return name
    if name in SCHEMES:
        raise SpecError(f"scheme {name!r} is read, but not written; written are {', '.join(WRITABLE)}")
    short = ", ".join(f"{word} for {name}" for word, name in SHORT_WORDS.items())
    # What is meant everywhere is more likely than what is said here alone.
    spellings = () if did_you_mean(word, WRITABLE) else SHORT_WORDS
    raise UnknownNameError("scheme to write", word, WRITABLE, hint=f"In short: {short}.", spellings=spellings)


def ecosystem_of(scheme: str, ecosystem: str | None) -> str:
    """The ecosystem to write `scheme` for: the given one, or the usual one.

    Raises:
        UnknownNameError: No such scheme.
        SpecError: That ecosystem's layout of the scheme cannot be written.
    """
    name = scheme_name(scheme)
    known = WRITABLE[name]
    if ecosystem is not None and ecosystem not in known:
        raise SpecError(f"scheme {name!r} is written for {' or '.join(known)}, not for {ecosystem!r}")
    return ecosystem or known[0]


def stored_for(ecosystem: str, scheme: QuantScheme) -> StoredScheme:
    """A scheme with the word for an ecosystem's layout of it; it must be one of `WRITTEN`."""
    return next(stored for stored in WRITTEN[ecosystem] if stored.scheme == scheme)
