"""Top-k routing: router logits to expert ids and weights.

One value (`RoutingSpec`) and one function (`route`) cover the routers of the common families:

| family | spec |
|---|---|
| Mixtral, Qwen3-MoE with `norm_topk_prob` | `RoutingSpec(top_k=k)` |
| Qwen2-MoE, OLMoE without `norm_topk_prob` | `RoutingSpec(top_k=k, renormalize=False)` |
| gpt-oss | `RoutingSpec(top_k=k, scoring="topk_softmax")` |
| Llama-4 | `RoutingSpec(top_k=k, scoring="sigmoid", renormalize=False)` |
| MiniMax-M2 | `RoutingSpec(top_k=k, scoring="sigmoid")` and a correction bias |
| DeepSeek-V3, GLM-4-MoE | as MiniMax-M2, with `n_group`, `topk_group` and `routed_scaling_factor` |
| DeepSeek-V4, where experts are not looked up by token id | as MiniMax-M2, with `scoring="sqrtsoftplus"` |

Letters: `T` tokens, `E` experts, `K` top-k, `G` groups.
"""

from __future__ import annotations

import math

import attrs
import torch

from moe_core.errors import InputError, SpecError, some_of
from moe_core.kernels.checks import can_assert
from moe_core.payloads import Tensor
from moe_core.vocabulary import at_least, instance_of, one_of

#: What an expert's score is: its probability among all experts, its own sigmoid, the bare logit, which becomes a
#: probability among the chosen experts only, or the square root of `log(1 + exp(logit))`.
SCORINGS = ("softmax", "sigmoid", "topk_softmax", "sqrtsoftplus")

#: A logit below which `log(1 + exp(logit))` is `exp(logit)`, in fp64 too, and above whose size the logit itself.
_FAR = 40.0


@attrs.frozen(kw_only=True)
class RoutingSpec:
    """How one router picks and weighs experts.

    Attributes:
        top_k: Experts per token.
        scoring: One of `SCORINGS`.
        renormalize: Divide the chosen scores by their sum (`norm_topk_prob` of Hugging Face configurations).
            `topk_softmax` weights sum to 1 either way.
        n_group: Experts lie in this many groups of equal size.
        topk_group: Groups that stay open to a token: those of the best scores. A group's score is its best
            expert's, or with a correction bias the sum of its best two.
        routed_scaling_factor: Multiplies the final weights, renormalized or not.
    """

    top_k: int = attrs.field(validator=at_least(1))
    scoring: str = attrs.field(default="softmax", validator=one_of(*SCORINGS))
    renormalize: bool = attrs.field(default=True, validator=instance_of(bool))
    n_group: int = attrs.field(default=1, validator=at_least(1))
    topk_group: int = attrs.field(default=1, validator=at_least(1))
    routed_scaling_factor: float = attrs.field(default=1.0, converter=float)

    def __attrs_post_init__(self) -> None:
        """Refuse values that contradict each other."""
        if self.topk_group > self.n_group:
            raise SpecError(f"RoutingSpec: topk_group {self.topk_group} exceeds n_group {self.n_group}")
        if not math.isfinite(self.routed_scaling_factor):
            raise SpecError(
                f"RoutingSpec.routed_scaling_factor: expected a finite number, got {self.routed_scaling_factor}"
            )

    def check_num_experts(self, num_experts: int) -> None:
        """Raise `SpecError`, naming both numbers, unless this spec can pick among `num_experts` experts."""
        if num_experts % self.n_group:
            raise SpecError(
                f"RoutingSpec: {num_experts} experts cannot be cut into n_group {self.n_group} equal groups; "
                "n_group must divide the number of experts"
            )
        available = self.topk_group * (num_experts // self.n_group)
        if self.top_k > available:
            groups = "" if self.n_group == 1 else f" in {self.topk_group} of {self.n_group} groups"
            raise SpecError(f"RoutingSpec: top_k {self.top_k} exceeds the {available} experts{groups}")


def route(
    logits: Tensor, spec: RoutingSpec, *, correction_bias: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Pick and weigh experts.

    Everything is computed in fp32, or in fp64 if the logits are. The ids of a row are distinct, best first, and equal
    scores go to the lower id. Without a correction bias experts are compared by their logits, so that scores which
    saturate keep their order. A logit of -inf bars an expert: it is picked last and weighs 0, and if every chosen
    expert is barred the whole row weighs 0.

    Args:
        logits: `[T, E]` router logits of any float dtype, any number of experts.
        spec: What to compute.
        correction_bias: `[E]`, added to the scores to pick experts and groups, never part of a weight
            (`e_score_correction_bias`).
        valid: `[T]` bool; a row with False gets ids -1 and weights 0, whatever its logits are.

    Returns:
        `topk_ids [T, K]` int64 and `topk_weights [T, K]` fp32.

    Raises:
        SpecError: `top_k` or the groups do not fit the number of experts.
        InputError: Wrong shapes or dtypes; on CPU also NaN or +inf in the bias or in the logits of a valid row. On
            a GPU and under `torch.compile` that check is an assertion on the device, without a host sync; on other
            accelerators the weights of such a row are NaN.
    """
    _check_tensors(logits, correction_bias, valid)
    spec.check_num_experts(logits.shape[1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if valid is not None:
        logits = torch.where(valid[:, None], logits, 0.0)
    are_numbers = _require_numbers(logits, correction_bias)
    topk_ids = _pick(logits, correction_bias, spec)
    topk_weights = (_weigh(logits, topk_ids, spec) * spec.routed_scaling_factor).float()
    if are_numbers is not None:
        topk_weights = torch.where(are_numbers[:, None], topk_weights, torch.nan)
    if valid is not None:
        topk_ids = torch.where(valid[:, None], topk_ids, -1)
        topk_weights = torch.where(valid[:, None], topk_weights, 0.0)
    return topk_ids, topk_weights


def _pick(logits: Tensor, correction_bias: Tensor | None, spec: RoutingSpec) -> Tensor:
    choice = logits if correction_bias is None else _scores(logits, spec.scoring) + correction_bias.to(logits.dtype)
    if spec.n_group > 1:
        is_open = _open_groups(choice, spec, best_of_group=1 if correction_bias is None else 2)
        # Barred experts of open groups must still come before every expert of a closed group.
        choice = choice.clamp(min=torch.finfo(choice.dtype).min).masked_fill(~is_open, -math.inf)
    return _best(choice, spec.top_k)


def _open_groups(choice: Tensor, spec: RoutingSpec, *, best_of_group: int) -> Tensor:
    """`[T, E]` bool: whether an expert's group is one of the token's best."""
    num_tokens, num_experts = choice.shape
    group_size = num_experts // spec.n_group
    grouped = choice.reshape(num_tokens, spec.n_group, group_size)
    group_scores = grouped.topk(min(best_of_group, group_size), dim=-1).values.sum(-1)
    is_open = torch.zeros_like(group_scores, dtype=torch.bool)
    is_open = is_open.scatter(1, _best(group_scores, spec.topk_group), True)
    return is_open.repeat_interleave(group_size, dim=1)


def _best(choice: Tensor, count: int) -> Tensor:
    # torch.topk leaves the order of equal values open; a stable sort gives them to the lower index everywhere.
    return torch.sort(choice, dim=1, descending=True, stable=True).indices[:, :count]


def _scores(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    if scoring == "sqrtsoftplus":
        return _softplus(logits).sqrt()
    # A row of nothing but -inf has no softmax; its experts all score 0.
    return torch.softmax(logits, dim=-1).nan_to_num(nan=0.0) if scoring == "softmax" else logits


def _weigh(logits: Tensor, topk_ids: Tensor, spec: RoutingSpec) -> Tensor:
    chosen = logits.gather(1, topk_ids)
    if spec.scoring == "topk_softmax" or spec.renormalize:
        # Dividing scores by their sum is a softmax of their logarithms, which cannot divide 0 by 0 when all of
        # them underflow. The logarithm of a softmax is the logit plus a constant of the row, which cancels.
        weights = torch.softmax(_log_scores(chosen, spec.scoring), dim=-1)
    elif spec.scoring in ("sigmoid", "sqrtsoftplus"):
        weights = _scores(chosen, spec.scoring)
    else:
        weights = torch.exp(chosen - torch.logsumexp(logits, dim=-1, keepdim=True))
    return torch.where(torch.isneginf(chosen), 0.0, weights)


def _log_scores(logits: Tensor, scoring: str) -> Tensor:
    """Logarithms of the scores, up to a constant of the row."""
    if scoring == "sigmoid":
        return torch.nn.functional.logsigmoid(logits)
    if scoring == "sqrtsoftplus":
        return torch.where(logits < -_FAR, logits, _softplus(logits.clamp(min=-_FAR)).log()) * 0.5
    return logits


def _softplus(logits: Tensor) -> Tensor:
    return torch.nn.functional.softplus(logits, threshold=_FAR)


def _check_tensors(logits: Tensor, correction_bias: Tensor | None, valid: Tensor | None) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InputError(f"route: logits must be float [num_tokens, num_experts], got {_describe(logits)}")
    num_tokens, num_experts = logits.shape
    if correction_bias is not None and (
        correction_bias.shape != (num_experts,) or not correction_bias.is_floating_point()
    ):
        raise InputError(
            f"route: correction_bias must be float [num_experts] = [{num_experts}], got {_describe(correction_bias)}"
        )
    if valid is not None and (valid.shape != (num_tokens,) or valid.dtype != torch.bool):
        raise InputError(f"route: valid must be bool [num_tokens] = [{num_tokens}], got {_describe(valid)}")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _require_numbers(logits: Tensor, correction_bias: Tensor | None) -> Tensor | None:
    """Raise or assert; where neither can be done, `[T]` bool: whether a row's weights mean something."""
    # `< inf` is False for NaN and for +inf, and True for -inf.
    is_number = logits < math.inf
    bias_is_number = None if correction_bias is None else (correction_bias < math.inf).all()
    if not can_assert(logits):
        rows = is_number.all(dim=1)
        return rows if bias_is_number is None else rows & bias_is_number
    all_numbers = is_number.all() if bias_is_number is None else is_number.all() & bias_is_number
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(all_numbers, "route: NaN or +inf in router logits or correction_bias")
    elif not bool(all_numbers):
        raise InputError(_bad_numbers(is_number.all(dim=1), correction_bias))
    return None


def _bad_numbers(good_rows: Tensor, correction_bias: Tensor | None) -> str:
    if bool(good_rows.all()) and correction_bias is not None:
        experts = _where_false(correction_bias < math.inf)
        return f"route: correction_bias is NaN or +inf for experts {experts}; check the checkpoint tensor"
    return (
        f"route: NaN or +inf router logits in rows {_where_false(good_rows)} of {len(good_rows)}; the hidden states "
        "before the router are bad already, or padding rows are not marked in `valid`"
    )


def _where_false(flags: Tensor) -> str:
    return some_of(torch.nonzero(~flags).flatten().tolist(), most=8)
