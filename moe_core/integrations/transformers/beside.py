"""What is kept beside each experts module of a model: its layers, resolved and bound.

Prepared experts are found by the module itself, weakly: they are no part of its parameters, its state dict, its copies
or its pickles, and they go when the module goes.
"""

from __future__ import annotations

import weakref
from typing import TypeAlias
from weakref import WeakKeyDictionary

import attrs
import torch

from moe_core.integrations.transformers.prepared import PreparedExperts, Preparer
from moe_core.integrations.transformers.traits import local_parameters
from moe_core.manager import default_manager
from moe_core.payloads import Tensor

#: What the arguments of a call tell about the layer: experts per token, and the dtype of the tokens.
Call: TypeAlias = tuple[int, torch.dtype]


def keep(module: torch.nn.Module, preparer: Preparer, by_call: dict[Call, PreparedExperts]) -> None:
    """Keep what was prepared beside its module, in place of what was there."""
    _BESIDE[module] = _Beside.of(module, preparer, by_call)


def prepared_for(module: torch.nn.Module, call: Call) -> PreparedExperts:
    """What serves `call` with the parameters that the module has now; prepared if it is not, or for others."""
    beside = _BESIDE.get(module)
    by_call: dict[Call, PreparedExperts] = {}
    if beside is not None and beside.stamp == _stamp(module, beside.has_copies):
        by_call = beside.by_call
        if call in by_call:
            return by_call[call]
    preparer = beside.preparer if beside is not None else Preparer(manager=default_manager())
    prepared = preparer.prepare(module, *call, by_call.values())
    keep(module, preparer, {**by_call, call: prepared})
    return prepared


@attrs.define(eq=False)
class _Beside:
    """What is kept beside one module, valid as long as it has the parameters that were seen.

    The views keep the storage of those parameters alive, so that no other tensor can come to lie at their addresses.
    They are let go with the parameters: offloading puts others in their place to free their memory.
    """

    preparer: Preparer
    by_call: dict[Call, PreparedExperts]
    seen: tuple[Tensor, ...]
    stamp: tuple[object, ...]
    has_copies: bool
    watched: tuple[weakref.ref[Tensor], ...] = ()

    @classmethod
    def of(cls, module: torch.nn.Module, preparer: Preparer, by_call: dict[Call, PreparedExperts]) -> _Beside:
        tensors = (t for prepared in by_call.values() for t in prepared.bound.weights.tensors.values())
        has_copies = any(tensor.owned for tensor in tensors)
        seen = tuple(parameter.detach() for parameter in local_parameters(module).values())
        beside = cls(preparer, by_call, seen, _stamp(module, has_copies), has_copies)
        this = weakref.ref(beside)

        def let_go(_: object) -> None:
            if (found := this()) is not None:
                found.by_call, found.seen, found.stamp = {}, (), ()

        parameters = (parameter for parameter in module._parameters.values() if parameter is not None)
        beside.watched = tuple(weakref.ref(parameter, let_go) for parameter in parameters)
        return beside


_BESIDE: WeakKeyDictionary[torch.nn.Module, _Beside] = WeakKeyDictionary()


def _identity(thing: object) -> object:
    """Equal for one object alone, which it does not keep alive."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return id(thing)


def _stamp(module: torch.nn.Module, with_versions: bool) -> tuple[object, ...]:
    """Which activation a module has, where its parameters lie and, if they were copied, how often they were written."""
    parameters = local_parameters(module).values()
    act_fn = module._modules.get("act_fn") or vars(module).get("act_fn")
    stamp: tuple[object, ...] = (_identity(act_fn), *((p.data_ptr(), p.shape, p.stride()) for p in parameters))
    if with_versions:
        stamp += tuple(0 if parameter.is_inference() else parameter._version for parameter in parameters)
    return stamp
