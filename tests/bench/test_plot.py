"""The chart of a report."""

from __future__ import annotations

import sys

import pytest

from moe_core.bench.plot import write_plot
from moe_core.bench.report import Machine, Report, Row
from moe_core.errors import MoeCoreError
from moe_core.tuning.ceilings import Ceilings
from moe_core.tuning.timing import Timing

MACHINE = Machine(
    device="a card",
    arch="sm90",
    threads=1,
    clock="wall",
    versions={"torch": "2"},
    ceilings=Ceilings(bytes_per_us=1.0, flops_per_us={"bf16": 1.0}),
)


def _report():
    rows = [
        Row(
            layer=layer,
            scheme="bf16",
            num_tokens=count,
            implementation=name,
            runs="",
            floor=1.0,
            timing=None if (name, count) == ("other", 1) else Timing((2.0 * count,), "graph"),
        )
        for layer in ("one", "two", "three")
        for count in (1, 16)
        for name in ("moe-core", "other")
    ]
    return Report(MACHINE, tuple(rows))


def test_a_chart_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    write_plot(_report(), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.error_path
def test_a_file_of_an_unknown_kind_is_an_error(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(MoeCoreError, match=r"cannot be written .*nonsense"):
        write_plot(_report(), tmp_path / "chart.nonsense")


@pytest.mark.error_path
def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MoeCoreError, match=r"pip install 'moe-core\[bench\]'"):
        write_plot(_report(), tmp_path / "chart.png")
