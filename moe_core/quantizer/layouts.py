"""Every layout that can be written."""

from __future__ import annotations

from moe_core.quantizer import compressed_tensors, modelopt, modelslim, transformers_fp8
from moe_core.quantizer.layout import Layout
from moe_core.quantizer.words import ecosystem_of, scheme_name

#: Ecosystem -> name of a scheme -> layout.
LAYOUTS: dict[str, dict[str, Layout]] = {
    ecosystem: {layout.stored.scheme.label: layout for layout in layouts}
    for ecosystem, layouts in (
        ("transformers", transformers_fp8.LAYOUTS),
        ("modelopt", modelopt.LAYOUTS),
        ("compressed_tensors", compressed_tensors.LAYOUTS),
        ("modelslim", modelslim.LAYOUTS),
    )
}


def find_layout(scheme: str, ecosystem: str | None = None) -> Layout:
    """The layout of `scheme` in `ecosystem`, or in its usual one; errors as `words.ecosystem_of`."""
    return LAYOUTS[ecosystem_of(scheme, ecosystem)][scheme_name(scheme)]
