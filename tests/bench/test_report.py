"""Files of results: what is wrong in one is named with its place."""

from __future__ import annotations

import functools
import json
import re

import pytest
from fakes import expect

from moe_core.bench.report import Report
from moe_core.errors import SpecError
from moe_core.tuning.timing import Timing

_WRITTEN = {
    "schema": 1,
    "machine": {
        "device": "card",
        "arch": "cpu",
        "threads": 1,
        "clock": "wall",
        "versions": {"torch": "2.13.0"},
        "ceilings": {"bytes_per_us": 1e4, "flops_per_us": {"bf16": 1e5}},
        "date": "2026-11-28",
    },
    "rows": [
        {
            "layer": "small",
            "scheme": "bf16",
            "num_tokens": 1,
            "implementation": "moe-core",
            "runs": "torch:torch.standard",
            "floor": 1.5,
            "timing": {"samples": [2.0, 3.0, 4.0], "method": "wall"},
            "error": 0.001,
            "problem": "",
            "note": "",
            "issue_microseconds": 7.0,
            "held_bytes": 512,
            "activation_bytes": 1024,
        }
    ],
}
#: What may be left out of a row's figures.
_OPTIONAL = {"timing", "error", "issue_microseconds", "held_bytes", "activation_bytes"}


def _places(value, path=()):
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _places(value[key], (*path, key))


def _label(path):
    return ".".join(map(str, path))


def _with(path, value):
    data = parent = json.loads(json.dumps(_WRITTEN))
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return data


_WRONG = (None, [], {}, "x", -1, float("nan"), float("inf"), True, 10**400)


def _wrong():
    """Every place with every value that does not belong there."""
    for path in _places(_WRITTEN):
        old = functools.reduce(lambda parent, key: parent[key], path, _WRITTEN)
        for wrong in _WRONG:
            may_be_absent = wrong is None and path[-1] in _OPTIONAL
            if not may_be_absent and (isinstance(old, int | float) or type(wrong) is not type(old)):
                yield path, wrong
    yield ("rows", 0, "timing", "samples"), []


def _read(folder, data):
    file = folder / "results.json"
    file.write_text(json.dumps(data), encoding="utf-8-sig")
    return Report.read(file)


@pytest.mark.error_path
def test_a_wrong_value_is_named_with_its_place(tmp_path):
    expect(_read(tmp_path, _WRITTEN).rows[0].timing == Timing((2.0, 3.0, 4.0), "wall"))
    for path, wrong in _wrong():
        place = re.escape("".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:])
        with pytest.raises(
            SpecError, match=rf"not the JSON of moe-core bench \({place}: expected|schema .*this version"
        ):
            _read(tmp_path, _with(path, wrong))


@pytest.mark.error_path
@pytest.mark.parametrize(
    "path", [path for path in _places(_WRITTEN) if path[-1] not in (0, 1, 2, "bf16", "torch")], ids=_label
)
def test_a_missing_value_is_named(tmp_path, path):
    data = _with(path, None)
    functools.reduce(lambda parent, key: parent[key], path[:-1], data).pop(path[-1])
    with pytest.raises(SpecError, match=f"field '{path[-1]}' is missing"):
        _read(tmp_path, data)


@pytest.mark.error_path
def test_what_would_act_on_a_terminal_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"rows\[0\].implementation: expected a printable text"):
        _read(tmp_path, _with(("rows", 0, "implementation"), "\x1b[31m"))
