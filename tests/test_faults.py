"""Faults that were found by attacking the library, each with the smallest case that shows it."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from fakes import expect, fake_plugin, runner
from layers import build, exact, random_tensors, random_tokens, torch_manager
from reference_moe import dequant_nvfp4, moe, quant_mxfp4, rel, unpack_nibbles

from moe_core import Environment, ExpertGroup, LayerRequest, MoELayer, RawWeights
from moe_core.activation import ActivationSpec
from moe_core.backends.torch import local
from moe_core.bound import BoundExperts
from moe_core.discovery import find
from moe_core.errors import InputError, PluginError, WeightsError
from moe_core.payloads import PreparedTensor, PreparedWeights
from moe_core.plan import MoEPlan, Route
from moe_core.quant import MXFP4_W4A16, NVFP4_W4A16

SMALL = LayerRequest(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32)
CPU = Environment(device_type="cpu", packages={"torch": torch.__version__})
#: Operands and output are rounded to bf16 once each.
BF16_TOLERANCE = 1.2e-2


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 40])
@pytest.mark.parametrize("mode", ["masked", "contiguous"])
def test_few_rows_in_padded_bf16_groups(mode: str, num_tokens: int) -> None:
    request = attrs.evolve(SMALL, a2a_backend=f"none.{mode}")
    tensors, tokens = random_tensors(request), random_tokens(request, num_tokens)
    assert rel(build(request, tensors)(*tokens).double(), exact(request, tensors, tokens)) < BF16_TOLERANCE


def _mxfp4(
    hidden: int, inner: int, scale_dtype: torch.dtype
) -> tuple[LayerRequest, dict[str, torch.Tensor], list[torch.Tensor]]:
    request = LayerRequest(num_experts=2, top_k=1, hidden_size=hidden, intermediate_size=inner, quant=MXFP4_W4A16)
    floats = random_tensors(
        LayerRequest(num_experts=2, top_k=1, hidden_size=hidden, intermediate_size=inner, dtype="fp32")
    )
    quantized = {name: quant_mxfp4(tensor) for name, tensor in floats.items()}
    tensors = {}
    for name, value in quantized.items():
        grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        codes = torch.searchsorted(grid, value.q.abs().float()) + 8 * torch.signbit(value.q)
        codes = codes.to(torch.uint8)
        tensors[name] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        tensors[f"{name}_scale"] = value.scale.view(scale_dtype)
    return request, tensors, [quantized["w13"].deq, quantized["w2"].deq]


@pytest.mark.parametrize(("hidden", "inner"), [(96, 48), (130, 40), (64, 32), (34, 2)])
def test_mxfp4_rows_may_end_inside_a_group(hidden: int, inner: int) -> None:
    request, tensors, (w13, w2) = _mxfp4(hidden, inner, torch.uint8)
    hidden_states, topk_ids, topk_weights = random_tokens(request, 7)
    want = moe(hidden_states.double(), w13, w2, topk_ids, topk_weights.double())
    assert rel(build(request, tensors)(hidden_states, topk_ids, topk_weights).double(), want) < BF16_TOLERANCE


def test_mxfp4_reloads_from_the_other_dtype_of_its_scales() -> None:
    request, tensors, _ = _mxfp4(64, 32, torch.uint8)
    _, others, _ = _mxfp4(64, 32, torch.float8_e8m0fnu)
    tokens = random_tokens(request, 3)
    layer = build(request, tensors)
    before = layer(*tokens)
    layer.load_weights(RawWeights(tensors=others))
    assert torch.equal(layer(*tokens), before)


def test_interleaved_nvfp4_halves_keep_their_own_global_scales() -> None:
    request = LayerRequest(
        num_experts=2,
        top_k=1,
        hidden_size=32,
        intermediate_size=16,
        quant=NVFP4_W4A16,
        activation=ActivationSpec(row_order="interleaved"),
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "w13": torch.randint(0, 256, (2, 32, 16), generator=generator, dtype=torch.uint8),
        "w13_scale": torch.ones(2, 32, 2).to(torch.float8_e4m3fn),
        "w13_global_scale": torch.tensor([[0.5, 0.01], [0.02, 0.25]]),
        "w2": torch.randint(0, 256, (2, 32, 8), generator=generator, dtype=torch.uint8),
        "w2_scale": torch.ones(2, 32, 1).to(torch.float8_e4m3fn),
        "w2_global_scale": torch.tensor([0.1, 0.2]),
    }
    rows = tensors["w13_global_scale"].repeat(1, 16)[..., None].double()
    w13 = dequant_nvfp4(unpack_nibbles(tensors["w13"]), tensors["w13_scale"], rows)
    w2 = dequant_nvfp4(unpack_nibbles(tensors["w2"]), tensors["w2_scale"], tensors["w2_global_scale"][:, None, None])
    hidden_states, topk_ids, topk_weights = random_tokens(request, 9)
    canonical = torch.cat([w13[:, 0::2], w13[:, 1::2]], 1)
    want = moe(hidden_states.double(), canonical, w2, topk_ids, topk_weights.double())
    assert rel(build(request, tensors)(hidden_states, topk_ids, topk_weights).double(), want) < BF16_TOLERANCE


@pytest.mark.parametrize("mode", ["standard", "contiguous", "masked"])
def test_a_rank_without_experts_adds_nothing(mode: str) -> None:
    request = attrs.evolve(SMALL, ep_size=8, token_placement="replicated", a2a_backend=f"none.{mode}")
    layer = build(request, random_tensors(SMALL), ExpertGroup(rank=7, size=8))
    assert not layer(*random_tokens(SMALL, 5)).any()


def test_handed_over_rows_may_be_padded() -> None:
    tensors = random_tensors(SMALL)
    wide = torch.zeros(4, 64, 68, dtype=torch.bfloat16)
    wide[..., :64] = tensors["w13"]
    layer = MoELayer(SMALL, environment=CPU, manager=torch_manager())
    layer.load_weights(RawWeights(tensors={**tensors, "w13": wide[..., :64]}, handed_over=True))
    for count in (1, 4):
        tokens = random_tokens(SMALL, count)
        assert rel(layer(*tokens).double(), exact(SMALL, tensors, tokens)) < BF16_TOLERANCE


def test_autocast_does_not_lower_the_layers_dtype() -> None:
    request = LayerRequest(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32, dtype="fp32")
    layer = build(request, random_tensors(request))
    for count in (1, 3):
        tokens = random_tokens(request, count)
        want = layer(*tokens)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(*tokens), want)


def test_a_gradient_of_the_router_weights_is_refused_too() -> None:
    hidden_states, topk_ids, topk_weights = random_tokens(SMALL, 3)
    output = build(SMALL, random_tensors(SMALL))(hidden_states, topk_ids, topk_weights.requires_grad_())
    with pytest.raises(InputError, match="inference only"):
        output.sum().backward()


def test_loading_in_inference_mode_allows_a_reload_outside_and_from_parameters() -> None:
    tensors, tokens = random_tensors(SMALL), random_tokens(SMALL, 3)
    layer = MoELayer(SMALL, environment=CPU, manager=torch_manager())
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    with torch.inference_mode():
        layer.load_weights(RawWeights(tensors=parameters, handed_over=True))
    layer.load_weights(RawWeights(tensors=parameters))
    assert rel(layer(*tokens).double(), exact(SMALL, tensors, tokens)) < BF16_TOLERANCE
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_an_assigned_state_dict_is_copied() -> None:
    first, second = random_tensors(SMALL, 1), random_tensors(SMALL, 2)
    layer, tokens = build(SMALL, first), random_tokens(SMALL, 3)
    layer.load_state_dict(build(SMALL, second).state_dict(), assign=True)
    assert torch.equal(layer(*tokens), build(SMALL, second)(*tokens))


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("stranger", "found"),
    [
        (None, "NoneType"),
        ([1.0], "list"),
        (torch.empty(4, 64, 64, dtype=torch.bfloat16, device="meta"), r"one without data \(device meta, strided\)"),
        (torch.zeros(4, 64, 64).to_sparse(), r"one without data \(device cpu, sparse_coo\)"),
    ],
)
def test_weights_without_data_are_refused(stranger: object, found: str) -> None:
    layer = MoELayer(SMALL, environment=CPU, manager=torch_manager())
    with pytest.raises(WeightsError, match=f"w13: expected a tensor, got {found}$"):
        layer.load_weights(RawWeights(tensors={**random_tensors(SMALL), "w13": stranger}))


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_few_rows_in_aligned_bf16_groups(num_tokens: int) -> None:
    request = attrs.evolve(SMALL, a2a_backend="none.contiguous")
    tensors = random_tensors(request)
    layer = build(request, tensors)
    (route,) = layer.plan.routes
    aligned = attrs.evolve(layer.plan, routes=(attrs.evolve(route, row_alignment=16),))
    prepared = PreparedWeights(
        layout=layer.plan.weight_layout, tensors={name: PreparedTensor(data=t) for name, t in tensors.items()}
    )
    tokens = random_tokens(request, num_tokens)
    output = BoundExperts(aligned, prepared, torch_manager())(*tokens)
    assert rel(output.double(), exact(request, tensors, tokens)) < BF16_TOLERANCE


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "there are none"),
        ([], "expected a dict of PreparedTensor, got list"),
        ({"w13": torch.zeros(1)}, r"not under \['w13'\]"),
        ({"a.b": PreparedTensor(data=torch.zeros(1))}, r"not under \['a.b'\]"),
    ],
)
def test_what_a_plugin_prepares_is_checked_in_its_name(tensors: object, message: str) -> None:
    def prepare(plan: MoEPlan) -> PreparedWeights:
        return PreparedWeights(layout=plan.weight_layout, tensors=tensors)

    plugin = fake_plugin(runners=(runner(),), hooks={"process_weights_after_loading": prepare})
    manager = torch_manager()
    manager.register("toy", plugin)
    layer = MoELayer(attrs.evolve(SMALL, runner_backend="toy"), environment=CPU, manager=manager)
    with pytest.raises(PluginError, match=rf"'toy'.*process_weights_after_loading: .*{message}"):
        layer.load_weights(RawWeights(tensors=random_tensors(SMALL)))
    assert not list(layer.parameters())


def bind_no_functions(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[int, int]:
    return 1, 2


@pytest.mark.error_path
def test_a_binder_returns_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "bind_standard", bind_no_functions)
    with pytest.raises(
        PluginError, match=r"bind_standard.*expected \(dispatch, combine\), perhaps with send, got \(int, int\)"
    ):
        build(SMALL, random_tensors(SMALL))


@pytest.mark.error_path
def test_tokens_on_another_device_than_the_weights_are_refused() -> None:
    tokens = tuple(tensor.to("meta") for tensor in random_tokens(SMALL, 2))
    with pytest.raises(InputError, match="expected device cpu of the weights, got meta"):
        build(SMALL, random_tensors(SMALL))(*tokens)


@pytest.mark.error_path
def test_an_unreadable_metadata_folder_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (
        ("broken", b"[moe_core.backends]\n\xff\xfe\n"),
        ("good", b"[moe_core.backends]\ntoy = toy\n"),
    ):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match=r"broken-1\.0\.dist-info cannot be read"):
        found = find()
    expect("toy" in [plugin.name for plugin in found], found)


def test_packages_of_an_environment_may_be_pairs_in_json() -> None:
    pairs = Environment.from_json({"device_type": "cpu", "packages": [["torch", "2.13.0"]]})
    assert pairs == Environment(device_type="cpu", packages={"torch": "2.13.0"})
