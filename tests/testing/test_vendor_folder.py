"""The folder of a vendor's package: by variable, else in the environment, and never half of one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moe_core.testing.vendor_folder import vendor_folder

VARIABLE = "TOY_VENDOR"


def found() -> Path | None:
    return vendor_folder(VARIABLE, "toy-vendor", "toy", "toy-install {folder}")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a Python environment, which has nothing yet."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def test_it_is_looked_for_in_the_environment(environment: Path) -> None:
    assert found() is None
    (environment / "toy-vendor" / "toy").mkdir(parents=True)
    assert found() == environment / "toy-vendor"


def test_the_variable_names_another_or_none(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("toy-vendor", "named"):
        (environment / folder / "toy").mkdir(parents=True)
    monkeypatch.setenv(VARIABLE, str(environment / "named"))
    assert found() == environment / "named"
    monkeypatch.setenv(VARIABLE, "")
    assert found() is None


@pytest.mark.error_path
@pytest.mark.parametrize("is_named", [True, False])
def test_a_folder_without_the_package_is_an_error_that_says_what_to_type(
    environment: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    folder = environment / "toy-vendor"
    folder.mkdir()
    if is_named:
        monkeypatch.setenv(VARIABLE, str(folder))
    with pytest.raises(FileNotFoundError, match="holds no toy; ") as caught:
        found()
    assert f"toy-install {folder}, or set {VARIABLE}= to do without" in str(caught.value)
