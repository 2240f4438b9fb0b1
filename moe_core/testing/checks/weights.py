"""What a plugin makes of weights: read-only sources, reloads in place, and every expert's tensors together."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch

from moe_core.payloads import RawWeights, Tensor
from moe_core.testing.bench import Bench
from moe_core.testing.memory import changed, poison, same_bits
from moe_core.testing.outcome import NotRun, require


def check_prepared_form(bench: Bench) -> None:
    """Prepared weights have the declared tag; their expert axes count the local experts; borrowed ones are borrowed."""
    raw = bench.raw()
    prepared = bench.prepare(raw)
    bench.backend.manager.check_parameter_names(bench.plan, prepared, bench.unloaded())
    layout = bench.cell.pair.runner.spec.weight_layout
    require(prepared.layout == layout, f"weights are labelled {prepared.layout!r}, the spec says {layout!r}")
    sources = {tensor.untyped_storage().data_ptr() for tensor in raw.tensors.values()}
    for name, tensor in prepared.tensors.items():
        axis, shape = tensor.expert_axis, list(tensor.data.shape)
        fits = axis is None or (axis < len(shape) and shape[axis] == len(bench.experts))
        require(fits, f"{name} {shape}: axis {axis} does not count the {len(bench.experts)} local experts")
        shared = tensor.data.numel() > 0 and tensor.data.untyped_storage().data_ptr() in sources
        require(
            shared != tensor.owned, f"{name} is {'raw memory' if shared else 'new memory'}, yet owned={tensor.owned}"
        )


def check_raw_weights(bench: Bench) -> None:
    """Preparing, binding, running and reloading leave the raw tensors as they are."""
    raw, other = bench.raw(), bench.raw(bench.other)
    before = _copies(raw)
    prepared = bench.prepare(raw)
    bench.run(bench.tokens(), bench.bind(prepared))
    found = changed(before, raw.tensors)
    require(not found, f"the raw tensors {', '.join(found)} were written to")
    # What was borrowed is refilled by a reload, as the core knows; its new source must stay as it is.
    before = _copies(other)
    bench.prepare(other, prepared)
    found = changed(before, other.tensors)
    require(not found, f"a reload wrote to its raw tensors {', '.join(found)}")


def check_reload(bench: Bench) -> None:
    """A reload gives what a fresh load gives, in the same memory, and bound functions see it."""
    prepared = bench.prepare()
    layer, tokens = bench.bind(prepared), bench.tokens()
    bench.run(tokens, layer)
    for stored in (bench.other, bench.stored, bench.other):
        # The manager refuses what is not `prepared` itself, in the same memory.
        bench.prepare(bench.raw(stored), prepared)
        fresh = bench.prepare(bench.raw(stored))
        stale = [n for n, t in fresh.tensors.items() if not same_bits(t.data, prepared.tensors[n].data)]
        require(not stale, f"after a reload {', '.join(stale)} are not what a fresh load gives")
        bench.require(tokens, "after a reload", bench.run(tokens, layer), stored)


def check_rebalancing(bench: Bench) -> None:
    """Exchanging experts along the declared axes exchanges them altogether: no expert keeps a tensor elsewhere."""
    prepared = bench.prepare()
    count = len(bench.experts)
    order = torch.arange(count).roll(1).to(bench.backend.device)
    layer = bench.bind(prepared)
    for tensor in prepared.tensors.values():
        if tensor.expert_axis is not None:
            tensor.data.copy_(tensor.data.index_select(tensor.expert_axis, order))
    hidden, ids, weights = bench.tokens()
    # The expert that was at `e - 1` is now at `e`.
    output = bench.run((hidden, (ids + 1) % count, weights), layer)
    text = "after experts changed places along expert_axis"
    bench.require((hidden, ids, weights), text, output)


def check_released_memory(bench: Bench) -> None:
    """A preparation that copies gives back each expert's raw memory, once, and neither reads nor keeps it."""
    for reload in (False, True):
        raw = bench.raw(bench.other)
        released: list[int] = []
        raw.release = _destroying(raw, released)
        prepared = bench.prepare(None if reload else raw)
        if reload:
            bench.prepare(raw, prepared)
        if not released and not reload and any(not tensor.owned for tensor in prepared.tensors.values()):
            # Nothing was copied: the layer that owns the weights releases them.
            continue
        advice = "call weights.release(expert) when it has been copied, so that two copies of a layer never exist"
        kept = sorted(set(range(len(bench.experts))) - set(released))
        require(not kept, f"{'a reload' if reload else 'a load'} keeps the raw memory of experts {kept}: {advice}")
        require(len(released) == len(set(released)), f"expert memory was released twice: {released}")
        memory = {name: weakref.ref(tensor.untyped_storage()) for name, tensor in raw.tensors.items()}
        del raw
        gc.collect()
        held = [name for name, storage in memory.items() if storage() is not None]
        require(not held, f"something still holds the raw tensors {', '.join(held)}, although they were copied")
        tokens = bench.tokens()
        text = "after the raw memory that was released had been overwritten"
        bench.require(tokens, text, bench.run(tokens, bench.bind(prepared)), bench.other)


def check_weight_strides(bench: Bench) -> None:
    """Raw weights may have any strides."""
    raw = bench.raw()
    strided = {name: _strided(tensor) for name, tensor in raw.tensors.items()}
    prepared = bench.prepare(RawWeights(tensors=strided, activation=raw.activation, post_norm=raw.post_norm))
    tokens = bench.tokens()
    bench.require(tokens, "with raw weights that are not contiguous", bench.run(tokens, bench.bind(prepared)))


def check_callables(bench: Bench) -> None:
    """The model's own activation and norm travel with the weights, on a reload too."""
    raw = bench.raw()
    if raw.activation is None and raw.post_norm is None:
        raise NotRun("this cell has no callable of the model")
    prepared = bench.prepare(raw)
    tokens = bench.tokens()
    bench.require(tokens, "with callables of the model", bench.run(tokens, bench.bind(prepared)))
    changed = bench.raw()
    changed.activation = None if raw.activation is None else _other_callable
    changed.post_norm = None if raw.post_norm is None else _other_callable
    bench.prepare(changed, prepared)
    kept = (prepared.activation, prepared.post_norm) == (changed.activation, changed.post_norm)
    require(kept, "a reload keeps the callables of the load before: set out.activation and out.post_norm")


def _other_callable(rows: Tensor) -> Tensor:
    return rows


def _copies(raw: RawWeights) -> list[tuple[str, Tensor]]:
    return [(name, tensor.clone()) for name, tensor in raw.tensors.items()]


def _destroying(raw: RawWeights, released: list[int]) -> Callable[[int], None]:
    """What notes which expert is given back, and poisons its raw memory."""

    def release(expert: int) -> None:
        released.append(expert)
        for tensor in raw.tensors.values():
            poison(tensor[expert])

    return release


def _strided(tensor: Tensor) -> Tensor:
    """The same values with the last two axes (or the only inner one) laid out the other way round."""
    if tensor.dim() == 3:
        return tensor.mT.contiguous().mT
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    wide[..., ::2] = tensor
    return wide[..., ::2]
