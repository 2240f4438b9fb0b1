"""Matrices that AutoRound and Quark wrote themselves, and what their own layers make of them.

`packages/auto_round.safetensors` is of auto-round 0.16.1 (one case of 0.15.1), `packages/quark.safetensors` of
amd-quark 0.13. Both quantized a random Qwen3-MoE of 32 channels on a CPU. Of the second projection `[32, 64]` of its
first expert each case has the stored tensors, the configuration (in the metadata) and `values`: the weights as the
package's own layer dequantizes them in float64, rounded to fp32. Where that layer may be wrong (`model_free`, see the
decisions), `values` are the weights before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_experts import make_request, values_of
from safetensors import safe_open
from safetensors.torch import load_file

from moe_core.errors import WeightsError
from moe_core.payloads import Tensor
from moe_core.quant import BF16, LayerQuant, StoredScheme, read_layer
from moe_core.weights.checkpoint import InMemory
from moe_core.weights.loading import load_matrix

FOLDER = Path(__file__).parent / "packages"
EXPERTS = "model.layers.0.mlp.experts"
MATRIX = f"{EXPERTS}.0.down_proj"


def _cases() -> list[tuple[str, str, dict[str, Any]]]:
    found = []
    for package in ("auto_round", "quark"):
        with safe_open(FOLDER / f"{package}.safetensors", framework="pt") as file:
            found += [(package, case, json.loads(config)) for case, config in file.metadata().items()]
    return sorted(found, key=lambda case: case[:2])


def _tensors(package: str, case: str) -> tuple[dict[str, Tensor], Tensor]:
    """The stored tensors of a case, by the name that they had, and its values."""
    stored = load_file(FOLDER / f"{package}.safetensors").items()
    tensors = {name.replace(case, MATRIX): tensor for name, tensor in stored if name.startswith(f"{case}.")}
    return tensors, tensors.pop(f"{MATRIX}.values")


def _read(tensors: dict[str, Tensor], stored: StoredScheme) -> Tensor:
    loaded = load_matrix(InMemory(tensors), MATRIX, stored)
    return values_of(loaded, make_request(LayerQuant(BF16, stored.scheme)), "w2")[0]


@pytest.mark.parametrize(
    ("package", "case", "config"), _cases(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_values(package: str, case: str, config: dict[str, Any]) -> None:
    tensors, values = _tensors(package, case)
    stored = read_layer(config, EXPERTS, num_experts=2).w2
    found = _read(tensors, stored)
    if "model_free" in case:
        # Half a step of the scale and its rounding; a zero point that is off by one is a whole step.
        assert (found - values.double()).norm() < 0.12 * values.double().norm()
    else:
        # Global scales that are stored as divisors are inverted in fp32.
        tolerance = 2.0**-22 if stored.scheme.global_scale else 0.0
        torch.testing.assert_close(found.float(), values.float(), rtol=tolerance, atol=0)


def test_every_packing_has_a_case() -> None:
    storages = {read_layer(config, EXPERTS, num_experts=2).w2.storage for _, _, config in _cases()}
    assert storages == {
        "awq",
        "compressed_tensors_mxfp4",
        "compressed_tensors_nvfp4",
        "gptq",
        "gptq_v2",
        "packed_fp4",
        "quark_int4",
        "quark_int4_channel",
        "quark_int4_fp8",
        "quark_nvfp4",
        "quark_uint4",
        "quark_uint4_channel",
        "scaled",
    }


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("case", "suffix", "problem"),
    [
        ("int8t", "input_zero_point", "offsets that are not zero are not read"),
        ("int4", "weight_zero_point", "the scheme has no zero points, these are not all zero"),
    ],
)
def test_zero_points_without_a_scheme_are_refused(case: str, suffix: str, problem: str) -> None:
    config = next(config for _, other, config in _cases() if other == case)
    tensors, _ = _tensors("quark", case)
    tensors[f"{MATRIX}.{suffix}"] += 1
    with pytest.raises(WeightsError, match=f"{suffix}: {problem}"):
        _read(tensors, read_layer(config, EXPERTS, num_experts=2).w2)
