"""Which layers of a checkpoint a transformers model has, and which it leaves in the file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import attrs

from moe_core.errors import SpecError, WeightsError, counted
from moe_core.expert_names import is_draft, layer_index
from moe_core.model_layers import DRAFT_COUNTS


@attrs.frozen(kw_only=True)
class LayerStack:
    """The numbered layers of a model, and the draft layers that go on after them.

    Attributes:
        prefixes: What precedes the number of a layer: `model.layers`.
        num_layers: Layers of the model itself; None where its configuration does not say.
        num_drafts: Draft layers that its configuration declares.
    """

    prefixes: frozenset[str]
    num_layers: int | None
    num_drafts: int

    @classmethod
    def of(cls, config: Any, experts: Iterable[str]) -> Self:
        """The layers of a model.

        Args:
            config: Its configuration, as transformers reads it.
            experts: Names of experts modules, which lie in no stack but the model's.

        Raises:
            SpecError: The number of draft layers is none.
        """
        parts = (config.get_text_config(), config)
        found = (getattr(part, name, None) for part in parts for name in DRAFT_COUNTS)
        num_drafts = next((count for count in found if count is not None), 0)
        if type(num_drafts) is not int or num_drafts < 0:
            listed = ", ".join(DRAFT_COUNTS)
            raise SpecError(f"number of draft layers ({listed}): expected a whole number >= 0, got {num_drafts!r}")
        prefixes = frozenset(prefix for name in experts if not is_draft(name) and (prefix := _prefix(name)) is not None)
        num_layers = getattr(parts[0], "num_hidden_layers", None)
        return cls(prefixes=prefixes, num_layers=num_layers, num_drafts=num_drafts)

    def is_of_draft(self, name: str) -> bool:
        """Whether a tensor belongs to a draft layer, which transformers' models do not have."""
        return is_draft(name) or 0 <= self._beyond(name) < self.num_drafts

    def require_declared(self, path: Path, names: Iterable[str]) -> None:
        """Raise `WeightsError` for tensors of layers that are neither the model's nor drafts of its configuration."""
        strangers = sorted(name for name in names if not is_draft(name) and self._beyond(name) >= self.num_drafts)
        if strangers:
            declared = f"num_hidden_layers {self.num_layers} and {counted(self.num_drafts, 'draft layer')}"
            title = (
                f"{path}: tensors of layers past those of the configuration ({declared}); if they are drafts, it must "
                f"count them ({' or '.join(DRAFT_COUNTS)}); nothing was loaded:"
            )
            raise WeightsError.listing(title, strangers)

    def _beyond(self, name: str) -> int:
        """How many layers after the model's last one a tensor is, from 0; negative inside the model."""
        number = layer_index(name)
        if number is None or self.num_layers is None or _prefix(name) not in self.prefixes:
            return -1
        return number - self.num_layers


def _prefix(name: str) -> str | None:
    number = layer_index(name)
    return None if number is None else f"{name}.".partition(f".{number}.")[0]
