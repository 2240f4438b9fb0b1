"""The schemes of a layer's two projections, and what a rank's cut makes of them."""

from __future__ import annotations

import functools
import math

import attrs

from moe_core.quant.scheme import WHOLE, QuantScheme


@attrs.frozen(cache_hash=True)
class LayerQuant:
    """The schemes of both projections, which may differ (for example int4 `w13` beside int8 `w2`)."""

    w13: QuantScheme = attrs.field(validator=attrs.validators.instance_of(QuantScheme))
    w2: QuantScheme = attrs.field(validator=attrs.validators.instance_of(QuantScheme))

    @classmethod
    def of(cls, scheme: QuantScheme | LayerQuant) -> LayerQuant:
        """Both projections with one scheme; a `LayerQuant` is returned as it is."""
        return scheme if isinstance(scheme, LayerQuant) else cls(scheme, scheme)

    @property
    def is_quantized(self) -> bool:
        """Whether any projection is."""
        return self.w13.is_quantized or self.w2.is_quantized

    @property
    def label(self) -> str:
        """`bf16`, or `w13/w2` where they differ."""
        return self.w13.label if self.w13 == self.w2 else f"{self.w13.label}/{self.w2.label}"

    def __str__(self) -> str:
        """Same as `label`."""
        return self.label

    def matches(self, pattern: LayerQuant) -> bool:
        """Whether both projections match those of `pattern`."""
        return self.w13.matches(pattern.w13) and self.w2.matches(pattern.w2)

    def distance(self, other: LayerQuant) -> int:
        """In how many fields of both projections the two differ."""
        return self.w13.distance(other.w13) + self.w2.distance(other.w2)

    def differing(self, pattern: LayerQuant) -> frozenset[str]:
        """Names of the fields that `pattern` does not allow, in either projection."""
        return frozenset((*self.w13.differing(pattern.w13), *self.w2.differing(pattern.w2)))

    def cut(self, intermediate_size: int, *, halves: int, tp_size: int) -> LayerQuant:
        """The same numbers with blocks that end where a rank's share and the gate end.

        A block of the checkpoint may reach over the end of the gate into the up half, or over the end of one
        tensor-parallel rank's share. Its scale then belongs to two pieces, so the pieces get smaller blocks, each with
        that scale. Where every block already ends there, nothing changes.

        Args:
            intermediate_size: I of one tensor-parallel rank.
            halves: 2 for gated layers, whose `w13` is [gate; up], else 1.
            tp_size: Tensor-parallel ranks.
        """
        w13, w2 = self.w13, self.w2
        if halves == 2 or tp_size > 1:
            w13 = _with_block(w13, axis=0, size=intermediate_size)
        if tp_size > 1:
            w2 = _with_block(w2, axis=1, size=intermediate_size)
        return self if w13 is self.w13 and w2 is self.w2 else LayerQuant(w13, w2)


@functools.lru_cache(maxsize=256)
def _with_block(scheme: QuantScheme, axis: int, size: int) -> QuantScheme:
    """The scheme with blocks that divide `size` along `axis`."""
    block = scheme.weight_block
    if not isinstance(block, tuple) or block[axis] == WHOLE or size % block[axis] == 0:
        return scheme
    shared = math.gcd(block[axis], size)
    return attrs.evolve(scheme, weight_block=(shared, block[1]) if axis == 0 else (block[0], shared))
