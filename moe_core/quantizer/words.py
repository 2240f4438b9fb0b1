"""The words of the quantizer, free of torch: what can be written, and in whose layout."""

from __future__ import annotations

from moe_core.errors import SpecError, UnknownNameError

#: Word of a scheme -> ecosystems whose layout of it can be written, the usual one first.
WRITABLE: dict[str, tuple[str, ...]] = {
    "fp8_block": ("transformers",),
    "w8a8_int8": ("compressed_tensors", "modelslim"),
    "w4a8": ("modelslim",),
    "w4a4": ("modelslim",),
    "nvfp4": ("modelopt", "compressed_tensors"),
    "mxfp4": ("compressed_tensors",),
}


def ecosystem_of(scheme: str, ecosystem: str | None) -> str:
    """The ecosystem to write `scheme` for: the given one, or the usual one.

    Raises:
        UnknownNameError: No such scheme.
        SpecError: That ecosystem's layout of the scheme cannot be written.
    """
    if scheme not in WRITABLE:
        raise UnknownNameError("scheme to write", scheme, WRITABLE)
    known = WRITABLE[scheme]
    if ecosystem is not None and ecosystem not in known:
        raise SpecError(f"scheme {scheme!r} is written for {' or '.join(known)}, not for {ecosystem!r}")
    return ecosystem or known[0]
