"""Largest magnitudes of the experts' inputs, from which static activation scales are made."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from moe_core.errors import SpecError


@attrs.frozen(kw_only=True)
class ExpertInputs:
    """Largest magnitude per expert of one layer; 0 for an expert that saw no token.

    Attributes:
        first: Inputs of gate and up.
        second: Inputs of down.
    """

    first: tuple[float, ...]
    second: tuple[float, ...]


@attrs.frozen(kw_only=True)
class ModelInputs:
    """What a calibration measured, and what holds where it did not.

    Attributes:
        layers: Index of the decoder layer -> its experts. One that saw no token, or only zeros, takes the largest
            value of its layer.
        default: For experts of layers that are not in `layers`, or saw no token at all; None: such a layer is an error.
    """

    layers: Mapping[int, ExpertInputs] = attrs.field(factory=dict)
    default: float | None = attrs.field(default=None)

    @default.validator
    def _positive(self, attribute: attrs.Attribute[float | None], value: float | None) -> None:
        if value is not None and not 0 < value < float("inf"):
            raise SpecError(f"ModelInputs.default: expected a finite number > 0, got {value!r}")

    def of(self, layer: int | None, expert: int, module: str) -> dict[str, float]:
        """Half -> largest magnitude; `module` is the name of the experts module, for messages.

        Raises:
            SpecError: Nothing was measured there and there is no default.
        """
        measured = self.layers.get(layer) if layer is not None else None
        first = _of_expert(measured.first, expert) if measured else 0.0
        second = _of_expert(measured.second, expert) if measured else 0.0
        if not (first and second) and self.default is None:
            raise SpecError(
                f"{module}.{expert}: no input was seen in calibration and no default scale was given; the layer may be "
                "one that the model does not run, or the text too short"
            )
        first, second = first or float(self.default or 0), second or float(self.default or 0)
        return {"gate": first, "up": first, "down": second}


def _of_expert(values: tuple[float, ...], expert: int) -> float:
    own = values[expert] if expert < len(values) else 0.0
    return own or max(values, default=0.0)
