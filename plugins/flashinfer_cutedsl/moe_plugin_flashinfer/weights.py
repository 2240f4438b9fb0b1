"""From canonical NVFP4 weights to what the kernels read, one expert after the other.

Codes go straight into their place; block scales, an eighth of their bytes, through a copy of one expert's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch

from moe_core.errors import WeightsError
from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights, Tensor
from moe_core.plan import MoEPlan
from moe_plugin_flashinfer.layouts import swizzle, swizzled_shape, wrapper_rows
from moe_plugin_flashinfer.prepared import is_readable
from moe_plugin_flashinfer.runner_specs import MASKED, WRAPPER
from moe_plugin_flashinfer.scalars import (
    Calibration,
    Scalars,
    can_share,
    masked_scalars,
    shared_halves,
    wrapper_scalars,
)

_PROJECTIONS = ("w13", "w2")


@attrs.frozen(eq=False, kw_only=True)
class _Recipe:
    """How one layer's weights are laid out.

    Attributes:
        layout: The tag.
        scalars: What goes beside codes and block scales.
        rows: int64 `[2I]`, where the rows of `w13` come from; None leaves them in place.
        halves: Local expert -> float64 `[2]`, global scales of gate and up that its block scales must make up for.
        shared: Names of the scalars that are one for all experts and do not move with them.
    """

    layout: str
    scalars: Scalars
    rows: Tensor | None = None
    halves: Mapping[int, Tensor] = attrs.field(factory=dict)
    shared: tuple[str, ...] = ()

    def rows_of(self, name: str) -> Tensor | None:
        """The order of a projection's rows."""
        return self.rows if name == "w13" else None

    def scale(self, name: str, stored: Tensor, expert: int) -> Tensor:
        """One expert's block scales `[N, K']`, with rows in order."""
        if name == "w13" and expert in self.halves:
            stored = shared_halves(stored, self.halves[expert])
        rows = self.rows_of(name)
        return stored if rows is None else stored.view(torch.uint8).index_select(0, rows).view(stored.dtype)


def prepare(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """The weights of a layer in the layout of its runner; with `out`, refilled in place.

    Codes whose rows stay where they are may be borrowed. Memory beside source and result: one expert's block scales.

    Raises:
        WeightsError: Scales that cannot be used, with their experts; nothing was written then.
    """
    _check_block_scales(weights.tensors)
    recipe = _RECIPES[plan.weight_layout](plan, weights.tensors)
    if out is None:
        out = PreparedWeights(layout=recipe.layout, tensors=_places(weights, recipe), token_scale="x_scale")
    _fill(weights, recipe, out)
    return out


def _check_block_scales(raw: dict[str, Tensor]) -> None:
    """NaN in the first projection would not show: rounding the activation makes the largest code of it."""
    problems = []
    for name in ("w13_scale", "w2_scale"):
        bad = [expert for expert, scale in enumerate(raw[name]) if bool(scale.isnan().any())]
        problems += [f"{name}: NaN for local experts {bad}"] if bad else []
    if problems:
        raise WeightsError.listing("block scales of NVFP4 experts cannot be used; nothing was loaded:", problems)


def _masked(plan: MoEPlan, raw: dict[str, Tensor]) -> _Recipe:
    is_rounded = any(route.token_dtype.dtype == "nvfp4" for route in plan.routes)
    scalars = masked_scalars(Calibration.of(raw), plan.request.activation, tokens_arrive_rounded=is_rounded)
    return _Recipe(layout=MASKED, scalars=scalars)


def _wrapper(plan: MoEPlan, raw: dict[str, Tensor]) -> _Recipe:
    calibration = Calibration.of(raw)
    scalars = wrapper_scalars(calibration)
    gated = plan.request.activation.gated
    rows = wrapper_rows(raw["w13"].shape[1]).to(raw["w13"].device) if gated else None
    return _Recipe(
        layout=WRAPPER,
        scalars=scalars,
        rows=rows,
        halves=_halves_to_share(raw["w13_scale"], calibration.halves),
        shared=("x_scale", "hidden_scale"),
    )


#: Weight layout -> what makes its recipe of a plan and raw tensors.
_RECIPES: dict[str, Callable[[MoEPlan, dict[str, Tensor]], _Recipe]] = {
    MASKED: _masked,
    WRAPPER: _wrapper,
}


def _halves_to_share(scale: Tensor, halves: Tensor) -> dict[int, Tensor]:
    """The experts whose gate and up differ; tried before anything is written, since not all can share a scale."""
    differing = (halves != halves[:, :1]).any(1).nonzero()[:, 0].tolist()
    lost = [expert for expert in differing if not can_share(scale[expert], halves[expert])]
    if lost:
        raise WeightsError(
            f"w13_global_scale: gate and up of local experts {lost} differ by factors that their block scales cannot "
            "take exactly, and the CuteDSL wrapper has one alpha for both; the masked runner (a2a_backend='deepep') "
            "computes them, or quantize both halves with one scale; nothing was loaded"
        )
    return {expert: halves[expert] for expert in differing}


def _places(weights: RawWeights, recipe: _Recipe) -> dict[str, PreparedTensor]:
    """Where everything goes; codes that need no change stay where they are, unless their experts are given back."""
    raw, places = weights.tensors, {}
    for name in _PROJECTIONS:
        codes, scale = raw[name], raw[f"{name}_scale"]
        stays = recipe.rows_of(name) is None and weights.release is None and is_readable(codes)
        places[name] = PreparedTensor(data=codes if stays else codes.new_empty(codes.shape), owned=not stays)
        shape = (scale.shape[0], *swizzled_shape(*scale.shape[1:]))
        places[f"{name}_scale"] = PreparedTensor(data=scale.new_empty(shape))
    for name, value in attrs.asdict(recipe.scalars).items():
        places[name] = PreparedTensor(data=torch.empty_like(value), expert_axis=None if name in recipe.shared else 0)
    return places


def _fill(weights: RawWeights, recipe: _Recipe, out: PreparedWeights) -> None:
    for name, value in attrs.asdict(recipe.scalars).items():
        out[name].copy_(value)
    for expert in range(weights.tensors["w13"].shape[0]):
        raw = {name: tensor[expert] for name, tensor in weights.tensors.items()}
        for name in _PROJECTIONS:
            _move(raw[name], recipe.rows_of(name), out[name][expert])
            scale = recipe.scale(name, raw[f"{name}_scale"], expert)
            swizzle(scale[None], out=out[f"{name}_scale"][expert : expert + 1])
        if weights.release is not None:
            weights.release(expert)


def _move(codes: Tensor, rows: Tensor | None, place: Tensor) -> None:
    """Copy one expert's codes `[N, K/2]` to their place, with rows in order; borrowed ones are there already."""
    if rows is not None:
        # In words of eight bytes it is faster; the runner's limits make rows of whole cache lines.
        torch.index_select(_readable_in_words(codes).view(torch.int64), 0, rows, out=place.view(torch.int64))
    elif codes.data_ptr() != place.data_ptr():
        place.copy_(codes)


def _readable_in_words(codes: Tensor) -> Tensor:
    """The same bytes without gaps, and where words begin."""
    whole = codes.is_contiguous() and codes.storage_offset() % 8 == 0
    return codes if whole else codes.clone(memory_format=torch.contiguous_format)
