"""The plugin under test: loaded beside the built-in one, on this machine or on one that is described."""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Sequence

import torch

from moe_core.declared import Candidate, DeclaredDispatcher, DeclaredRunner, DeclaredSpec
from moe_core.environment import Environment
from moe_core.errors import PluginError
from moe_core.manager import BackendManager
from moe_core.specs import PluginSpec, TokenDtype
from moe_core.testing import wire
from moe_core.testing.outcome import ConformanceError
from moe_core.testing.pairs import pairs_of, uses, wire_pairs_of, wire_tokens
from moe_core.vocabulary import ANY

#: The plugin whose dispatchers and runners help out where the one under test has none.
HELPER = "moe_core.backends.torch.plugin"
#: The kit's own, for token dtypes that no other part sends or reads.
WIRE = "moe_core.testing.wire"


class Backend:
    """One plugin, ready to be checked.

    Attributes:
        module: The plugin module.
        name: The plugin's name.
        spec: What it declares.
        manager: It, the built-in plugin, and further companions.
        environment: The machine that the resolver is told about.
        device: Where tensors lie.
        variables: The environment variables before the plugin was loaded, for other processes to start from.
    """

    def __init__(
        self,
        plugin: str | types.ModuleType,
        *,
        environment: Environment | None = None,
        device: str | None = None,
        companions: Sequence[str] = (),
    ) -> None:
        """Load the plugin.

        Args:
            plugin: The plugin module, or its import name.
            environment: The machine to resolve for; default: this one. A plugin whose kernels are emulated names the
                machine that they are for.
            device: Torch device of all tensors; default: the environment's, or `cpu` where this machine has no such
                device, and for a plugin that runs on no other.
            companions: Import names of further plugins that this one needs for a complete pair.

        Raises:
            ConformanceError: It cannot be loaded; the cause is chained.
        """
        self.variables = dict(os.environ)
        self.module = importlib.import_module(plugin) if isinstance(plugin, str) else plugin
        declare = getattr(self.module, "declare_backends", None)
        self.manager = BackendManager()
        try:
            self.name = declare().name if declare is not None else self.module.__name__.rpartition(".")[2]
            self.manager.register(self.name, self.module)
        except (PluginError, AttributeError) as error:
            raise ConformanceError(f"plugin {self.module.__name__} cannot be registered: {error}") from error
        self.spec: PluginSpec = self.manager.require(self.name)
        for companion in (HELPER, WIRE, *companions):
            module = importlib.import_module(companion)
            if module is not self.module:
                self.manager.register(module.declare_backends().name, module)
        if environment is None:
            environment = self.manager.probe(device or self._device_type())
        self.environment = environment
        self.device = device or (environment.device_type if _is_here(environment.device_type) else "cpu")

    def _device_type(self) -> str | None:
        """`cpu` for a plugin that cannot use this machine's accelerator but can use its CPU; else the accelerator."""
        devices = {device for part in self.own_parts for device in part.spec.devices}
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        usable = found is None or not devices or ANY in devices or found.type in devices
        return None if usable or "cpu" not in devices else "cpu"

    @property
    def is_importable(self) -> bool:
        """Whether other processes can import the plugin by its name."""
        return getattr(self.module, "__file__", None) is not None

    @property
    def names(self) -> tuple[str, tuple[str, ...]]:
        """Import names of the plugin and of its companions, from which another process makes the same."""
        others = [name for name in self.manager.names() if name != self.name]
        return self.module.__name__, tuple(self.manager.found(name).value for name in others)

    @property
    def own_parts(self) -> tuple[DeclaredSpec, ...]:
        """The dispatchers and runners of the plugin under test."""
        return _parts(self.spec)

    @property
    def pairs(self) -> list[Candidate]:
        """Every pair to check; see `pairs.pairs_of`."""
        return pairs_of(self.own_parts, self._parts_but_of(self.name, wire.NAME))

    @property
    def wire_pairs(self) -> list[Candidate]:
        """Further pairs, for quantized tokens that none of `pairs` uses; see `pairs.wire_pairs_of`."""
        return wire_pairs_of(self.own_parts, self.pairs, _parts(self.manager.require(wire.NAME)))

    @property
    def unknown_tokens(self) -> dict[str, tuple[TokenDtype, ...]]:
        """Full name of each own part -> its quantized token dtypes that no pair can be made for."""
        known = (*self.pairs, *self.wire_pairs)
        return {
            part.full_name: left
            for part in self.own_parts
            if (left := tuple(token for token in wire_tokens(part) if not uses(known, part, token)))
        }

    def _parts_but_of(self, *names: str) -> tuple[DeclaredSpec, ...]:
        return tuple(part for spec in self.manager.specs() if spec.name not in names for part in _parts(spec))


def _parts(spec: PluginSpec) -> tuple[DeclaredSpec, ...]:
    dispatchers = tuple(DeclaredDispatcher(spec.name, part) for part in spec.dispatchers)
    return (*dispatchers, *(DeclaredRunner(spec.name, part) for part in spec.runners))


def _is_here(device_type: str) -> bool:
    """Whether tensors can lie on such a device: a described machine need not be this one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found is not None and found.type == device_type
