"""What the library's functions take: asked of its sources where they are installed, of a shipped list where not.

The sources are read and not imported: on a CPU they want a compiler of device code and its libraries, and none of that
says more about a signature. The shipped list was made from the wheels by `python -m moe_plugin_flashinfer.emulation`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from moe_core.payloads import Tensor
from moe_core.testing.vendor_folder import vendor_folder

#: Names a folder where flashinfer-python is installed; "" for none.
VARIABLE = "MOE_PLUGIN_FLASHINFER_VENDOR"
#: Where `make flashinfer-vendor` puts it, in the folder of the Python environment.
FOLDER = "flashinfer-vendor"
#: Releases whose functions are emulated, in their order.
RELEASES = ("0.6.11.post3", "0.7.2.post1")

#: Public name -> files of the library that may define it, first found first; a method as `Class.method`.
SOURCES = {
    "cute_dsl.convert_sf_to_mma_layout": ("cute_dsl/utils.py",),
    "fp4_quantize": ("quantization/fp4_quantization.py",),
    "fused_moe.CuteDslMoEWrapper.__init__": ("fused_moe/cute_dsl/fused_moe.py",),
    "fused_moe.CuteDslMoEWrapper.run": ("fused_moe/cute_dsl/fused_moe.py",),
    "fused_moe.cute_dsl_fused_moe": ("fused_moe/cute_dsl/fused_moe.py",),
    "fused_moe.cute_dsl_fused_moe_nvfp4": ("fused_moe/cute_dsl/fused_moe.py",),
    "gemm.grouped_gemm_nt_masked": (
        "gemm/kernels/grouped_gemm_masked_wrapper.py",
        "gemm/kernels/grouped_gemm_masked_blackwell.py",
    ),
    "nvfp4_quantize": ("quantization/fp4_quantization.py",),
    "scaled_fp4_grouped_quantize": ("quantization/fp4_quantization.py",),
    "silu_and_mul_scaled_nvfp4_experts_quantize": ("activation.py",),
}


@attrs.frozen(repr=False)
class Default:
    """The default of a parameter, as the library's source spells it."""

    text: str

    def __repr__(self) -> str:
        """The same, so that a signature reads as in the source."""
        return self.text


_UNSET = Default("_UNSET")


@attrs.frozen
class Signatures:
    """What the functions of one release take.

    Attributes:
        release: Version of flashinfer-python.
        source: Whose word it is, for the header of a test run.
        by_name: Public name, from the package on -> signature, without `self`.
    """

    release: str
    source: str
    by_name: dict[str, inspect.Signature]

    def __getitem__(self, name: str) -> inspect.Signature:
        """The signature of a function."""
        return self.by_name[name]

    def __contains__(self, name: str) -> bool:
        """Whether the release has the function."""
        return name in self.by_name


def signatures_of(release: str) -> Signatures:
    """Of the installed library where that is this release, else of the shipped list.

    Raises:
        ValueError: A release that the list does not have.
    """
    folder = installed_folder()
    if folder is not None and installed_release(folder) == release:
        return Signatures(release, f"the sources of flashinfer {release}", read_sources(folder))
    listed = shipped(release)
    return Signatures(release, f"the shipped signatures of flashinfer {release}", listed)


def installed_folder() -> Path | None:
    """The folder with the library, None if there is none.

    Raises:
        FileNotFoundError: There is a folder without the library.
    """
    install = f"pip install --no-deps --target {{folder}} flashinfer-python=={RELEASES[0]}"
    return vendor_folder(VARIABLE, FOLDER, "flashinfer", install)


def installed_release(folder: Path) -> str:
    """Version of the library in a folder."""
    found = sorted(folder.glob("flashinfer_python-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else ""


def read_sources(folder: Path) -> dict[str, inspect.Signature]:
    """Public name -> signature, of those that the library in a folder has."""
    found = {}
    for name, files in SOURCES.items():
        paths = [folder / "flashinfer" / file for file in files]
        path = next((path for path in paths if path.exists()), None)
        wanted = tuple(part for part in name.split(".") if part not in ("cute_dsl", "fused_moe", "gemm"))
        arguments = None if path is None else dict(_functions(ast.parse(path.read_text(encoding="utf-8")))).get(wanted)
        if arguments is not None:
            found[name] = _signature(arguments)
    return found


def shipped(release: str) -> dict[str, inspect.Signature]:
    """The shipped list of a release, as `read_sources` gives it."""
    text = resources.files(__package__).joinpath("signatures.txt").read_text(encoding="utf-8")
    parts = dict(part.partition("\n")[::2] for part in text.split("## ")[1:])
    if release not in parts:
        raise ValueError(f"no signatures of flashinfer {release} are shipped; there are {', '.join(parts)}")
    found = {}
    for line in parts[release].split("\n"):
        name, bracket, rest = line.partition("(")
        if bracket:
            [(_, arguments)] = _functions(ast.parse(f"def f({rest}: pass"))
            found[name] = _signature(arguments)
    return found


def bound(name: str, signature: inspect.Signature, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` behind a signature of the library: what that refuses is refused, with its `TypeError`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**given(signature, args, kwargs))

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    call.__doc__ = function.__doc__
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def given(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call passes, by name; of defaults only the one that lets the environment decide, as `Default`."""
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
        elif parameter.default == _UNSET:
            arguments.setdefault(parameter.name, _UNSET)
    return arguments


def refuse_others(function: str, **asked: Any) -> None:
    """Raise `NotImplementedError` if any of `asked` is given: the library has it, the emulation does not."""
    wanted = [name for name, value in asked.items() if isinstance(value, Tensor) or value]
    if wanted:
        raise NotImplementedError(f"{function}: {', '.join(wanted)} is not emulated")


def _functions(tree: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ast.arguments]]:
    """Every function at the top of a module, or of a class there."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield (*inside, node.name), node.args
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, (node.name,))


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Names, kinds and defaults; what Python checks of a call."""
    kinds = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    made = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY if argument in arguments.posonlyargs else kinds.POSITIONAL_OR_KEYWORD,
            default=_default(default),
        )
        for argument, default in zip(positional, defaults, strict=True)
    ]
    made += [
        kinds(argument.arg, kinds.KEYWORD_ONLY, default=_default(default))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        made.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature([parameter for parameter in made if parameter.name != "self"])


def _default(node: ast.expr | None) -> Any:
    return inspect.Parameter.empty if node is None else Default(ast.unparse(node))
