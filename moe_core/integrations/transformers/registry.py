"""One name in both experts registries of transformers, with one function each."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from packaging.version import Version

from moe_core.decision import Reason
from moe_core.errors import PluginConflictError, PluginError, UnsupportedModelError
from moe_core.integrations.transformers.bridge import experts_forward
from moe_core.payloads import Tensor

#: The value of `experts_implementation` that selects moe-core.
NAME = "moe_core"

# The first version whose models accept implementations by names that it does not know itself.
_MINIMUM = (5, 7)


def register() -> None:
    """Make `experts_implementation="moe_core"` known to transformers; call it before a model is loaded.

    A second call changes nothing.

    Raises:
        PluginError: transformers is missing or too old.
        PluginConflictError: The name belongs to another function in one of the registries; neither is changed then.
    """
    _check_version()
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    entries = ((ALL_EXPERTS_FUNCTIONS, experts_forward), (ALL_FP8_EXPERTS_FUNCTIONS, fp8_experts_forward))
    for registry, function in entries:
        taken = registry.get(NAME, function)
        if taken is not function:
            origin = f"{getattr(taken, '__module__', '?')}.{getattr(taken, '__qualname__', repr(taken))}"
            raise PluginConflictError(
                f"{type(registry).__name__} of transformers: the name {NAME!r} belongs to {origin} already; "
                "nothing was registered. Register that function under another name"
            )
    for registry, function in entries:
        registry.register(NAME, function)


def fp8_experts_forward(self: torch.nn.Module, *arguments: Tensor, **more: Any) -> NoReturn:
    """Refuse quantized experts: this version reads unquantized ones only.

    Without an entry of this name, transformers would fail with a bare `KeyError` at the first forward.

    Raises:
        UnsupportedModelError: Always.
    """
    raise UnsupportedModelError(
        f"{type(self).__name__}: FP8 or FP4 experts (their registry is FP8ExpertsInterface) are not served by this "
        "version of moe-core; load the model unquantized, or with another experts_implementation"
    )


def _check_version() -> None:
    wanted = "transformers >= " + ".".join(map(str, _MINIMUM))
    advice = "pip install 'moe-core[transformers]'"
    try:
        import transformers
    except ImportError as error:
        raise PluginError(str(Reason("package", wanted, f"none that can be imported ({error})", advice))) from error
    # Compared by release, so that a development version of 5.7 counts as 5.7.
    if Version(transformers.__version__).release < _MINIMUM:
        raise PluginError(str(Reason("version", wanted, f"transformers {transformers.__version__}", advice)))
