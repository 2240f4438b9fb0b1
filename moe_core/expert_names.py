"""What checkpoints and models call layers, experts modules and projections; free of torch.

A name is a module's, followed by the expert's number where experts lie one by one, a projection, and what is stored of
it: `model.layers.3.mlp.experts` `7` `gate_proj` `weight_scale`.
"""

from __future__ import annotations

import re

import attrs

#: The halves of `w13` and the one of `w2` -> how checkpoints call them; gate and up of one place go together.
PROJECTIONS = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3"),
    "down": ("down_proj", "w2", "output_linear"),
}
#: The halves that an expert may have, in this order; one without a gate has the other two.
HALVES = tuple(PROJECTIONS)
#: Gate and up in one tensor.
FUSED = ("gate_up_proj", "w13", "input_linear")
#: Of these, the names whose families store rows of gate and up by turns; read as halves they would be other experts.
INTERLEAVED = ("w13",)

_LEAF = "|".join(sorted({*FUSED, *(leaf for leaves in PROJECTIONS.values() for leaf in leaves)}, key=len, reverse=True))
#: What counts layers and experts; of more digits Python itself makes no number at some point.
_NUMBER = r"\d{1,9}"
# Nearly all families call the module `experts`. In the others a dense block may have the same name and projections, so
# that only what cannot be dense counts: numbered experts, and names that are used for stacked ones alone.
_EXPERT = re.compile(
    rf"(?P<module>(?:.+\.)?experts)\.(?:(?P<expert>{_NUMBER})\.)?(?P<leaf>{_LEAF})(?:[._](?P<rest>.+))?"
    rf"|(?P<block>.+\.(?:block_sparse_moe|mlp|moe))\.(?:(?P<number>{_NUMBER})\.(?P<of_one>{_LEAF})"
    r"|(?P<stacked>input_linear|output_linear|(?<=\.moe\.)(?:gate|up|down)_proj))(?:[._](?P<what>.+))?"
)
_INSIDE = re.compile(r"(?:.+\.)?experts\..+")
#: A tensor of the router, which some families keep inside the experts module.
_ROUTER = re.compile(r"(^|\.)e_score_correction_bias$")
#: JetMoe's attention has experts, which are no MoE layer.
_ATTENTION = re.compile(r"(^|\.)self_att(ention|n)\.")
_LAYER = re.compile(rf"\b(?:layers?|blocks)\.({_NUMBER})(?:\.|$)")
_DRAFT = re.compile(r"(^|\.)(mtp|draft|eagle)")


@attrs.frozen(kw_only=True)
class ExpertName:
    """The parts of the name of a tensor that stores experts.

    Attributes:
        module: The experts module.
        expert: Number of the expert; None where all lie in one tensor.
        projection: As the checkpoint calls it, one of `PROJECTIONS` or `FUSED`.
        rest: What follows it without the dot or underscore between (`weight`, `scale_inv`); empty if nothing does.
    """

    module: str
    expert: int | None
    projection: str
    rest: str

    @property
    def halves(self) -> tuple[str, ...]:
        """What it holds of an expert."""
        return halves_of(self.projection)


def expert_name(name: str) -> ExpertName | None:
    """The parts of a tensor's name; None if it stores no experts, or they are called in no known way."""
    found = None if _ATTENTION.search(name) else _EXPERT.fullmatch(name)
    if found is None:
        return None
    expert = found["expert"] or found["number"]
    return ExpertName(
        module=found["module"] or found["block"],
        expert=int(expert) if expert else None,
        projection=found["leaf"] or found["of_one"] or found["stacked"],
        rest=found["rest"] or found["what"] or "",
    )


def is_of_experts(name: str) -> bool:
    """Whether a tensor lies in an experts module, however it is called there, and is not the router's."""
    inside = _INSIDE.fullmatch(name) is not None and not (_ATTENTION.search(name) or _ROUTER.search(name))
    return inside or expert_name(name) is not None


def halves_of(projection: str) -> tuple[str, ...]:
    """The halves that one name of a projection means; none if it is no such name."""
    if projection in FUSED:
        return ("gate", "up")
    return tuple(half for half, names in PROJECTIONS.items() if projection in names)


def layer_index(name: str) -> int | None:
    """Number of the decoder layer that a module or tensor is in, or is; None if the name does not tell."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def is_draft(name: str) -> bool:
    """Whether a module or tensor belongs to a draft layer beside the model's own stack."""
    return _DRAFT.search(name) is not None
