"""What the stored weights of one projection are and what is done to activations, as a value.

A scheme describes numbers, not a vendor's name for them, so that a runner can declare patterns over it. The value is
also the door to what is built on it, its names (`label`, `from_name`) and the readers of configurations (`from_hf`):
whoever has a scheme finds them, and so these three import the modules above inside.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from moe_core.errors import SpecError
from moe_core.vocabulary import ANY, FLOAT_DTYPES, one_of, require_word

#: Element type of a stored weight -> its bits; 4-bit elements share bytes.
WEIGHT_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "fp4": 4}
WEIGHT_DTYPES = tuple(WEIGHT_BITS)
SCALE_DTYPES = ("none", "fp32", "bf16", "e4m3", "e8m0")
ACTIVATION_DTYPES = ("same", "fp8", "int8", "int4", "fp4")
ACTIVATION_SCALING = ("none", "dynamic", "static")

#: In a block or group size: the whole axis.
WHOLE = -1
#: As `activation_group`: all channels of all rows.
PER_TENSOR = 0


def _is_block(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is None or value == ANY:
        return
    sizes = value if isinstance(value, tuple) else ()
    if len(sizes) != 2 or not all(_is_size(size) for size in sizes):
        raise SpecError(f"QuantScheme.{attribute.name}: expected (rows, columns) of ints > 0 or {WHOLE}, got {value!r}")


def _is_group(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value != ANY and value != PER_TENSOR and not _is_size(value):
        raise SpecError(
            f"QuantScheme.{attribute.name}: expected an int > 0, {PER_TENSOR}, {WHOLE} or {ANY!r}, got {value!r}"
        )


def _is_flag(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value != ANY and not isinstance(value, bool):
        raise SpecError(f"QuantScheme.{attribute.name}: expected True, False or {ANY!r}, got {value!r}")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (value > 0 or value == WHOLE)


@attrs.frozen(kw_only=True, cache_hash=True)
class QuantScheme:
    """How one projection (`w13` or `w2`) is stored and computed. In a pattern any field may be `any`.

    Attributes:
        weight_dtype: Element type of the stored weight.
        weight_block: (rows, columns) that share one scale, `WHOLE` for an axis: (1, WHOLE) is per output channel,
            (WHOLE, WHOLE) per tensor, (1, 32) groups of 32 input channels; None when unquantized.
        weight_scale: Element type of those scales; they always multiply.
        global_scale: Whether one more fp32 multiplier per expert and half exists (NVFP4).
        zero_point: Whether each scale comes with a zero point that is subtracted from the stored integers first.
        activation_dtype: What activations are rounded to before the GEMM; `same` leaves them alone.
        activation_scaling: `dynamic` (from the data), `static` (from the checkpoint) or `none`.
        activation_group: Channels that share one activation scale; `WHOLE` is one scale per token, `PER_TENSOR` one
            for all.
        activation_scale: Element type of the activation scales.
    """

    weight_dtype: str = attrs.field(validator=one_of(*WEIGHT_DTYPES, ANY))
    weight_block: tuple[int, int] | str | None = attrs.field(default=None, validator=_is_block)
    weight_scale: str = attrs.field(default="none", validator=one_of(*SCALE_DTYPES, ANY))
    global_scale: bool | str = attrs.field(default=False, validator=_is_flag)
    zero_point: bool | str = attrs.field(default=False, validator=_is_flag)
    activation_dtype: str = attrs.field(default="same", validator=one_of(*ACTIVATION_DTYPES, ANY))
    activation_scaling: str = attrs.field(default="none", validator=one_of(*ACTIVATION_SCALING, ANY))
    activation_group: int | str = attrs.field(default=WHOLE, validator=_is_group)
    activation_scale: str = attrs.field(default="none", validator=one_of(*SCALE_DTYPES, ANY))

    def __attrs_post_init__(self) -> None:
        """Refuse a scheme that cannot be computed."""
        if self.weight_dtype in FLOAT_DTYPES and (self.weight_block is not None or self.weight_scale != "none"):
            raise SpecError(f"QuantScheme: unquantized {self.weight_dtype} weights have no block and no scale")
        quantized = self.weight_dtype not in (*FLOAT_DTYPES, ANY)
        if quantized and (self.weight_block is None or self.weight_scale == "none"):
            raise SpecError(f"QuantScheme: {self.weight_dtype} weights need weight_block and weight_scale")
        if self.zero_point is True and self.weight_dtype not in ("int4", "int8", ANY):
            raise SpecError(f"QuantScheme: {self.weight_dtype} weights have no zero point")
        if ANY not in (self.activation_dtype, self.activation_scaling) and (
            (self.activation_dtype == "same") != (self.activation_scaling == "none")
        ):
            raise SpecError(
                f"QuantScheme: activation_dtype {self.activation_dtype!r} and activation_scaling "
                f"{self.activation_scaling!r} contradict each other"
            )

    @property
    def is_quantized(self) -> bool:
        """Whether the stored weights are anything else than plain floats."""
        return self.weight_dtype not in FLOAT_DTYPES

    @property
    def weight_bits(self) -> int:
        """Bits of one stored weight; raises `SpecError` for a pattern that leaves its type open."""
        if self.weight_dtype == ANY:
            raise SpecError(f"QuantScheme: {self} is a pattern, whose weights have no size")
        return WEIGHT_BITS[self.weight_dtype]

    @property
    def is_per_tensor(self) -> bool:
        """Whether one scale serves a whole matrix; gate and up have one each."""
        return self.weight_block == (WHOLE, WHOLE)

    @property
    def scales_whole_rows(self) -> bool:
        """Whether all weights of an output row share a scale, which may then multiply the output instead."""
        return self.is_per_tensor or self.weight_block == (1, WHOLE)

    @property
    def has_input_global_scale(self) -> bool:
        """Whether the checkpoint brings the scale that NVFP4 tokens on the wire need."""
        return self.activation_dtype == "fp4" and self.activation_scaling == "static"

    @property
    def scales_by_batch(self) -> bool:
        """Whether one activation scale comes from all rows, so that a token's result depends on its batch."""
        return self.activation_scaling == "dynamic" and self.activation_group == PER_TENSOR

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """`weight_block` of a matrix of this size in numbers; of unquantized weights all of it."""
        across, along = self.weight_block if isinstance(self.weight_block, tuple) else (WHOLE, WHOLE)
        return (rows if across == WHOLE else across, columns if along == WHOLE else along)

    def matches(self, pattern: QuantScheme) -> bool:
        """Whether every field equals the pattern's or the pattern says `any` there."""
        return self == pattern or next(self.differing(pattern), None) is None

    def distance(self, pattern: QuantScheme) -> int:
        """How many fields the pattern does not allow."""
        return sum(1 for _ in self.differing(pattern))

    def differing(self, pattern: QuantScheme) -> Iterator[str]:
        """Names of the fields that the pattern does not allow."""
        for field in attrs.fields(QuantScheme):
            if getattr(pattern, field.name) not in (ANY, getattr(self, field.name)):
                yield field.name

    @property
    def is_pattern(self) -> bool:
        """Whether some field says `any`: a pattern describes no stored weights."""
        return any(getattr(self, field.name) == ANY for field in attrs.fields(QuantScheme))

    @functools.cached_property
    def label(self) -> str:
        """The constant's name in lower case, or the changed fields of a scheme without one."""
        from moe_core.quant.known import SCHEMES

        for name, scheme in SCHEMES.items():
            if scheme == self:
                return name
        fields = [
            f for f in attrs.fields(QuantScheme) if f.name != "weight_dtype" and getattr(self, f.name) != f.default
        ]
        return f"{self.weight_dtype}({', '.join(f'{f.name}={getattr(self, f.name)}' for f in fields)})"

    def __str__(self) -> str:
        """Same as `label`."""
        return self.label

    @classmethod
    def from_name(cls, name: str) -> QuantScheme:
        """The scheme of a name in `SCHEMES`; raises `SpecError` listing the known names."""
        from moe_core.quant.known import SCHEMES

        require_word(name, SCHEMES, "quantization scheme")
        return SCHEMES[name]

    @classmethod
    def from_hf(
        cls, quantization_config: Mapping[str, Any] | None, module_name: str = "", dtype: str = "bf16"
    ) -> QuantScheme:
        """The scheme of one module of a Hugging Face checkpoint.

        Args:
            quantization_config: The `quantization_config` of `config.json`, or None.
            module_name: Dotted name of the experts module, or of one projection in it; ignore-lists and overrides
                of the configuration go by it.
            dtype: Layer dtype of modules that are not quantized.

        Raises:
            SpecError: A method, algorithm or field that is not understood; the message names it.
        """
        from moe_core.quant.hf import read_scheme

        return read_scheme(quantization_config, module_name, dtype).scheme
