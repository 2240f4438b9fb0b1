"""Canonical weights to the layout that the kernel reads, and reloads into the same memory.

Canonical: `w13 [L, 2I, H]` with rows [gate; up] and `w2 [L, H, I]`, any strides. The toy accelerator multiplies rows by
`[L, inputs, outputs]`, so both are transposed. For a kernel that reads canonical weights return the raw tensors as they
are, with `owned=False`.
"""

from __future__ import annotations

from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights

_NAMES = ("w13", "w2")


def prepare(weights: RawWeights, out: PreparedWeights | None, layout: str) -> PreparedWeights:
    """New tensors on the first load (`out` is None), the same tensors filled anew on a reload."""
    if out is None:
        tensors = {}
        for name in _NAMES:
            raw = weights.tensors[name]
            # Every tensor with something of an expert in it is listed, with the axis that counts experts.
            tensors[name] = PreparedTensor(data=raw.new_empty(raw.mT.shape), expert_axis=0)
        out = PreparedWeights(layout=layout, tensors=tensors)
    for expert in range(weights.tensors["w13"].shape[0]):
        for name in _NAMES:
            # Expert by expert: raw tensors are read-only, and two copies of a whole layer never exist.
            out[name][expert].copy_(weights.tensors[name][expert].mT)
        if weights.release is not None:
            # The owner may take this expert's raw memory back: nothing reads it any more.
            weights.release(expert)
    return out
