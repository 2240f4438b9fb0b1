"""Preparation: bit for bit, in place on a reload, expert by expert, and with nothing half-done."""

from __future__ import annotations

import attrs
import pytest
import torch
from laid_out import EXPERTS, HIDDEN, INNER, KERNELS, SmallLayer, Tensors, read, small_layer
from moe_plugin_flashinfer.emulation.memory import swizzled_places
from moe_plugin_flashinfer.prepared import MaskedWeights, WrapperWeights

from moe_core.activation import RELU2
from moe_core.errors import PluginError, WeightsError
from moe_core.payloads import PreparedWeights, RawWeights
from moe_core.specs import TokenDtype
from moe_core.testing.allocations import Allocations
from moe_core.testing.memory import PoisonedMemory, poison, same_bits

NAMES = ("w13", "w2", "w13_scale", "w2_scale", "w13_alpha", "w2_alpha", "x_scale", "hidden_scale")
kernels = pytest.mark.parametrize("kernel", KERNELS)


def copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def fresh(layer: SmallLayer, tensors: Tensors) -> PreparedWeights:
    """Weights in memory of their own, over poison."""
    with PoisonedMemory():
        return layer.prepare(RawWeights(tensors=tensors, release=lambda expert: None))


def same(first: PreparedWeights, second: PreparedWeights) -> bool:
    return set(first.tensors) == set(second.tensors) and all(
        same_bits(tensor.data, second[name]) for name, tensor in first.tensors.items()
    )


def scale_bytes(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return swizzled.view(torch.uint8).flatten(1)[:, swizzled_places(rows, 16 * columns)]


def test_masked_weights_are_the_stored_ones() -> None:
    layer = small_layer("masked")
    tensors = layer.raw()
    before = copies(tensors)
    prepared = layer.prepare(tensors)
    assert prepared.layout == "cutedsl_masked"
    assert set(prepared.tensors) == set(NAMES)
    assert {tensor.expert_axis for tensor in prepared.tensors.values()} == {0}
    for name, rows in (("w13", 2 * INNER), ("w2", HIDDEN)):
        assert prepared[name] is tensors[name]
        assert not prepared.tensors[name].owned
        scale = tensors[f"{name}_scale"].view(torch.uint8)
        assert torch.equal(scale_bytes(prepared[f"{name}_scale"], rows, scale.shape[2]), scale)
    assert all(torch.equal(tensors[name].view(torch.uint8), before[name].view(torch.uint8)) for name in tensors)


def test_wrapper_weights_take_turns_and_their_scales_with_them() -> None:
    layer = small_layer("wrapper")
    tensors = layer.raw(w13_global_scale=torch.full((EXPERTS, 2), 0.01))
    before = copies(tensors)
    prepared = layer.prepare(tensors)
    assert prepared.layout == "cutedsl_wrapper"
    scale = scale_bytes(prepared["w13_scale"], 2 * INNER, HIDDEN // 16)
    for place in range(2 * INNER):
        turn, inside = divmod(place, 128)
        row = INNER + turn * 64 + inside if inside < 64 else turn * 64 + inside - 64
        assert torch.equal(prepared["w13"][:, place], tensors["w13"][:, row])
        assert torch.equal(scale[:, place], tensors["w13_scale"].view(torch.uint8)[:, row])
    assert prepared["w2"] is tensors["w2"]
    axes = {name: tensor.expert_axis for name, tensor in prepared.tensors.items() if tensor.expert_axis != 0}
    assert axes == {"x_scale": None, "hidden_scale": None}
    assert all(torch.equal(tensors[name].view(torch.uint8), before[name].view(torch.uint8)) for name in tensors)


@pytest.mark.parametrize(("kernel", "fields"), [("masked", {}), ("wrapper", {}), ("masked", {"activation": RELU2})])
def test_memory_of_their_own_has_the_same_in_it(kernel: str, fields: dict[str, object]) -> None:
    layer = small_layer(kernel, **fields)
    tensors = layer.raw()
    owned, borrowing = fresh(layer, tensors), layer.prepare(tensors)
    assert all(tensor.owned for tensor in owned.tensors.values())
    assert same(owned, borrowing)


@kernels
def test_a_reload_fills_the_same_memory_with_what_a_fresh_load_gives(kernel: str) -> None:
    layer = small_layer(kernel)
    prepared = fresh(layer, layer.raw(0))
    typed = (MaskedWeights if kernel == "masked" else WrapperWeights).of(prepared)
    places = {name: tensor.data.data_ptr() for name, tensor in prepared.tensors.items()}
    # Other halves differ than before: what a load repaired must not stay so.
    tensors = layer.raw(1)
    if kernel == "wrapper":
        tensors["w13_global_scale"] = tensors["w13_global_scale"].flip(0)
    again = layer.prepare(tensors, prepared)
    assert again is prepared
    assert same(prepared, fresh(layer, tensors))
    assert not same(prepared, fresh(layer, layer.raw(0)))
    assert {name: tensor.data.data_ptr() for name, tensor in prepared.tensors.items()} == places
    assert typed.w13.data_ptr() == prepared["w13"].data_ptr()
    assert typed.w2_scale.data_ptr() == prepared["w2_scale"].data_ptr()
    assert torch.equal(typed.w2_alpha, prepared["w2_alpha"])
    assert layer.error(tensors, prepared) < 2e-3


@pytest.mark.error_path
@kernels
def test_a_reload_that_fails_changes_nothing(kernel: str) -> None:
    layer = small_layer(kernel)
    prepared, tensors = fresh(layer, layer.raw(0)), layer.raw(1)
    before = {name: tensor.data.clone() for name, tensor in prepared.tensors.items()}
    if kernel == "masked":
        tensors["w2_global_scale"][2] = 0
    else:
        tensors["w13_global_scale"][2, 1] *= 0.7
    with pytest.raises(WeightsError, match=r"local experts \[2\]"):
        layer.prepare(tensors, prepared)
    assert all(same_bits(prepared[name], tensor) for name, tensor in before.items())


@pytest.mark.error_path
@kernels
@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
def test_block_scales_that_are_no_numbers_are_refused(kernel: str, name: str) -> None:
    layer = small_layer(kernel)
    prepared, tensors = fresh(layer, layer.raw(0)), layer.raw(1)
    before = {each: tensor.data.clone() for each, tensor in prepared.tensors.items()}
    tensors[name][2, 3, 1] = torch.nan
    with pytest.raises(WeightsError, match=rf"{name}: NaN for local experts \[2\]"):
        layer.prepare(tensors, prepared)
    assert all(same_bits(prepared[each], tensor) for each, tensor in before.items())


@kernels
@pytest.mark.parametrize("reload", [False, True])
def test_each_expert_is_given_back_once_and_not_read_again(kernel: str, reload: bool) -> None:
    layer = small_layer(kernel)
    tensors, released = layer.raw(1), list[int]()
    wanted = fresh(layer, copies(tensors))

    out = fresh(layer, layer.raw(0)) if reload else None

    def release(expert: int) -> None:
        released.append(expert)
        for tensor in tensors.values():
            poison(tensor[expert])
        # As soon as it was read, not when all were.
        done = [] if out is None else [same_bits(out["w2"][e], wanted["w2"][e]) for e in range(EXPERTS)]
        assert done == [e <= expert for e in range(len(done))]

    prepared = layer.prepare(RawWeights(tensors=tensors, release=release), out)
    assert released == list(range(EXPERTS))
    assert same(prepared, wanted)


@kernels
def test_weights_that_no_kernel_could_read_are_copied(kernel: str) -> None:
    layer = small_layer(kernel)
    tensors = layer.raw()
    wanted = fresh(layer, tensors)
    by_columns = {name: tensor.mT.contiguous().mT if tensor.dim() == 3 else tensor for name, tensor in tensors.items()}
    shifted = {}
    for name, tensor in tensors.items():
        memory = torch.zeros(tensor.nbytes + 4, dtype=torch.uint8)
        memory[4:].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        shifted[name] = memory[4:].view(tensor.dtype).view(tensor.shape)
    for given in (by_columns, shifted):
        prepared = layer.prepare(given)
        assert all(tensor.owned for tensor in prepared.tensors.values())
        assert same(prepared, wanted)


@kernels
def test_a_rank_without_experts(kernel: str) -> None:
    layer = small_layer(kernel)
    prepared = layer.prepare({name: tensor[:0] for name, tensor in layer.raw().items()})
    assert {tensor.data.shape[0] for tensor in prepared.tensors.values() if tensor.expert_axis == 0} == {0}


@kernels
@pytest.mark.parametrize("kind", ["borrowed", "given back", "reload"])
def test_at_most_one_expert_of_extra_memory(kernel: str, kind: str) -> None:
    layer = small_layer(kernel, num_experts=8)
    tensors = layer.raw(w13_global_scale=torch.tensor([[2.0, 1.0]] * 8) / 64)
    expert = sum(tensor[0].nbytes for tensor in tensors.values())
    out = fresh(layer, tensors) if kind == "reload" else None
    release = (lambda expert: None) if kind != "borrowed" else None
    with Allocations() as counted:
        prepared = layer.prepare(RawWeights(tensors=tensors, release=release), out)
    made = 0 if out else sum(tensor.data.nbytes for tensor in prepared.tensors.values() if tensor.owned)
    assert counted.live == made
    assert counted.peak <= made + expert


def planned_for_nvfp4_tokens(layer: SmallLayer) -> SmallLayer:
    route = attrs.evolve(layer.plan.routes[0], token_dtype=TokenDtype("nvfp4", "block_16"))
    return attrs.evolve(layer, plan=attrs.evolve(layer.plan, routes=(route,)))


def test_nvfp4_tokens_share_one_scale_that_follows_a_reload() -> None:
    layer = planned_for_nvfp4_tokens(small_layer("masked"))
    one = {"w13_input_scale": torch.full((EXPERTS,), 0.25)}
    prepared = layer.prepare(layer.raw(**one))
    assert prepared.token_scale is not None
    scales = prepared[prepared.token_scale]
    assert scales.tolist() == [4.0] * EXPERTS
    layer.prepare(layer.raw(1, w13_input_scale=torch.full((EXPERTS,), 0.5)), prepared)
    assert scales.tolist() == [2.0] * EXPERTS


@pytest.mark.error_path
def test_nvfp4_tokens_refuse_experts_with_scales_of_their_own() -> None:
    layer = planned_for_nvfp4_tokens(small_layer("masked"))
    with pytest.raises(WeightsError, match=r"dispatched as nvfp4.*local experts \[0, 2\] differ from the largest, 0.5"):
        layer.prepare(layer.raw(w13_input_scale=torch.tensor([0.25, 0.5, 0.125])))


@pytest.mark.error_path
def test_each_runner_refuses_the_others_weights_by_name() -> None:
    masked, wrapper = (small_layer(kernel) for kernel in KERNELS)
    message = "these weights have the layout '{}', this runner reads '{}'"
    with pytest.raises(PluginError, match=message.format("cutedsl_wrapper", "cutedsl_masked")):
        MaskedWeights.of(wrapper.prepare(wrapper.raw()))
    with pytest.raises(PluginError, match=message.format("cutedsl_masked", "cutedsl_wrapper")):
        WrapperWeights.of(masked.prepare(masked.raw()))


@kernels
def test_without_the_tag_the_others_weights_give_wrong_numbers(kernel: str) -> None:
    """So that the refusal is known to matter: shapes fit, and nothing else would complain."""
    own, other = small_layer(kernel), small_layer(*[name for name in KERNELS if name != kernel])
    # Equal halves and input scales, so that only the layouts differ.
    tensors = small_layer("wrapper").raw(w13_global_scale=torch.full((EXPERTS, 2), 0.01))
    assert own.error(tensors, own.prepare(tensors)) < 2e-3
    foreign = attrs.evolve(other.prepare(tensors), layout=own.plan.weight_layout)
    assert own.error(tensors, foreign) > 0.5


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["w13", "w2", "w13_scale"])
def test_memory_with_gaps_is_refused(name: str) -> None:
    layer = small_layer("masked")
    prepared = fresh(layer, layer.raw())
    wide = torch.cat([prepared[name].view(torch.uint8)] * 2, dim=2)
    prepared.tensors[name].data = wide[..., : prepared[name].shape[2]].view(prepared[name].dtype)
    with pytest.raises(PluginError, match=rf"^{name}: the kernels read through pointers"):
        MaskedWeights.of(prepared)


def test_operands_read_back_are_the_stored_values() -> None:
    """Both layouts, read by index arithmetic, hold one layer."""
    tensors = small_layer("wrapper").raw(w13_global_scale=torch.full((EXPERTS, 2), 0.01))
    masked, wrapper = (read(small_layer(kernel).prepare(tensors)) for kernel in KERNELS)
    assert torch.equal(
        masked.w13,
        wrapper.w13,
    )
    assert torch.equal(masked.w2, wrapper.w2)
