"""The wrong backends against every check: what catches what. Run as a script, it writes the table."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent / "fakes")]

import attrs  # noqa: E402
from wrong_backends import FAKES  # noqa: E402

from moe_core.testing import CHECKS, Kit  # noqa: E402
from moe_core.testing.outcome import FAILED  # noqa: E402

TABLE = Path(__file__).parents[2] / "docs" / "conformance_matrix.md"
#: Wrong backends that other processes must be able to import: module -> the check made for it, and what it must say.
IN_FILES = {
    "imports_torch_plugin": ("import", "import inside the hooks"),
    "sets_a_variable_plugin": ("process_state", "changed os.environ['TOY_MODE']"),
    "sums_twice_plugin": ("distributed_ranks", "rank 0 of 3"),
}
_TITLE = """# What the checks of the conformance kit catch

One deliberately wrong backend per check (`tests/testing/fakes`), each run through the whole kit. Written by
`python tests/testing/matrix.py`; a test compares.

| wrong backend | the check made for it | which says | other checks that fail too |
|---|---|---|---|
"""


@attrs.frozen
class Row:
    """One wrong backend: the check made for it, what that must say, and every check that failed with its texts."""

    name: str
    check: str
    says: str
    failed: dict[str, list[str]]

    def __str__(self) -> str:
        others = [check for check in CHECKS if check in self.failed and check != self.check]
        return f"| {self.name} | {self.check} | {self.says} | {', '.join(others) or '-'} |"


def row(name: str) -> Row:
    """Run the kit on one wrong backend."""
    if name in IN_FILES:
        check, says = IN_FILES[name]
        module = importlib.import_module(name)
    else:
        check, says, module = FAKES[name].check, FAKES[name].says, FAKES[name].module(name)
    failed: dict[str, list[str]] = {}
    for case in Kit(module, device="cpu", quick=True).cases():
        result = case.run()
        if result.status == FAILED:
            failed.setdefault(result.check, []).append(result.text)
    return Row(name, check, says, failed)


NAMES = (*IN_FILES, *FAKES)

if __name__ == "__main__":
    rows = sorted((row(name) for name in NAMES), key=lambda row: CHECKS.index(row.check))
    TABLE.write_text(_TITLE + "".join(f"{row}\n" for row in rows), encoding="utf-8")
