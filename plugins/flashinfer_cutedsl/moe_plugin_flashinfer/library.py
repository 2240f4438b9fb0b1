"""FlashInfer itself: loaded when a route is bound, its functions found and checked.

Where the weights lie on a CPU no kernel of the library can run: there `emulation` computes what the library would, so
that everything else is the same code on every machine. Releases differ in which keywords they have; what a release
switches on unless it is told not to is switched off, and one that lacks a keyword of a call is refused by name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch

from moe_core.errors import PluginError
from moe_core.kernel_library import import_library, require_keywords
from moe_core.plan import Route
from moe_plugin_flashinfer.machine import CUTLASS_DSL, FLASHINFER

#: A function of the library, or its class, that takes keywords only.
LibraryFunction: TypeAlias = Callable[..., Any]

#: Keywords of releases that do something else unless told not to, and what they are told. Without this one an
#: environment variable decides how scales are searched.
_SPARED = {"nvfp4_4over6": None}
_QUANTIZES = ("a", "mask", "a_global_sf")
_RUN = ("x", "x_sf", "token_selected_experts", "token_final_scales", "fc2_input_scale")
_OPERANDS = ("w1_weight", "w1_weight_sf", "w1_alpha", "w2_weight", "w2_weight_sf", "w2_alpha")

#: Public name in `flashinfer` -> keywords of every call of this plugin.
CALLS: dict[str, tuple[str, ...]] = {
    "scaled_fp4_grouped_quantize": _QUANTIZES,
    "silu_and_mul_scaled_nvfp4_experts_quantize": _QUANTIZES,
    "gemm.grouped_gemm_nt_masked": (
        *("lhs", "rhs", "out", "masked_m", "ab_dtype", "sf_dtype", "c_dtype", "sf_vec_size", "alpha", "alpha_dtype"),
    ),
    "fp4_quantize": ("input", "global_scale", "sf_vec_size", "sf_use_ue8m0", "is_sf_swizzled_layout"),
    "fused_moe.CuteDslMoEWrapper": (
        *("num_experts", "top_k", "hidden_size", "intermediate_size", "num_local_experts", "local_expert_offset"),
        *("use_cuda_graph", "max_num_tokens", "output_dtype", "device"),
    ),
}
#: The wrapper's method, called like a function.
RUN = (*_RUN, *_OPERANDS)


@attrs.frozen(eq=False)
class Library:
    """What provides the functions on one kind of device.

    Attributes:
        find: Public name -> function; raises `AttributeError` or `ImportError` where there is none.
    """

    find: Callable[[str], LibraryFunction]

    def function(self, name: str, *more: str) -> LibraryFunction:
        """A function of `CALLS`, checked, with what has to be switched off in place.

        Args:
            name: Public name.
            *more: Keywords that this route passes besides.

        Raises:
            PluginError: The release has no such function, or one that takes other keywords.
        """
        try:
            function = self.find(name)
        except (AttributeError, ImportError) as error:
            raise PluginError(
                f"flashinfer has no {name} ({error}); it needs its compiler, {CUTLASS_DSL.install}, beside a release "
                f"that has it: {FLASHINFER.install}"
            ) from error
        known = inspect.signature(function).parameters
        spared = {keyword: value for keyword, value in _SPARED.items() if keyword in known}
        checked = require_keywords(function, *CALLS[name], *more, *spared, of=FLASHINFER)
        return functools.partial(checked, **spared) if spared else checked


def load(device: torch.device) -> Library:
    """The library for tensors on `device`.

    Raises:
        PluginError: It cannot be imported, for whatever reason.
    """
    if device.type == "cpu":
        from moe_plugin_flashinfer.emulation import find

        return Library(find)
    import_library(FLASHINFER)
    return Library(_installed)


def _installed(name: str) -> LibraryFunction:
    module, _, function = f"{FLASHINFER.module}.{name}".rpartition(".")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def compiled(route: Route, call: Callable[[], None]) -> None:
    """Make the first call of a route, which compiles its kernels.

    Raises:
        PluginError: It fails, before ranks meet in a collective.
    """
    try:
        call()
    except Exception as error:
        raise PluginError(
            f"runner {route.runner.full_name}: flashinfer could not compile or run its kernels: "
            f"{type(error).__name__}: {error}"
        ) from error
