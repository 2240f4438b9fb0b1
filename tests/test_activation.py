from __future__ import annotations

import pickle
from typing import Any

import pytest

from moe_core import activation
from moe_core.activation import (
    GEGLU,
    GEGLU_TANH,
    RELU2,
    SWIGLU,
    SWIGLU_OAI,
    ActivationPattern,
    ActivationSpec,
)
from moe_core.errors import SpecError

MODULE = ActivationSpec(kind="module")
INTERLEAVED = ActivationSpec(row_order="interleaved")
UNGATED_SILU = ActivationSpec(gated=False)
SPECS = {
    "swiglu": SWIGLU,
    "geglu": GEGLU,
    "geglu_tanh": GEGLU_TANH,
    "oai": SWIGLU_OAI,
    "relu2": RELU2,
    "module": MODULE,
    "interleaved": INTERLEAVED,
    "silu": UNGATED_SILU,
    "limit": ActivationSpec(limit=7.0),
    "alpha": ActivationSpec(alpha=1.5),
    "beta": ActivationSpec(beta=1.0),
}


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        (ActivationPattern(), {"swiglu"}),
        (ActivationPattern(parameters=True), {"swiglu", "oai", "limit", "alpha", "beta"}),
        (ActivationPattern(interleaved=True), {"swiglu", "interleaved"}),
        (ActivationPattern(gated=None), {"swiglu", "silu"}),
        (ActivationPattern(gated=False), {"silu"}),
        (ActivationPattern(kind="relu2", gated=False), {"relu2"}),
        (ActivationPattern(kind="any"), {"swiglu", "geglu", "geglu_tanh"}),
        (ActivationPattern(kind="any", gated=None, parameters=True, interleaved=True), set(SPECS) - {"module"}),
        (ActivationPattern(kind="module"), {"module"}),
    ],
)
def test_a_kernel_gets_only_what_it_declared(pattern: ActivationPattern, matching: set[str]) -> None:
    assert {name for name, spec in SPECS.items() if pattern.matches(spec)} == matching


@pytest.mark.parametrize("name", SPECS)
def test_written_down_and_read_back(name: str) -> None:
    spec = SPECS[name]
    assert eval(repr(spec), vars(activation)) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec.rows_per_channel == (2 if spec.gated else 1)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kind": "swish"}, "ActivationSpec, field 'kind': 'swish' is not one of silu"),
        ({"kind": "any"}, "field 'kind': 'any' is not one of"),
        ({"gated": 1}, "field 'gated': expected bool"),
        ({"limit": 0}, "ActivationSpec.limit: expected a finite number > 0"),
        ({"limit": float("inf")}, "ActivationSpec.limit"),
        ({"alpha": float("nan")}, "ActivationSpec.alpha: expected a finite number"),
        ({"beta": float("inf")}, "ActivationSpec.beta: expected a finite number"),
        ({"kind": "gelu", "alpha": 2}, "alpha applies to kind 'silu' only"),
        ({"clamp": "after"}, "ActivationSpec.clamp: 'after' needs a limit"),
        ({"kind": "module", "limit": 7}, "kind 'module' computes everything itself"),
        ({"gated": False, "limit": 7}, "ActivationSpec.limit applies to gated activations only"),
        ({"gated": False, "beta": 1}, "ActivationSpec.beta applies to gated"),
        ({"gated": False, "row_order": "interleaved"}, "ActivationSpec.row_order applies to gated"),
    ],
)
def test_parameters_that_a_kind_would_ignore(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        ActivationSpec(**fields)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (SWIGLU, "silu-gated"),
        (SWIGLU_OAI, "silu-gated(alpha=1.702, limit=7.0, beta=1.0)"),
        (RELU2, "relu2"),
        (ActivationPattern(gated=None, parameters=True, interleaved=True), "silu(-gated)+parameters+interleaved"),
    ],
)
def test_short_forms(value: object, text: str) -> None:
    assert str(value) == text
