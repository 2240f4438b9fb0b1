"""What a reload leaves as it is: parameters and bound functions read the tensors that the first load made."""

from __future__ import annotations

from typing import Self

import attrs

from moe_core.payloads import PreparedTensor, PreparedWeights, Tensor

#: Note of every error after which some experts may be new and others old.
PARTLY_WRITTEN = "the weights to be refilled may be partly overwritten: load all of them again before they are used"


@attrs.frozen(eq=False)
class _Place:
    """One prepared tensor: the object that bound functions hold, its memory, and where that lay."""

    data: Tensor
    memory: Tensor
    at: tuple[object, ...]


@attrs.frozen(eq=False, kw_only=True)
class Kept:
    """Prepared weights as they were before a plugin refilled them; the values of the tensors apart.

    Attributes:
        layout: As in `PreparedWeights`.
        token_scale: As in `PreparedWeights`.
        tensors: As in `PreparedWeights`, in a mapping of its own.
        places: Name -> where the tensor is.
    """

    layout: str
    token_scale: str | None
    tensors: dict[str, PreparedTensor]
    places: dict[str, _Place]

    @classmethod
    def of(cls, weights: PreparedWeights) -> Self:
        """What `weights` are now."""
        tensors = dict(weights.tensors)
        places = {name: _Place(t.data, t.data.detach(), _at(t.data)) for name, t in tensors.items()}
        return cls(layout=weights.layout, token_scale=weights.token_scale, tensors=tensors, places=places)

    def changes(self, weights: PreparedWeights) -> list[str]:
        """What differs by now, each with the tensor's name; layouts are compared with the plan's elsewhere."""
        now = weights.tensors
        gone = [f"{name} is gone" for name in self.places if name not in now]
        new = [f"{name} is new" for name in now if name not in self.places]
        moved = [
            f"{name} has other memory, shape, strides or dtype"
            for name, place in self.places.items()
            if name in now and _at(now[name].data) != place.at
        ]
        renamed = weights.token_scale != self.token_scale
        scale = [f"token_scale is {weights.token_scale!r} instead of {self.token_scale!r}"] if renamed else []
        return [*gone, *new, *moved, *scale]

    def restore(self, weights: PreparedWeights) -> None:
        """Undo the differences, so that a later reload can fill what bound functions read; values stay as they are."""
        weights.layout, weights.token_scale, weights.tensors = self.layout, self.token_scale, dict(self.tensors)
        for name, place in self.places.items():
            if _at(place.data) != place.at:
                place.data.data = place.memory
            self.tensors[name].data = place.data


def _at(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
