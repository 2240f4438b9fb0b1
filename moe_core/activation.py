"""What happens between the two GEMMs of an expert, as a value.

A runner declares the exact variants it implements and is never given another one: kernels that silently
compute plain SwiGLU for a clamped variant are a common cause of fluent but wrong text.
"""

from __future__ import annotations

import math

import attrs

from moe_core.errors import SpecError
from moe_core.vocabulary import ANY, instance_of, one_of

#: Element-wise functions; `module` stands for a callable that the model brings with its weights.
ACTIVATION_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "module")
ROW_ORDERS = ("gate_up", "interleaved")
CLAMPS = ("before", "after")


@attrs.frozen(kw_only=True)
class ActivationSpec:
    """One activation variant.

    With `h = W13 x + b13` (`[rows, 2I]` when gated, else `[rows, I]`), `g` its gate and `u` its up half:

    * not gated: `f(h)`
    * gated: `f(g) * (u + beta)`, where `silu` means `g * sigmoid(alpha * g)` and `relu2` `relu(g) * relu(g)`: finite
      where the product is, whatever the square alone
    * with `limit` and `clamp="before"`: first `g = min(g, limit)` and `u = clip(u, -limit, limit)`
    * with `limit` and `clamp="after"`: `min(f(g), limit) * (clip(u, -limit, limit) + beta)`

    The gate is never clamped from below. `kind="module"` gives the whole `h` to a callable that comes with
    the weights (`RawWeights.activation`), for models whose gate is none of the known ones.

    Attributes:
        kind: One of `ACTIVATION_KINDS`.
        gated: Whether `w13` holds a gate and an up half.
        alpha: Factor inside the sigmoid of `silu` (gpt-oss: 1.702).
        limit: Clamp limit, None for none (gpt-oss: 7.0).
        beta: Added to the up half (gpt-oss: 1.0).
        clamp: Whether `limit` acts `before` or `after` the element-wise function.
        row_order: `gate_up` (all gate rows, then all up rows) or `interleaved` (gate row 2i, up row 2i + 1).
    """

    kind: str = attrs.field(default="silu", validator=one_of(*ACTIVATION_KINDS))
    gated: bool = attrs.field(default=True, validator=instance_of(bool))
    alpha: float = attrs.field(default=1.0, converter=float)
    limit: float | None = attrs.field(default=None, converter=attrs.converters.optional(float))
    beta: float = attrs.field(default=0.0, converter=float)
    clamp: str = attrs.field(default="before", validator=one_of(*CLAMPS))
    row_order: str = attrs.field(default="gate_up", validator=one_of(*ROW_ORDERS))

    def __attrs_post_init__(self) -> None:
        """Refuse parameters that this kind would ignore."""
        if self.limit is not None and not (math.isfinite(self.limit) and self.limit > 0):
            raise SpecError(f"ActivationSpec.limit: expected a finite number > 0 or None, got {self.limit}")
        for name in ("alpha", "beta"):
            if not math.isfinite(getattr(self, name)):
                raise SpecError(f"ActivationSpec.{name}: expected a finite number, got {getattr(self, name)}")
        if self.alpha != 1.0 and self.kind != "silu":
            raise SpecError(f"ActivationSpec.alpha applies to kind 'silu' only, not to {self.kind!r}")
        if self.clamp != "before" and self.limit is None:
            raise SpecError(f"ActivationSpec.clamp: {self.clamp!r} needs a limit")
        if self.kind == "module" and (self.limit is not None or self.beta != 0.0):
            raise SpecError("ActivationSpec: kind 'module' computes everything itself; limit and beta do not apply")
        gate_only = {
            "limit": self.limit is not None,
            "beta": self.beta != 0.0,
            "row_order": self.row_order != "gate_up",
        }
        for name in (name for name, is_set in gate_only.items() if is_set and not self.gated):
            raise SpecError(f"ActivationSpec.{name} applies to gated activations only")

    @property
    def rows_per_channel(self) -> int:
        """Rows of `w13` per intermediate channel: 2 when gated, else 1."""
        return 2 if self.gated else 1

    def __str__(self) -> str:
        """A short form for tables: `silu-gated`, `silu-gated(alpha=1.702, limit=7.0, beta=1.0)`, `relu2`."""
        defaults = {f.name: f.default for f in attrs.fields(ActivationSpec)}
        changed = [
            f"{name}={getattr(self, name)}"
            for name in ("alpha", "limit", "beta", "clamp", "row_order")
            if getattr(self, name) != defaults[name]
        ]
        parameters = f"({', '.join(changed)})" if changed else ""
        return f"{self.kind}{'-gated' if self.gated else ''}{parameters}"


SWIGLU = ActivationSpec()
GEGLU = ActivationSpec(kind="gelu")
GEGLU_TANH = ActivationSpec(kind="gelu_tanh")
SWIGLU_OAI = ActivationSpec(alpha=1.702, limit=7.0, beta=1.0)
RELU2 = ActivationSpec(kind="relu2", gated=False)


@attrs.frozen(kw_only=True)
class ActivationPattern:
    """Which activation variants a runner implements.

    Attributes:
        kind: One kind, or `any` for every kind but `module`.
        gated: True, False, or None for both.
        parameters: Whether `alpha`, `limit`, `beta` and `clamp` are honoured; False accepts only their defaults.
        interleaved: Whether interleaved gate and up rows are read as they are.
    """

    kind: str = attrs.field(default="silu", validator=one_of(*ACTIVATION_KINDS, ANY))
    gated: bool | None = True
    parameters: bool = False
    interleaved: bool = False

    def matches(self, activation: ActivationSpec) -> bool:
        """Whether `activation` is covered."""
        if self.kind == ANY:
            if activation.kind == "module":
                return False
        elif self.kind != activation.kind:
            return False
        is_plain = activation.alpha == 1.0 and activation.limit is None and activation.beta == 0.0
        return (
            self.gated in (None, activation.gated)
            and (self.parameters or is_plain)
            and (self.interleaved or activation.row_order == "gate_up")
        )

    def __str__(self) -> str:
        """A short form for tables and reasons."""
        gate = {True: "-gated", False: "", None: "(-gated)"}[self.gated]
        extra = [word for word, on in (("parameters", self.parameters), ("interleaved", self.interleaved)) if on]
        return f"{self.kind}{gate}{'+' + '+'.join(extra) if extra else ''}"
