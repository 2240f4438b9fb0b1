"""What must be installed beside a plugin, and in which versions."""

from __future__ import annotations

import functools

import attrs
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from moe_core.errors import SpecError
from moe_core.vocabulary import instance_of, is_name


@attrs.frozen(kw_only=True)
class Requirement:
    """A distribution that a plugin or spec needs, looked up in the environment's package list, never imported.

    Attributes:
        module: Top-level import name, the key of `Environment.packages`.
        minimum: Lowest version, "" for any.
        excluded: Versions that do not serve although they are not lower, as a PEP 440 specifier (`>=1,<2.1`): several
            distributions may provide one module, each with numbers of its own.
        install: What to type to get it.
    """

    module: str = attrs.field(validator=is_name)
    minimum: str = attrs.field(default="", validator=instance_of(str))
    excluded: str = attrs.field(default="", validator=instance_of(str))
    install: str = attrs.field(default="", validator=instance_of(str))

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
        """`deep_gemm >= 0.1.3, not >=1,<2.1`."""
        minimum = f" >= {self.minimum}" if self.minimum else ""
        return f"{self.module}{minimum}{f', not {self.excluded}' if self.excluded else ''}"

    def is_met_by(self, found: str) -> bool:
        """Whether an installed version serves; one that cannot be read meets no condition."""
        return _is_met(self.minimum, self.excluded, found)


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
