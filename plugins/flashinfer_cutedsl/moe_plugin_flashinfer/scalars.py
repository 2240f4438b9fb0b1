"""The scalars of NVFP4 experts: what tokens are multiplied with before rounding, and GEMM results afterwards.

A stored value is `code * block scale * global scale`, a rounded activation `code * block scale * input scale`. A kernel
takes the reciprocal of an input scale (it multiplies before it rounds) and multiplies a GEMM's sums with
`alpha = global scale * input scale`, which makes them sums of values. Source: ModelOpt's NVFP4 checkpoints.

**Gate and up with different global scales.** The kernels have one alpha for both halves. The masked one is given the
gate's; its up half, and with it the product `h` of a SwiGLU, is then too small by `r = up / gate`. Its quantizer takes
a scale by expert: with `r / input scale` in place of `1 / input scale` it rounds `(h / r) * r`, the same numbers, to
the same codes. The wrapper's quantizer takes one scale for all experts, so that its halves must come to share theirs
(see `shared_halves`).
"""

from __future__ import annotations

import attrs
import torch

from moe_core.activation import ActivationSpec
from moe_core.errors import WeightsError
from moe_core.payloads import Tensor

_SUFFIXES = ("global_scale", "input_scale")


@attrs.frozen(eq=False, kw_only=True)
class Calibration:
    """The stored scalars of a layer in float64, all positive.

    Attributes:
        x_input, hidden_input: `[L]`, input scales of the two projections.
        halves: `[L, 2]`, global scales of gate and up; `[L, 1]` of experts that are not gated.
        w2_global: `[L]`.
    """

    x_input: Tensor
    hidden_input: Tensor
    halves: Tensor
    w2_global: Tensor

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Calibration:
        """Read the canonical tensors.

        Raises:
            WeightsError: Lists each scalar that is missing, zero, negative or not finite, with its experts.
        """
        names = [f"{projection}_{suffix}" for projection in ("w13", "w2") for suffix in _SUFFIXES]
        problems = [f"{name}: missing for all {len(tensors['w13'])} experts" for name in names if name not in tensors]
        for name in (name for name in names if name in tensors):
            problems += _problems(name, tensors[name])
        _refuse("scales of NVFP4 experts cannot be used", problems)
        found = {name: tensors[name].double() for name in names}
        halves = found["w13_global_scale"]
        return cls(
            x_input=found["w13_input_scale"],
            hidden_input=found["w2_input_scale"],
            halves=halves if halves.dim() == 2 else halves[:, None],
            w2_global=found["w2_global_scale"],
        )

    @property
    def ratio(self) -> Tensor:
        """`[L]`: the up half's global scale over the gate's; one where experts are not gated."""
        return self.halves[:, -1] / self.halves[:, 0]


@attrs.frozen(eq=False, kw_only=True)
class Scalars:
    """What a kernel takes; fp32.

    Attributes:
        x_scale: Multiplies tokens before they are rounded, `[L]` or `[1]`.
        hidden_scale: Multiplies the activation before it is rounded, `[L]` or `[1]`.
        w13_alpha, w2_alpha: `[L]`, multiply the sums of the GEMMs.
    """

    x_scale: Tensor
    hidden_scale: Tensor
    w13_alpha: Tensor
    w2_alpha: Tensor

    def __attrs_post_init__(self) -> None:
        """Refuse what fp32 cannot hold."""
        problems = [p for name in attrs.fields_dict(Scalars) for p in _problems(name, getattr(self, name))]
        _refuse("scales of NVFP4 experts leave the range of fp32", problems)


def masked_scalars(calibration: Calibration, activation: ActivationSpec, *, tokens_arrive_rounded: bool) -> Scalars:
    """For the masked kernels, which take every scalar by expert.

    Args:
        calibration: The stored scalars.
        activation: Of the layer.
        tokens_arrive_rounded: Whether the dispatcher sends nvfp4: it rounds with one scale before it is known which
            expert reads a token.

    Raises:
        WeightsError: Gate and up differ in their global scales and the activation is not linear in up; or input scales
            differ where tokens arrive rounded. Names the experts.
    """
    if tokens_arrive_rounded:
        one_for_all("w13_input_scale", calibration.x_input, "tokens are dispatched as nvfp4")
    ratio = calibration.ratio
    if not is_linear_in_up(activation):
        _refuse(
            f"gate and up have one alpha, and {activation} is not linear in up: their global scales must be equal",
            [f"w13_global_scale: differs for local experts {_experts(ratio != 1)}"] if (ratio != 1).any() else [],
        )
    return _scalars(
        x_scale=1 / calibration.x_input,
        hidden_scale=ratio / calibration.hidden_input,
        w13_global=calibration.halves[:, 0],
        # The second GEMM reads h / r.
        w2_global=calibration.w2_global * ratio,
    )


def wrapper_scalars(calibration: Calibration) -> Scalars:
    """For the wrapper, which rounds with one scale for all experts; gate and up share the larger global scale.

    Raises:
        WeightsError: Input scales differ by expert; names the experts.
    """
    why = "the CuteDSL wrapper rounds with one scale"
    return _scalars(
        x_scale=1 / one_for_all("w13_input_scale", calibration.x_input, why),
        hidden_scale=1 / one_for_all("w2_input_scale", calibration.hidden_input, why),
        w13_global=calibration.halves.amax(1),
        w2_global=calibration.w2_global,
    )


def is_linear_in_up(activation: ActivationSpec) -> bool:
    """Whether a factor on the up half is a factor on the result; so it is where there is no up half."""
    return activation.kind != "module" and activation.limit is None and activation.beta == 0.0


def one_for_all(name: str, scale: Tensor, why: str) -> Tensor:
    """`[1]`, the scale that all experts share; `[0]` on a rank without experts.

    Raises:
        WeightsError: They do not; names those that differ from the largest.
    """
    if not len(scale):
        return scale
    largest = scale.amax(0, keepdim=True)
    differs = scale != largest
    if differs.any():
        raise WeightsError(
            f"{name}: {why}, so that all experts must have one; local experts {_experts(differs)} differ from the "
            f"largest, {float(largest):.6g}. Give every expert of the layer the largest, as load_experts does"
        )
    return largest


def shared_halves(scale: Tensor, halves: Tensor) -> Tensor:
    """Block scales of one expert's gate and up under the larger of their global scales, where `can_share`.

    The half with the smaller global scale takes the ratio, at most one, into its block scales.

    Args:
        scale: e4m3 `[2I, K']`, rows [gate; up].
        halves: float64 `[2]`, their global scales.
    """
    parts, smaller = list(scale.chunk(2)), int(halves.argmin())
    parts[smaller] = _Products.by(halves[smaller], halves.amax()).of(parts[smaller])
    return torch.cat(parts)


def can_share(scale: Tensor, halves: Tensor) -> bool:
    """Whether `shared_halves` changes no value: every product is a number of e4m3.

    So it is for ratios that are powers of two, unless a scale falls below the smallest numbers of e4m3; for other
    ratios hardly ever.
    """
    smaller = int(halves.argmin())
    return _Products.by(halves[smaller], halves.amax()).is_exact_for(scale.chunk(2)[smaller])


@attrs.frozen(eq=False)
class _Products:
    """e4m3 has 256 numbers, so that multiplying any of them by one factor is a look-up.

    Attributes:
        rounded: e4m3 `[256]`, by code of the number: its product.
        is_exact: bool `[256]`, whether nothing was rounded.
    """

    rounded: Tensor
    is_exact: Tensor

    @classmethod
    def by(cls, numerator: Tensor, denominator: Tensor) -> _Products:
        """Products with a quotient of two fp32 numbers, given in float64."""
        codes = torch.arange(256, dtype=torch.uint8, device=numerator.device).view(torch.float8_e4m3fn)
        # Of 4 and 24 bits: float64 holds it.
        product = codes.double() * numerator
        rounded = (product / denominator).to(codes.dtype)
        return cls(rounded, rounded.double() * denominator == product)

    def of(self, scale: Tensor) -> Tensor:
        """The products of e4m3 `[N, K']`."""
        codes = scale.view(torch.uint8).flatten().int()
        return self.rounded.view(torch.uint8).index_select(0, codes).view(scale.dtype).view(scale.shape)

    def is_exact_for(self, scale: Tensor) -> bool:
        """Whether all of them are."""
        occurs = torch.bincount(scale.view(torch.uint8).flatten(), minlength=256) > 0
        return bool(self.is_exact[occurs].all())


def _scalars(*, x_scale: Tensor, hidden_scale: Tensor, w13_global: Tensor, w2_global: Tensor) -> Scalars:
    """Alphas undo the scales as the kernel has them, rounded to fp32."""
    x_scale, hidden_scale = x_scale.float(), hidden_scale.float()
    return Scalars(
        x_scale=x_scale,
        hidden_scale=hidden_scale,
        w13_alpha=(w13_global / x_scale.double()).float(),
        w2_alpha=(w2_global / hidden_scale.double()).float(),
    )


def _problems(name: str, values: Tensor) -> list[str]:
    words = {"not finite": ~values.isfinite(), "zero": values == 0, "negative": values < 0}
    return [f"{name}: {word} for local experts {_experts(bad)}" for word, bad in words.items() if bad.any()]


def _experts(where: Tensor) -> list[int]:
    return sorted(set(where.nonzero()[:, 0].tolist()))


def _refuse(title: str, problems: list[str]) -> None:
    if problems:
        raise WeightsError.listing(f"{title}; nothing was loaded:", problems)
