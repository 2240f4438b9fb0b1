"""How much of a divergence lies in tokens that the routers of the two models send to different experts."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from moe_core.evaluation import Window, divergences


@attrs.frozen(kw_only=True)
class Routing:
    """Of the predicted tokens, those that are routed elsewhere in some layer.

    Attributes:
        share: Their share of the tokens.
        divergence_share: Their share of the summed divergence.
        others: Mean divergence of the others, in nats.
    """

    share: float
    divergence_share: float
    others: float


@torch.inference_mode()
def measure_routing(model: Any, reference: Any, ids: list[int], windows: tuple[Window, ...]) -> Routing:
    """Run two transformers models that return router logits over a text.

    A token counts as routed elsewhere by its own experts; what earlier tokens did reaches it through attention alone.
    """
    changed, divergence = [], []
    for window in windows:
        piece = torch.tensor([ids[window.start : window.stop]])
        (logits, chosen), (reference_logits, wanted) = (_run(network, piece) for network in (model, reference))
        rows = slice(window.first_target - window.start - 1, -1)
        changed.append((chosen != wanted).flatten(1).any(1)[rows])
        divergence.append(divergences(reference_logits[rows], logits[rows]))
    elsewhere, values = torch.cat(changed), torch.cat(divergence)
    return Routing(
        share=float(elsewhere.double().mean()),
        divergence_share=float(values[elsewhere].sum() / values.sum()),
        others=float(values[~elsewhere].mean()),
    )


def _run(model: Any, piece: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `[S, V]`, and the chosen experts `[S, layers, top_k]` in ascending order."""
    output = model(input_ids=piece, output_router_logits=True, use_cache=False)
    top_k = model.config.num_experts_per_tok
    chosen = [logits.topk(top_k, dim=-1).indices.sort(dim=-1).values for logits in output.router_logits]
    return output.logits[0].float(), torch.stack(chosen, dim=1)
