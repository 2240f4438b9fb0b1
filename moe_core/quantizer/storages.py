"""Every layout that can be written."""

from __future__ import annotations

from moe_core.quantizer import compressed_tensors, modelopt, modelslim, transformers_fp8
from moe_core.quantizer.storage import Storage
from moe_core.quantizer.words import ecosystem_of

#: Ecosystem -> word of a scheme -> layout.
STORAGES: dict[str, dict[str, Storage]] = {
    "transformers": transformers_fp8.STORAGES,
    "compressed_tensors": compressed_tensors.STORAGES,
    "modelopt": modelopt.STORAGES,
    "modelslim": modelslim.STORAGES,
}


def find_storage(scheme: str, ecosystem: str | None = None) -> Storage:
    """The layout of `scheme` in `ecosystem`, or in its usual one; errors as `words.ecosystem_of`."""
    return STORAGES[ecosystem_of(scheme, ecosystem)][scheme]
