"""`moe-core new-plugin`: a complete plugin to begin with, that already passes the conformance kit."""

from __future__ import annotations

import keyword
import re
import shlex
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from moe_core.errors import SpecError
from moe_core.manager import default_manager

_TEMPLATE = "plugin_template"
#: Letters of a name: what the template calls after it must have at most 64 (`_transposed`).
_LONGEST = 53
_SUFFIX = ".in"


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The plugin's name: lower-case letters, digits and '_'.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Where to write it.", show_default="a folder NAME here"),
    ] = None,
) -> None:
    """Write a new backend plugin that runs as it is.

    It is a whole package, which is listed, resolved, and passes the conformance kit.
    """
    files = plugin_files(name)
    folder = output or Path(name)
    taken = {*default_manager().names(), *(failed.found.name for failed in default_manager().failures())}
    if name in taken:
        raise SpecError(f"a plugin called {name!r} is installed already, and two would both be refused; choose another")
    try:
        _write(files, folder)
    except OSError as error:
        raise SpecError(f"{folder} cannot be written ({error.strerror}); name another with --output") from error
    typer.echo(f"wrote {folder}. Next:")
    typer.echo(f"  pip install -e {shlex.quote(f'{folder}[test]')}")
    typer.echo(f"  moe-core verify {name}        # or: pytest {shlex.quote(str(folder))}")
    typer.echo(f"  then replace what {folder / 'README.md'} lists")


def _write(files: dict[str, str], folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"{folder} exists and is not empty; nothing was written. Name another with --output")
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def plugin_files(name: str) -> dict[str, str]:
    """Path -> text of every file of a new plugin.

    Raises:
        SpecError: The name cannot be an import name.
    """
    if keyword.iskeyword(name):
        raise SpecError(f"plugin name {name!r}: it is a keyword of Python; choose another")
    # The distribution's name may not end in a dash.
    if len(name) > _LONGEST or not re.fullmatch("[a-z]([a-z0-9_]*[a-z0-9])?", name):
        raise SpecError(
            f"plugin name {name!r}: expected lower-case letters, digits and '_', from a letter to a letter or a digit, "
            f"at most {_LONGEST}"
        )
    words = {
        "plugin": name,
        "package": f"moe_plugin_{name}",
        "distribution": f"moe-plugin-{name.replace('_', '-')}",
    }
    return {
        path.removesuffix(_SUFFIX).replace("package/", f"{words['package']}/"): Template(text).substitute(words)
        for path, text in _files(resources.files(__package__) / _TEMPLATE, "")
    }


def _files(folder: Traversable, prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            found.append((f"{prefix}{entry.name}", entry.read_text(encoding="utf-8")))
    return found
