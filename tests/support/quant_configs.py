"""The example configurations of tests/quant/configs, by file name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moe_core.errors import SpecError
from moe_core.quant import read_layer

_FOLDER = Path(__file__).resolve().parents[1] / "quant" / "configs"
CONFIGS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(_FOLDER.glob("*.json"))
}


def changed(name: str, path: str, value: Any) -> dict[str, Any]:
    """An example with the value at a path of keys and places, with slashes between, replaced or added."""
    config = copy.deepcopy(CONFIGS[name])
    *above, last = path.split("/")
    place: Any = config
    for key in above:
        place = place[int(key) if isinstance(place, list) else key]
    place[last] = value
    return config


def require_refusal(config: dict[str, Any], experts: str, match: str) -> None:
    """The configuration is not read, and the error names the module and matches."""
    with pytest.raises(SpecError, match=match) as caught:
        read_layer(config, experts)
    if experts not in str(caught.value):
        raise AssertionError(f"{caught.value} does not name {experts}")
