"""Rates of a machine, and the floor that follows from them."""

from __future__ import annotations

import attrs
import pytest

from moe_core.quant import FP8_BLOCK128, MXFP4_W4A16, W8A8_INT8
from moe_core.tuning import ceilings
from moe_core.tuning.ceilings import Ceilings, measure_ceilings, operands_of
from moe_core.tuning.shapes import LayerShape

SHAPE = LayerShape(4, 2, 256, 128)


def test_floor_is_the_larger_of_reading_and_multiplying():
    machine = Ceilings(bytes_per_us=1000.0, flops_per_us={"bf16": 50.0, "fp8": 100.0})
    assert machine.floor(5000, 100, "bf16") == 5.0
    assert machine.floor(5000, 1000, "bf16") == 20.0
    assert machine.floor(5000, 1000, "fp8") == 10.0


def test_rates_are_read_as_per_second():
    machine = Ceilings(bytes_per_us=3.04e6, flops_per_us={"bf16": 795e6, "fp8": 21e3})
    assert str(machine) == "3.04 TB/s, 795 TFLOP/s bf16, 21 GFLOP/s fp8"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "bf16"),
        ({"dtype": "fp16"}, "fp16"),
        ({"quant": FP8_BLOCK128}, "fp8"),
        ({"quant": W8A8_INT8}, "int8"),
        ({"quant": MXFP4_W4A16}, "bf16"),
    ],
)
def test_operands_are_the_rounded_activations_where_products_of_them_exist(fields, word):
    assert operands_of(SHAPE.request(**fields)) == word


def test_rates_of_this_cpu_are_what_the_clock_says(monkeypatch):
    monkeypatch.setitem(ceilings._BUFFER, "cpu", 1 << 12)
    monkeypatch.setitem(ceilings._SQUARE, "cpu", 16)
    times = []

    def measured(calls, device, **options):
        for call in calls:
            call()
        times.append((device, options["clock"]))
        return attrs.make_class("Fixed", {"smallest": attrs.field(default=2.0)})()

    monkeypatch.setattr(ceilings, "measure", measured)
    machine = measure_ceilings("cpu", ("bf16", "fp8", "bf16"), clock="cpu")
    # A copy moves twice the buffer.
    assert machine.bytes_per_us == 2 * 4 * (1 << 12) / 2.0
    assert machine.flops_per_us == {"bf16": 2 * 16**3 / 2.0, "fp8": 2 * 16**3 / 2.0}
    assert set(times) == {("cpu", "cpu")}
