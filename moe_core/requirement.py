"""What must be installed beside a plugin, and in which versions."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import attrs
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from moe_core.errors import SpecError
from moe_core.setting import is_variable
from moe_core.vocabulary import as_tuple, instance_of, is_line, is_name, tuple_of


@attrs.frozen(kw_only=True)
class Program:
    """A program that a library starts, such as a compiler: looked for where the library looks, never started.

    Attributes:
        name: Its file's name.
        folders: Variables that name a toolkit; the first that is set counts, and its `bin` is then the only place.
        default: The toolkit to look into where none of them is set and `PATH` has no such program.
        unless: Variables that make it needless, set to anything but 0.
        install: What to do without it.
    """

    name: str = attrs.field(validator=is_name)
    folders: tuple[str, ...] = attrs.field(default=(), converter=as_tuple, validator=is_variable)
    default: str = attrs.field(default="", validator=instance_of(str))
    unless: tuple[str, ...] = attrs.field(default=(), converter=as_tuple, validator=is_variable)
    install: str = attrs.field(default="", validator=is_line)

    def is_needed(self, variables: Mapping[str, str]) -> bool:
        """Whether a process whose environment has these variables starts it."""
        return all(variables.get(name, "0") in ("", "0") for name in self.unless)


@attrs.frozen(kw_only=True)
class Requirement:
    """A distribution that a plugin or spec needs, looked up in the environment's package list, never imported.

    Attributes:
        module: Top-level import name, the key of `Environment.packages`.
        minimum: Lowest version, "" for any.
        excluded: Versions that do not serve although they are not lower, as a PEP 440 specifier (`>=1,<2.1`): several
            distributions may provide one module, each with numbers of its own.
        install: What to type to get it.
        programs: What it starts when it is called.
    """

    module: str = attrs.field(validator=is_name)
    minimum: str = attrs.field(default="", validator=instance_of(str))
    excluded: str = attrs.field(default="", validator=instance_of(str))
    install: str = attrs.field(default="", validator=is_line)
    programs: tuple[Program, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(Program))

    def __attrs_post_init__(self) -> None:
        """A minimum that is no version would refuse every installation."""
        for name, parse in (("minimum", Version), ("excluded", SpecifierSet)):
            text = getattr(self, name)
            try:
                if text:
                    parse(text)
            except (InvalidVersion, InvalidSpecifier) as error:
                raise SpecError(f"Requirement {self.module!r}, field {name!r}: {error}") from error

    def __str__(self) -> str:
        """`deep_ep >= 0.1.1, < 1`, `deep_gemm >= 0.1.3, not >=1,<2.1`."""
        bounds = [f">= {self.minimum}" if self.minimum else "", _without(self.excluded)]
        return f"{self.module} {', '.join(filter(None, bounds))}".rstrip()

    def is_met_by(self, found: str) -> bool:
        """Whether an installed version serves; one that cannot be read meets no condition."""
        return _is_met(self.minimum, self.excluded, found)


def _without(excluded: str) -> str:
    """Excluded versions as a condition: an upper bound where everything from one on is excluded."""
    only, *others = SpecifierSet(excluded) or (None,)
    if only is not None and not others and only.operator in _OPPOSITES:
        return f"{_OPPOSITES[only.operator]} {only.version}"
    return f"not {excluded}" if excluded else ""


#: Operator that excludes all higher versions -> the one that allows the others.
_OPPOSITES = {">=": "<", ">": "<="}


@functools.lru_cache(maxsize=256)
def _is_met(minimum: str, excluded: str, found: str) -> bool:
    if not (minimum or excluded):
        return True
    try:
        version = Version(found)
    except InvalidVersion:
        return False
    is_excluded = bool(excluded) and SpecifierSet(excluded, prereleases=True).contains(version)
    return version >= Version(minimum or "0") and not is_excluded
