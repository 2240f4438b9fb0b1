"""What stands in a model for experts whose weights exist in a runner's layout alone."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from moe_core.bound import BoundExperts
from moe_core.errors import UnsupportedModelError, WeightsError
from moe_core.integrations.transformers.layout import ExpertsLayout, module_callables
from moe_core.integrations.transformers.prepared import PreparedExperts, Preparer
from moe_core.integrations.transformers.traits import NAME
from moe_core.payloads import RawWeights, Tensor
from moe_core.weights.expected import check_weights


class QuantizedExperts(torch.nn.Module):
    """The experts of one layer, loaded from a quantized checkpoint.

    It has no parameters: its weights are prepared ones, on the device they were loaded to. So it cannot be moved,
    saved or computed by another `experts_implementation`.

    Attributes:
        config: The model's configuration, whose `experts_implementation` must be `moe_core`.
        layout: What the module that it replaces computes, with the schemes of the checkpoint.
    """

    def __init__(self, original: torch.nn.Module, layout: ExpertsLayout, preparer: Preparer, top_k: int) -> None:
        """Resolve; nothing is loaded yet.

        Args:
            original: The module that it replaces, whose gate it calls where no known activation equals it.
            layout: As above.
            preparer: The choices of the user.
            top_k: Experts per token that the model's configuration tells.

        Raises:
            ResolutionError: Nothing fits, or a pin does not.
        """
        super().__init__()
        self.config = original.config
        self.layout = layout
        # Not as a submodule: its parameters have no memory.
        self.__dict__["_original"] = original
        self._preparer = preparer
        self._first_call = top_k
        self._by_top_k: dict[int, PreparedExperts] = {}
        self.plan, _ = preparer.plan(layout, top_k)

    @property
    def num_weights(self) -> int:
        """Elements of both projections of all experts."""
        layout = self.layout
        return layout.num_experts * (layout.flags.halves + 1) * layout.hidden_size * layout.intermediate_size

    @property
    def prepared(self) -> PreparedExperts:
        """What serves calls with the configured number of experts per token; raises `WeightsError` without weights."""
        if self._first_call not in self._by_top_k:
            raise WeightsError("these experts have no weights yet; load_model loads them")
        return self._by_top_k[self._first_call]

    def load(self, weights: RawWeights) -> None:
        """Check, prepare and bind the layer's weights.

        Args:
            weights: Canonical tensors, handed over.

        Raises:
            WeightsError: Tensors are missing, unknown or misshapen.
        """
        plan, decision = self._preparer.plan(self.layout, self._first_call)
        callables = module_callables(self.__dict__["_original"], self.layout)
        weights.activation, weights.post_norm = callables.activation, callables.post_norm
        check_weights(weights, plan.request, self.layout.num_experts)
        prepared = self._preparer.manager.process_weights(plan, weights, None)
        bound = BoundExperts(plan, prepared, self._preparer.manager)
        self._by_top_k = {self._first_call: PreparedExperts(plan=plan, decision=decision, bound=bound)}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Contract as in `PreparedExperts.__call__`."""
        chosen = getattr(self.config, "_experts_implementation", NAME)
        if chosen != NAME:
            raise UnsupportedModelError(
                f"experts_implementation {chosen!r} cannot compute these experts: they are quantized "
                f"({self.layout.quant}) and exist in the layout of a moe-core runner alone; "
                f"set_experts_implementation({NAME!r}), or load the model with transformers"
            )
        top_k = top_k_index.shape[1]
        if top_k not in self._by_top_k:
            self._by_top_k[top_k] = self._for_top_k(top_k)
        return self._by_top_k[top_k](hidden_states, top_k_index, top_k_weights)

    def _for_top_k(self, top_k: int) -> PreparedExperts:
        """The same weights for other numbers of experts per token; `ResolutionError` if their runner does not."""
        plan, decision = self._preparer.plan(self.layout, top_k)
        weights = self.prepared.bound.weights
        if (plan.runner_plugin, plan.weight_layout) != (self.plan.runner_plugin, weights.layout):
            # Times may be of one number of experts per token alone; the weights lie as they lie.
            plan, decision = self._preparer.plan(self.layout, top_k, like=self.plan)
        bound = BoundExperts(plan, weights, self._preparer.manager)
        return PreparedExperts(plan=plan, decision=decision, bound=bound)

    def extra_repr(self) -> str:
        """The routes, for `print(model)`."""
        return "; ".join(map(str, self.plan.routes))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # Asked for names before anything is loaded, it has none.
        if self._by_top_k:
            raise UnsupportedModelError(
                f"{prefix.removesuffix('.')}: quantized experts in the layout of a moe-core runner cannot be saved; "
                "the checkpoint that they came from is what to keep"
            )

    def __getstate__(self) -> NoReturn:
        """Bound functions are not picklable."""
        raise TypeError("quantized experts cannot be copied or pickled: load the model again")
