"""The transformers bridge: `experts_implementation="moe_core"`.

Call `register()` once, then load a model with that name; `prepare(model)` resolves all its layers in one step and says
what was chosen. The model keeps its parameters: they are read where they lie, and never changed. `load_model(folder)`
loads quantized checkpoints, also those that transformers cannot read.
"""

from __future__ import annotations

from moe_core.integrations.transformers.bridge import prepare
from moe_core.integrations.transformers.loading import LoadedModel, load_model
from moe_core.integrations.transformers.prepared import PreparedExperts
from moe_core.integrations.transformers.registry import register
from moe_core.integrations.transformers.traits import NAME

__all__ = ["NAME", "LoadedModel", "PreparedExperts", "load_model", "prepare", "register"]
