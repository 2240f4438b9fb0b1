"""One name in both experts registries of transformers: that of float experts, and that of FP8 experts.

Each registry has its own names: one that only the other knows would end in a bare `KeyError` at the first forward.
"""

from __future__ import annotations

from packaging.version import Version

from moe_core.errors import PluginConflictError, PluginError
from moe_core.findings import Reason
from moe_core.integrations.transformers.bridge import experts_forward
from moe_core.integrations.transformers.traits import NAME

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

    registries = (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS)
    for registry in registries:
        taken = registry.get(NAME, experts_forward)
        if taken is not experts_forward:
            origin = f"{getattr(taken, '__module__', '?')}.{getattr(taken, '__qualname__', repr(taken))}"
            raise PluginConflictError(
                f"{type(registry).__name__} of transformers: the name {NAME!r} belongs to {origin} already; "
                "nothing was registered. Register that function under another name"
            )
    for registry in registries:
        registry.register(NAME, experts_forward)


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
