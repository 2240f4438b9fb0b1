"""Ascend operators on the CPU: the plugin's real code runs end to end where no NPU is.

`install()` registers CPU kernels for every operator that the plugin calls, on the vendor's own schemas where its
torch_npu can be loaded (`vendor`), on the shipped copy of those schemas otherwise. A call with an argument that the
operator does not have is refused either way; with torch_npu its Meta kernels can be asked as well. Tiles and packed
integers lie in memory as documented, and undefined rows are poisoned, so that a wrong layout gives wrong numbers.
"""

from __future__ import annotations

import functools
import threading
from importlib import resources

import attrs
import torch

from moe_plugin_ascend.emulation.kernels import KERNELS
from moe_plugin_ascend.emulation.vendor import find_vendor

#: What the kernels take for granted where the vendor documents a signature and not, or not only, what it computes.
ASSUMPTIONS = (
    "npu_grouped_matmul: sums in fp32 (integers exactly), one rounding to bf16 after all scales and the bias.",
    "npu_grouped_matmul: groups may end before the rows do, and what follows them is left alone; torch_npu's docstring "
    "says that they end together, the notes of the operator below it that they end at the latest there.",
    "npu_grouped_matmul, int8 tokens and weights: output_dtype int32 without scales gives the sums; serving code of "
    "the vendor relies on it, the docstring's table does not list it.",
    "npu_grouped_matmul, int8 tokens and int4 weights: y = row_scale * (scale * ((x - 8) @ w) + bias).",
    "npu_grouped_matmul, int4 words: eight along the last axis, the lowest nibble first; int64 scales are fp32 bits.",
    "npu_dynamic_quant, npu_moe_init_routing_v2, npu_dequant_swiglu_quant: codes are rounded half to even, a row of "
    "zeros has scale 0 and codes 0.",
    "npu_swiglu, npu_dequant_swiglu_quant: fp32 inside, one rounding at the end.",
    "npu_moe_token_unpermute: products and sums in fp32 in the order of slots, one rounding.",
    "npu_moe_init_routing_v2: rows of an expert in the order of their tokens.",
    "npu_format_cast casts the whole storage, also of a view.",
    "copy_ writes one expert of a tiled tensor, from a tensor in tiles, as one piece of memory.",
)


@attrs.frozen
class Emulation:
    """What stands behind the operators here.

    Attributes:
        torch_npu: Version of the vendor's package whose schemas and Meta kernels are used; "" for the shipped schemas.
    """

    torch_npu: str

    def __str__(self) -> str:
        """For the header of a test run."""
        return f"schemas and Meta kernels of torch_npu {self.torch_npu}" if self.torch_npu else "shipped schema list"


#: Registered kernels live as long as these.
_libraries: list[torch.library.Library] = []


_installing = threading.Lock()


def install() -> Emulation:
    """Register the kernels; once in a process, whichever thread asks first.

    Raises:
        FileNotFoundError: A folder for torch_npu is there, without one that was made loadable.
        ImportError: What is there cannot be loaded.
    """
    with _installing:
        return _install()


@functools.cache
def _install() -> Emulation:
    version = find_vendor()
    if not version:
        shipped = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in shipped_schemas():
            shipped.define(schema.removeprefix("npu::"))  # type: ignore[no-untyped-call]
        _libraries.append(shipped)
    library = torch.library.Library("npu", "IMPL")  # type: ignore[no-untyped-call]
    for (operator, key), kernel in KERNELS.items():
        library.impl(operator, kernel, key)  # type: ignore[no-untyped-call]
    _libraries.append(library)
    return Emulation(version)


def shipped_schemas() -> list[str]:
    """The schemas of torch_npu 2.13.0 that this plugin uses."""
    text = resources.files(__package__).joinpath("schemas.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]
