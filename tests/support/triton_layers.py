"""Layers on the Triton runners, planned for an H100: on a GPU if there is one, else under Triton's interpreter."""

from __future__ import annotations

import importlib

import attrs
import pytest
import torch

from moe_core import BackendManager, LayerRequest, MoELayer, RawWeights
from moe_core.discovery import Found
from moe_core.environment import load_environment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_PLUGINS = {name: f"moe_core.backends.{name}.plugin" for name in ("torch", "triton")}


def both_manager() -> BackendManager:
    """A manager with both built-in plugins, whatever else is installed."""
    manager = BackendManager()
    manager.load(
        [
            Found(name=name, load=lambda v=value: importlib.import_module(v), value=value)
            for name, value in _PLUGINS.items()
        ]
    )
    return manager


def triton_layer(request: LayerRequest, weights: RawWeights | dict[str, torch.Tensor]) -> MoELayer:
    """A loaded layer; `request` pins what it wants."""
    layer = MoELayer(request, environment=load_environment("h100"), manager=both_manager())
    raw = weights if isinstance(weights, RawWeights) else RawWeights(tensors=weights)
    raw.tensors = {name: tensor.to(DEVICE) for name, tensor in raw.tensors.items()}
    layer.load_weights(raw)
    return layer


def fewest_rows(operands: str) -> list[tuple[str, int]]:
    """Every card with tiles of its own for these operands, and the fewest rows per expert that each of them is for."""
    from moe_core.backends.triton.tiles import MEASURED

    own = {card: [*tables[operands]] for card, tables in MEASURED.items() if operands in tables}
    return [(card, int(most) + 1) for card, rows in own.items() for most in (0, *rows[:-1])]


def pretend_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers get the tiles of this card."""
    from moe_core.backends.triton import experts

    real = experts.device_of
    monkeypatch.setattr(experts, "device_of", lambda device: attrs.evolve(real(device), name=name))


def output(layer: MoELayer, tokens: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What a layer makes of tokens, on the CPU."""
    return layer(*(tensor.to(DEVICE) for tensor in tokens)).cpu()
