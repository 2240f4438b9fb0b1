"""The kit as a pytest class, for the tests of a plugin."""

from __future__ import annotations

import fnmatch
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from moe_core.environment import Environment
from moe_core.testing.kit import Kit
from moe_core.testing.outcome import FAILED, NOT_RUN, PASSED, Case, ConformanceError


class BackendConformance:
    """Adopt it, and every check runs as a test on every cell that the plugin declares.

    A cell that cannot run on this machine is skipped with its reason. Checks cannot be overridden one by one: what a
    backend does not do yet is listed in `expected_failures`, and fails once it works.

    Example:
        >>> from moe_core.testing import BackendConformance
        >>> class TestConformance(BackendConformance):
        ...     plugin = "my_backend.plugin"

    Attributes:
        plugin: The plugin module, or its import name.
        environment: The machine to resolve for, None for this one.
        device: Torch device of all tensors, None for the environment's.
        companions: Import names of other plugins that this one needs for a complete pair.
        quick: Whether to vary scheme, activation and layer dtype one at a time only; see `Kit`.
        expected_failures: Pattern of a case (`check[subject]`, with `*`) -> why it fails.
    """

    plugin: ClassVar[str | types.ModuleType]
    environment: ClassVar[Environment | None] = None
    device: ClassVar[str | None] = None
    companions: ClassVar[Sequence[str]] = ()
    quick: ClassVar[bool] = False
    expected_failures: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: object) -> None:
        """Refuse to be hollowed out: a check that is overridden would be missing without a word."""
        super().__init_subclass__(**options)
        overridden = sorted({"test_conformance", "pytest_generate_tests"} & set(vars(cls)))
        if overridden:
            listed = f"{cls.__name__} overrides {', '.join(overridden)}"
            raise ConformanceError(f"{listed}; list what fails in expected_failures, with the reason")

    @classmethod
    @functools.cache
    def _cases(cls) -> list[Case]:
        options = {name: getattr(cls, name) for name in ("environment", "device", "companions", "quick")}
        return Kit(cls.plugin, **options).cases()

    @final
    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test per case, called `check[subject]`."""
        if "case" in metafunc.fixturenames:
            cases = self._cases()
            metafunc.parametrize("case", cases, ids=[str(case) for case in cases])

    @final
    def test_conformance(self, case: Case) -> None:
        """Run one case of the kit."""
        import pytest

        result = case.run()
        reason = self._expected(case)
        if result.status == NOT_RUN:
            pytest.skip(f"not run: {result.text}")
        if reason is not None and result.status == FAILED:
            pytest.xfail(f"{reason} ({result.text})")
        if reason is not None and result.status == PASSED:
            raise ConformanceError(f"{case} passes, but expected_failures says: {reason}; take it out of the list")
        if result.status == FAILED:
            raise ConformanceError(f"{case}: {result.text}\n{result.traceback}".rstrip())

    def _expected(self, case: Case) -> str | None:
        # Brackets are part of a case's name, not a character class.
        found = (
            reason
            for pattern, reason in self.expected_failures.items()
            if fnmatch.fnmatchcase(str(case), pattern.replace("[", "[[]"))
        )
        return next(found, None)
