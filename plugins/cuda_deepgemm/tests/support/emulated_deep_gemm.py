"""DeepGEMM on a CPU: the vendor's own Python over a compiled layer that computes in torch and keeps its rules.

Where a wheel is unpacked (`make deepgemm-vendor`), its Python files check every call and call what is here instead of
their compiled module. Where none is, a module of the same functions stands in, and no vendor's signature was asked.

Rules that the compiled layer asserts, and what it leaves undefined, are those of DeepGEMM 2.5 on Hopper: a block of 128
contiguous rows belongs to the expert of its first row, or groups are told by their ends and begin at multiples of 128;
blocks of rows are multiples of 128; rows past a count are garbage.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TILE = 128
#: Variable with the folder of the unpacked wheel, "" or unset for none.
VENDOR = "MOE_PLUGIN_DEEPGEMM_VENDOR"
Tensor = torch.Tensor

#: Calls of the compiled layer since the start: name, and the shapes of `a`.
CALLS: list[tuple[str, tuple[int, ...]]] = []


class VendorRule(RuntimeError):
    """What the compiled layer asserts."""


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise VendorRule(f"Assertion error: {rule}")


def _check(a: Tensor, b: Tensor, d: Tensor) -> None:
    for name, tensor in (("a", a), ("b", b), ("d", d)):
        _require(tensor.is_contiguous(), f"{name} is contiguous")
        _require(tensor.data_ptr() % 16 == 0, f"{name} begins at a multiple of 16 bytes")
        _require(tensor.stride(-2) * tensor.itemsize % 16 == 0, f"rows of {name} begin at multiples of 16 bytes")
    _require(d.dtype == torch.bfloat16, "d is bf16")
    _require(a.shape[-1] == b.shape[-1] and a.shape[-1] % 64 == 0, "k % 64 == 0, and that of a and b")
    _require(d.shape == (*a.shape[:-1], b.shape[1]), "the shape of d")


def _contiguous(a: Tensor, b: Tensor, d: Tensor, layout: Tensor, by_end: bool, product: Callable[..., Tensor]) -> None:
    groups = b.shape[:1] if by_end else a.shape[:1]
    _require(layout.dtype == torch.int32 and layout.shape == groups and layout.is_contiguous(), "grouped_layout")
    _require(a.shape[0] % TILE == 0, "rows are whole tiles")
    if by_end:
        start = 0
        for group, end in enumerate(layout.tolist()):
            # A count of rows below zero would be a huge one.
            _require(start <= end <= a.shape[0], "groups end where they begin or later, and inside the rows")
            after = -(-end // TILE) * TILE
            # Whole tiles are written.
            d[start:after] = torch.nan
            d[start:end] = product(slice(start, after), group)[: end - start].to(d.dtype)
            start = after
        d[start:] = torch.nan
        return
    for first in range(0, a.shape[0], TILE):
        rows, group = slice(first, first + TILE), int(layout[first])
        if group >= 0:
            d[rows] = product(rows, group).to(d.dtype)


def _masked(a: Tensor, d: Tensor, masked_m: Tensor, expected_m: int, product: Callable[..., Tensor]) -> None:
    _require(masked_m.dtype == torch.int32 and masked_m.shape == a.shape[:1] and masked_m.is_contiguous(), "masked_m")
    _require(type(expected_m) is int and expected_m > 0, "expected_m > 0")
    _require(a.shape[1] % TILE == 0, "blocks of rows are whole tiles")
    for group, count in enumerate(masked_m.tolist()):
        # Whole tiles are written.
        rows = slice(0, -(-count // TILE) * TILE)
        d[group, rows] = torch.nan
        d[group, :count] = product((group, rows), group).to(d.dtype)[:count]


def bf16_contiguous(a: Tensor, b: Tensor, d: Tensor, layout: Tensor, by_end: bool) -> None:
    """bf16 rows grouped by expert."""
    _require(a.dtype == b.dtype == torch.bfloat16, "a and b are bf16")
    _check(a, b, d)
    _contiguous(a, b, d, layout, by_end, lambda rows, group: a[rows].float() @ b[group].float().T)


def bf16_masked(a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
    """bf16 blocks of rows."""
    _require(a.dtype == b.dtype == torch.bfloat16, "a and b are bf16")
    _check(a, b, d)
    _masked(a, d, masked_m, expected_m, lambda rows, group: a[rows].float() @ b[group].float().T)


def _spread(scales: Tensor, rows: int, columns: int, row_group: int) -> Tensor:
    """fp32 scales of blocks, or packed exponents of rows, as fp32 for every element."""
    if scales.dtype == torch.int32:
        exponents = (scales[..., None] >> torch.tensor([0, 8, 16, 24])) & 0xFF
        scales = torch.exp2(exponents.flatten(-2).float() - 127)
    return scales.repeat_interleave(row_group, -2).repeat_interleave(TILE, -1)[..., :rows, :columns]


def _check_scales(codes: Tensor, scales: Tensor, row_group: int) -> None:
    _require(codes.dtype == torch.float8_e4m3fn, "a and b are e4m3")
    _require(scales.dtype in (torch.float32, torch.int32), "scales are fp32 or packed")
    _require(scales.shape[-2] == -(-codes.shape[-2] // row_group), "scales have a row for each group of rows")
    packed = scales.dtype == torch.int32
    columns = scales.shape[-1] * TILE * (4 if packed else 1)
    _require(columns >= codes.shape[-1], "scales have a column for each group of 128 channels")
    aligned = -(-scales.shape[-2] // 4) * 4
    _require(
        not packed or (scales.stride(-2) == 1 and scales.stride(-1) == aligned),
        "packed scales lie along the rows, aligned",
    )


def _product(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, recipe: Any) -> Callable[..., Tensor]:
    """Rows times the matrix of a group; only what is multiplied becomes fp32, since blocks are mostly empty."""
    b_rows = 1 if a_sf.dtype == torch.int32 else TILE
    _require(tuple(recipe or (1, b_rows, TILE)) == (1, b_rows, TILE), "the recipe")
    _check_scales(a, a_sf, 1)
    _check_scales(b, b_sf, b_rows)

    def product(rows: Any, group: int) -> Tensor:
        left, right = a[rows].float(), b[group].float()
        return (left * _spread(a_sf[rows], *left.shape, 1)) @ (right * _spread(b_sf[group], *right.shape, b_rows)).T

    return product


def fp8_contiguous(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, d: Tensor, layout: Tensor, by_end: bool, recipe: list[int] | None
) -> None:
    """fp8 rows grouped by expert, each operand with its scales."""
    _check(a, b, d)
    _contiguous(a, b, d, layout, by_end, _product(a, a_sf, b, b_sf, recipe))


def fp8_masked(
    a: Tensor,
    a_sf: Tensor,
    b: Tensor,
    b_sf: Tensor,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: list[int] | None,
) -> None:
    """fp8 blocks of rows."""
    _check(a, b, d)
    _masked(a, d, masked_m, expected_m, _product(a, a_sf, b, b_sf, recipe))


#: Kernels are operators of torch, so that what they read on the host is their own business, as on a device.
_LIBRARY = torch.library.Library("emulated_deep_gemm", "DEF")
_OPERANDS = {"bf16": "Tensor a, Tensor b", "fp8": "Tensor a, Tensor a_sf, Tensor b, Tensor b_sf"}
_GROUPS = {"contiguous": "Tensor layout, bool by_end", "masked": "Tensor masked_m, int expected_m"}
for _dtype, _operands in _OPERANDS.items():
    for _format, _groups in _GROUPS.items():
        _recipe = ", int[]? recipe" if _dtype == "fp8" else ""
        _LIBRARY.define(f"{_dtype}_{_format}({_operands}, Tensor(d!) d, {_groups}{_recipe}) -> ()")
        _LIBRARY.impl(f"{_dtype}_{_format}", globals()[f"{_dtype}_{_format}"], "CPU")
KERNELS = torch.ops.emulated_deep_gemm


class Extension:
    """The compiled module: functions that compute, and for all other names some that return nothing."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args: Any, **kwargs: Any) -> Any:
            if name not in self._functions:
                return None
            if args and isinstance(args[0], (tuple, Tensor)):
                CALLS.append((name, tuple((args[0] if isinstance(args[0], Tensor) else args[0][0]).shape)))
            return self._functions[name](*args, **kwargs)

        return function


def alignment() -> int:
    return TILE


def _first(rest: tuple[Any, ...]) -> bool:
    """Whether groups are told by their ends, which is the next argument of builds that have it."""
    return bool(rest[:1] and rest[0])


def _functions(flat: bool) -> dict[str, Callable[..., Any]]:
    """By name; `flat` where the vendor's Python takes the pairs of operands apart."""

    def contiguous(a: Any, b: Any, d: Any, layout: Any, recipe: Any, *rest: Any) -> None:
        # Before it are two recipes of one operand, the compiled dimensions and a switch for casts.
        KERNELS.fp8_contiguous(*a, *b, d, layout, _first(rest[4:]), recipe)

    def masked(a: Any, b: Any, d: Any, masked_m: Any, expected_m: Any, recipe: Any = None, *_: Any) -> None:
        KERNELS.fp8_masked(*a, *b, d, masked_m, expected_m, recipe)

    def paired(function: Callable[..., None]) -> Callable[..., None]:
        return lambda a, a_sf, b, b_sf, *rest: function((a, a_sf), (b, b_sf), *rest)

    return {
        "m_grouped_bf16_gemm_nt_contiguous": lambda a, b, d, layout, _, *rest: KERNELS.bf16_contiguous(
            a, b, d, layout, _first(rest)
        ),
        "m_grouped_bf16_gemm_nt_masked": lambda a, b, d, m, e, *_: KERNELS.bf16_masked(a, b, d, m, e),
        "m_grouped_fp8_fp4_gemm_nt_contiguous": paired(contiguous) if flat else contiguous,
        "m_grouped_fp8_fp4_gemm_nt_masked": paired(masked) if flat else masked,
        "get_mk_alignment_for_contiguous_layout": alignment,
    }


def install() -> types.ModuleType:
    """`deep_gemm` in this process, once: the wheel's in the folder `VENDOR`, else a stand-in.

    The fakes stay in `sys.modules`, since the wheels import parts of themselves late.
    """
    if "deep_gemm" not in sys.modules:
        site = os.environ.get(VENDOR)
        sys.modules["deep_gemm"] = _of_wheel(Path(site)) if site else _stand_in()
    return sys.modules["deep_gemm"]


def _of_wheel(site: Path) -> types.ModuleType:
    stubs = site / "deep_gemm" / "_C.pyi"
    if stubs.exists():
        sys.modules["deep_gemm._C"] = _pybind_module(stubs)
    else:
        loader = types.ModuleType("tvm_ffi")
        loader.load_module = lambda path: Extension(_functions(flat=True))  # type: ignore[attr-defined]
        sys.modules["tvm_ffi"] = loader
    sys.path.insert(0, str(site))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("deep_gemm")
    finally:
        sys.path.remove(str(site))


def _stand_in() -> types.ModuleType:
    """A module with the functions that the plugin calls, taking their keywords."""
    module = types.ModuleType("deep_gemm")
    module.__file__, module.__version__ = "emulated", "0"  # type: ignore[attr-defined]
    extension = Extension(_functions(flat=False))

    def contiguous_bf16(a, b, d, grouped_layout, use_psum_layout=False):  # type: ignore[no-untyped-def]
        extension.m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout, "nk", use_psum_layout)

    def masked_bf16(a, b, d, masked_m, expected_m):  # type: ignore[no-untyped-def]
        extension.m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m)

    def contiguous_fp8(a, b, d, grouped_layout, recipe=None, use_psum_layout=False):  # type: ignore[no-untyped-def]
        unused = None, None, "nk", False
        extension.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, grouped_layout, recipe, *unused, use_psum_layout)

    def masked_fp8(a, b, d, masked_m, expected_m, recipe=None):  # type: ignore[no-untyped-def]
        extension.m_grouped_fp8_fp4_gemm_nt_masked(a, b, d, masked_m, expected_m, recipe)

    module.m_grouped_bf16_gemm_nt_contiguous = contiguous_bf16  # type: ignore[attr-defined]
    module.m_grouped_bf16_gemm_nt_masked = masked_bf16  # type: ignore[attr-defined]
    module.m_grouped_fp8_gemm_nt_contiguous = contiguous_fp8  # type: ignore[attr-defined]
    module.fp8_m_grouped_gemm_nt_masked = masked_fp8  # type: ignore[attr-defined]
    module.get_mk_alignment_for_contiguous_layout = alignment  # type: ignore[attr-defined]
    return module


def _pybind_module(stubs: Path) -> types.ModuleType:
    """What the wheel's stub file says its compiled module has, with these signatures, as pybind11 would keep them."""
    module = types.ModuleType("deep_gemm._C")
    exec(compile(stubs.read_text(), stubs.name, "exec", dont_inherit=True), module.__dict__)
    extension = Extension(_functions(flat=False))
    declared = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    for name, value in declared.items():
        function = _checked(name, inspect.signature(value), extension)
        setattr(module, name, function)
        # Aliases that the stub file leaves out.
        if "fp8_fp4_gemm" in name:
            setattr(module, name.replace("fp8_fp4_gemm", "fp8_gemm"), function)
    return module


def _checked(name: str, signature: inspect.Signature, extension: Extension) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for key, value in bound.arguments.items():
            wanted = typing.get_origin(signature.parameters[key].annotation)
            if wanted is tuple and not isinstance(value, tuple):
                raise TypeError(f"{name}(): incompatible function arguments: {key} is a pair")
        bound.apply_defaults()
        return getattr(extension, name)(*bound.args)

    # As pybind11 tells its signatures: in the first line of the text.
    told = [
        p.name + (": Any" if p.default is p.empty else f": Optional[tuple[int, int]] = {p.default!r}")
        for p in signature.parameters.values()
    ]
    function.__doc__ = f"{name}({', '.join(told)}) -> None\n"
    return function
