"""DeepGEMM itself: loaded once, and its functions found and checked when a route is bound.

Several distributions provide `deep_gemm`. They agree in what a function does and differ in what it is called and which
keywords it takes, so that both are looked up in the one that is installed. Nothing of a call is ever left out silently.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import attrs

from moe_core.errors import PluginError
from moe_core.installed import program_path
from moe_core.kernel_library import import_library
from moe_plugin_deepgemm.machine import DEEP_GEMM, NVCC

#: A function of the library with every optional keyword in place; it writes into its argument `d`.
GroupedGemm: TypeAlias = Callable[..., None]

#: Keywords of builds that do more than others unless told not to, and what they are told. Padding is undefined here.
_SPARED = {"ensure_zero_padding": False}
#: Keyword of builds that take the end of each group in place of an expert per row.
ENDS_KEYWORD = "use_psum_layout"


@attrs.frozen
class Call:
    """One function of the library as this plugin calls it.

    Attributes:
        names: What it is called, first the name that most builds have.
        arguments: Keywords of every call.
    """

    names: tuple[str, ...]
    arguments: tuple[str, ...]


_CONTIGUOUS = ("a", "b", "d", "grouped_layout")
_MASKED = ("a", "b", "d", "masked_m", "expected_m")
#: Dtype of the operands and format of the rows -> the call.
CALLS = {
    ("bf16", "contiguous"): Call(("m_grouped_bf16_gemm_nt_contiguous",), _CONTIGUOUS),
    ("bf16", "masked"): Call(("m_grouped_bf16_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked"), _MASKED),
    ("fp8", "contiguous"): Call(
        ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"), (*_CONTIGUOUS, "recipe")
    ),
    ("fp8", "masked"): Call(
        ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked"),
        (*_MASKED, "recipe"),
    ),
}


def grouped_gemm(dtype: str, format_: str) -> GroupedGemm:
    """The installed function for operands of `dtype` (`bf16`, `fp8`) on rows in `format_` (`contiguous`, `masked`).

    Raises:
        PluginError: The library cannot be loaded, has no such function, or one with other arguments.
    """
    call, library = CALLS[dtype, format_], deep_gemm()
    function = next((getattr(library, name) for name in call.names if hasattr(library, name)), None)
    if function is None:
        raise PluginError(f"{_described(library)} has no {' or '.join(call.names)}; {DEEP_GEMM.install}")
    known = parameters(function)
    if known is None:
        # The call that the binding makes tells.
        return function  # type: ignore[no-any-return]
    wrong = [f"takes no {name!r}" for name in call.arguments if name not in known]
    wrong += [f"needs {name!r}" for name, needed in known.items() if needed and name not in call.arguments]
    if wrong:
        raise PluginError(f"{_described(library)}: {call.names[0]} {', '.join(wrong)}; {DEEP_GEMM.install}")
    return functools.partial(function, **{name: value for name, value in _SPARED.items() if name in known})


def takes_group_ends(gemm: GroupedGemm) -> bool:
    """Whether a function for contiguous rows says that it takes the end of each group in place of a row's expert.

    It then finds where a group begins by itself, at the next multiple of the row alignment, and computes nothing past
    the last one. Builds of before 2026 do not take it, and some of later ones refuse it on Hopper when they are called.
    """
    return ENDS_KEYWORD in (parameters(gemm) or ())


def require_row_alignment(alignment: int) -> int:
    """What groups of contiguous rows begin at multiples of for the library, compared with what they are padded to.

    Raises:
        PluginError: Something in this process has set another one: it is a setting of the whole process.
    """
    expected = int(deep_gemm().get_mk_alignment_for_contiguous_layout())
    if alignment % expected:
        raise PluginError(
            f"deep_gemm expects groups of contiguous rows to begin at multiples of {expected}, the route has "
            f"{alignment}: do not call set_mk_alignment_for_contiguous_layout in this process"
        )
    return expected


@functools.cache
def deep_gemm() -> ModuleType:
    """The library, imported.

    Raises:
        PluginError: No compiler, or an import that fails in whatever way: builds fit one release of torch.
    """
    require_compiler()
    return import_library(DEEP_GEMM)


def require_compiler() -> None:
    """What the resolver asks about the machine, of this process: its environment may be another, or was described.

    Raises:
        PluginError: No nvcc where the library looks.
    """
    if NVCC.is_needed(os.environ) and not program_path(NVCC):
        folders = " and ".join(f"{name}={os.environ.get(name, '')}" for name in NVCC.folders)
        raise PluginError(
            f"deep_gemm compiles its kernels with {NVCC.name}, which was not found: {folders}, PATH, {NVCC.default}; "
            f"{NVCC.install}"
        )


def parameters(function: Callable[..., Any]) -> dict[str, bool] | None:
    """Name of each parameter -> whether a call must bring it; None where a function does not tell."""
    function = function.func if isinstance(function, functools.partial) else function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return _documented(function)
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    # Of `(*args, **kwargs)` nothing is known, but what the text says.
    return {p.name: p.default is p.empty for p in named} if named else _documented(function)


def _documented(function: Callable[..., Any]) -> dict[str, bool] | None:
    """What the first line of a compiled function's text says: `name(a: Tensor, b: tuple[int] = (1,)) -> None`."""
    line = (inspect.getdoc(function) or "").partition("\n")[0]
    found = re.fullmatch(r"\w+\((.*)\)(?: -> .*)?", line.strip())
    if found is None:
        return None
    depth, parts = 0, [""]
    for character in found[1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    named = {part.partition(":")[0].partition("=")[0].strip(): "=" not in part for part in parts if part.strip()}
    # `f(*args, **kwargs)` says nothing.
    return None if any(name.startswith("*") for name in named) else named


def _described(library: ModuleType) -> str:
    return f"deep_gemm {getattr(library, '__version__', 'of unknown version')} ({library.__file__})"
