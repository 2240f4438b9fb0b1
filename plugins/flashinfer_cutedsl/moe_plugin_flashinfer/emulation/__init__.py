"""FlashInfer's NVFP4 functions on the CPU: the plugin's real code runs end to end where no Blackwell is.

`find` gives torch versions of the functions that the plugin calls. They are written from the definitions of the formats
and read each operand as the kernels do, from its address and by their own index arithmetic: they share nothing with the
plugin's layout functions, so that a wrong layout, order or scale gives wrong numbers. Every call is bound to the
signature of a release first, asked of its sources where they are installed, else of a shipped list. What the kernels
leave unwritten is poisoned.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from moe_plugin_flashinfer.emulation.functions import functions
from moe_plugin_flashinfer.emulation.fused import ATOMICS
from moe_plugin_flashinfer.emulation.signatures import RELEASES, signatures_of

#: What is taken for granted where the library's sources give a signature and not, or not only, what is computed.
ASSUMED = (
    "The quantizers' products and quotients are exact; the kernels multiply by approximate reciprocals, so that a "
    "number near the middle between two codes may fall on the other one.",
    "Sums are fp32 in any order; silu is fp32, where the fused kernel takes approximate exponentials and reciprocals.",
    "A block whose scale rounds to zero stands for zero; its codes are the largest.",
    "NaN beside numbers in a block becomes the largest code, as the hardware converts it; a block of NaN alone has the "
    "scale NaN.",
    "grouped_gemm_nt_masked reads its factors as fp32 from their memory, whatever axes they have.",
    "grouped_gemm_nt_masked counts dst_signals[e] up once for each multiprocessor, of which there are sm_count.",
    "CuteDslMoEWrapper skips ids outside of its experts, -1 among them.",
    "Fused finalize rounds each slot's weighted row to bf16, and then each sum; two-stage finalize rounds rows to bf16 "
    "and sums in fp32.",
    "Sizes that are no whole tiles of scales are refused: the library does not ask, and computes with other memory.",
)

_RELEASE = contextvars.ContextVar("release", default=RELEASES[-1])


def find(name: str) -> Callable[..., Any]:
    """The emulated function or class of that public name in `flashinfer`, such as `gemm.grouped_gemm_nt_masked`.

    It is that of the last release in `RELEASES`, unless inside `emulated`.

    Raises:
        AttributeError: The release has none, or it is not emulated.
    """
    release = _RELEASE.get()
    found = functions(release)
    if name not in found:
        raise AttributeError(f"flashinfer {release}, emulated, has no {name!r}")
    return found[name]


@contextlib.contextmanager
def emulated(release: str) -> Iterator[None]:
    """Inside, `find` answers for another release.

    Raises:
        ValueError: One that is not emulated.
    """
    functions(release)
    before = _RELEASE.set(release)
    try:
        yield
    finally:
        _RELEASE.reset(before)


@contextlib.contextmanager
def unordered_atomics() -> Iterator[None]:
    """Inside, each call of a fused finalize adds the slots of a token in another order, as a device may."""
    ATOMICS.calls = 0
    try:
        yield
    finally:
        ATOMICS.calls = None


def source(release: str) -> str:
    """Whose word the signatures of a release are."""
    return signatures_of(release).source
