"""What every ecosystem's layout consists of: how one expert is stored, and what the checkpoint says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from moe_core.payloads import Tensor
from moe_core.quant import StoredScheme


@attrs.frozen(eq=False, kw_only=True)
class Expert:
    """The float weights of one expert.

    Attributes:
        weights: Half -> weight, output x input: `gate` and `up` `[I, H]`, `down` `[H, I]`.
        input_amax: Half -> largest magnitude of the projection's input; empty where activations are not static.
    """

    weights: Mapping[str, Tensor]
    input_amax: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Contents:
    """What was written, for the description of the checkpoint.

    Attributes:
        quantized: Names of all tensors that store quantized experts.
        kept: Names of the tensors that were copied.
        kept_modules: Names of the modules whose weight matrices were copied, and `lm_head`, which may be tied.
    """

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    kept_modules: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Description:
    """What readers need besides the tensors.

    Attributes:
        quantization_config: For `config.json`, or None where the ecosystem has none there.
        files: Name -> content of further JSON files.
    """

    quantization_config: dict[str, Any] | None = None
    files: dict[str, dict[str, Any]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Layout:
    """One ecosystem's layout of one scheme.

    Attributes:
        stored: The scheme and the project's word for the layout.
        store: One expert -> half -> what follows the projection's name -> tensor.
        describe: What was written -> what is said about it.
        row_multiple: Output widths must be multiples of it.
        column_multiple: Input widths must be multiples of it.
        down_column_multiple: The same for the down projection alone.
        static_inputs: Whether `store` needs `input_amax`.
        file_stem: Names of the weight files begin with it.
    """

    stored: StoredScheme
    store: Callable[[Expert], dict[str, dict[str, Tensor]]]
    describe: Callable[[Contents], Description]
    row_multiple: int = 1
    column_multiple: int = 1
    down_column_multiple: int = 1
    static_inputs: bool = False
    file_stem: str = "model"


def each_projection(
    store: Callable[[str, Tensor], dict[str, Tensor]],
) -> Callable[[Expert], dict[str, dict[str, Tensor]]]:
    """`Layout.store` of a layout that stores every projection by itself, by `store(half, weight)`."""
    return lambda expert: {half: store(half, weight) for half, weight in expert.weights.items()}
