"""Whole layers on a described Ascend machine: as a user builds them, and behind the core's own transport."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from moe_plugin_ascend import local, plugin
from moe_plugin_ascend.emulation import Emulation
from moe_plugin_ascend.emulation.vendor import VARIABLE
from moe_plugin_ascend.local import combine
from moe_plugin_ascend.runner_specs import RUNNERS

from moe_core import LayerRequest, MoELayer, Workload
from moe_core.backends.torch import plugin as torch_plugin
from moe_core.declared import Candidate, DeclaredDispatcher, DeclaredRunner
from moe_core.environment import PRESETS
from moe_core.kernels import checks
from moe_core.manager import BackendManager
from moe_core.quant import BF16, W4A4_INT4, W4A8_INT8, W8A8_INT8, QuantScheme
from moe_core.testing import Kit
from moe_core.testing.backend import Backend
from moe_core.testing.checks.ranks import check_distributed_ranks
from moe_core.testing.compare import layer_mismatch, mismatch
from moe_core.testing.stored import draw_layer
from moe_core.testing.tolerance import tolerance

A3 = PRESETS["ascend-a3"]


def manager() -> BackendManager:
    made = BackendManager()
    made.register("torch", torch_plugin)
    made.register("ascend_npu", plugin)
    return made


def tokens(request: LayerRequest, count: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, request.hidden_size, generator=generator).to(torch.bfloat16)
    ids = torch.rand(count, request.num_experts, generator=generator).topk(request.top_k, dim=1).indices
    return hidden, ids, torch.rand(count, request.top_k, generator=generator) + 0.25


@pytest.mark.parametrize("scheme", [BF16, W8A8_INT8, W4A8_INT8, W4A4_INT4], ids=str)
@pytest.mark.parametrize("num_experts", [1, 6])
def test_a_layer_with_missing_experts_unequal_weights_and_one_expert(scheme: QuantScheme, num_experts: int) -> None:
    request = LayerRequest(
        num_experts=num_experts, top_k=min(3, num_experts), hidden_size=128, intermediate_size=64, quant=scheme
    )
    stored = draw_layer(request)
    layer = MoELayer(request, environment=A3, manager=manager())
    assert layer.plan.runner_plugin == "ascend_npu"
    layer.load_weights(stored.raw(layer.local_experts, "cpu"))
    hidden, ids, weights = tokens(request)
    # Expert 0 has no token, token 2 no expert.
    ids[(ids == 0) & (num_experts > 1)] = -1
    ids[2] = -1
    output = layer(hidden, ids, weights)
    limit = tolerance(request, layer.plan.routes[0].token_dtype)
    assert layer_mismatch(output, stored.reference, (hidden, ids, weights), limit) is None
    assert (output[2] == 0).all()


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_the_weight_of_a_slot_without_expert_means_nothing(weight: float) -> None:
    request = LayerRequest(num_experts=6, top_k=3, hidden_size=128, intermediate_size=64, a2a_backend="ascend_npu:none")
    stored = draw_layer(request)
    layer = MoELayer(request, environment=A3, manager=manager())
    layer.load_weights(stored.raw(layer.local_experts, "cpu"))
    hidden, ids, weights = tokens(request)
    ids[2], ids[3, 0], ids[4, 2] = -1, -1, -1
    want = stored.reference(hidden, ids, weights)
    weights[ids < 0] = weight
    limit = tolerance(request, layer.plan.routes[0].token_dtype)
    assert mismatch(layer(hidden, ids, weights), want, limit) is None


@pytest.mark.parametrize("a2a", ["ascend_npu:none", "torch:none.contiguous"])
def test_a_wrong_id_is_nan_on_a_device_and_other_tokens_are_right(a2a: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on an NPU, which has no assertion of its own; the core's dispatcher is used with graphs there, too.
    monkeypatch.setattr(checks, "ASSERTING", ())
    captured = Workload(max_tokens=16, graph_capture=True)
    request = LayerRequest(
        num_experts=6, top_k=3, hidden_size=128, intermediate_size=64, a2a_backend=a2a, workloads=captured
    )
    stored = draw_layer(request)
    layer = MoELayer(request, environment=A3, manager=manager())
    assert layer.plan.runner_plugin == "ascend_npu"
    layer.load_weights(stored.raw(layer.local_experts, "cpu"))
    hidden, ids, weights = tokens(request)
    want = stored.reference(hidden, ids, weights)
    ids[1, 2], ids[4] = 6, -2
    output = layer(hidden, ids, weights)
    assert output.isnan().all(1).nonzero().flatten().tolist() == [1, 4]
    kept = [token for token in range(9) if token not in (1, 4)]
    limit = tolerance(request, layer.plan.routes[0].token_dtype)
    assert mismatch(output[kept], want[kept], limit) is None


def test_the_kit_accepts_nan_for_a_wrong_id_where_nothing_can_be_asserted(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = Kit("moe_plugin_ascend.plugin", environment=A3, device="cpu", quick=True).cases()
    (case, *_) = (case for case in cases if case.check == "bad_ids")
    assert case.run().status == "passed"
    monkeypatch.setattr(checks, "ASSERTING", ())
    assert case.run().status == "passed"
    # Whoever does not look is found.
    monkeypatch.setattr(local, "checked_slots", lambda ids, weights, num_slots: (ids.clamp(-1, num_slots - 1), weights))
    assert "the output of its token alone is not NaN" in case.run().text


def test_the_vendor_brings_no_assertion_of_its_own(vendor: Emulation) -> None:
    # What has no kernel goes to the CPU by its fallback, and waits.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("aten::sort", "PrivateUse1")
    assert not has_kernel("aten::_assert_async.msg", "PrivateUse1")


@pytest.mark.parametrize("kernel", ["bf16", "w8a8"])
def test_the_cores_transport_feeds_the_runner(kernel: str) -> None:
    backend = Backend("moe_plugin_ascend.plugin", environment=A3, device="cpu")
    spec = next(
        spec for spec in torch_plugin.declare_backends().dispatchers if spec.short_name == "torch_alltoall.contiguous"
    )
    runner = next(spec for spec in RUNNERS if spec.kernel == kernel)
    pair = Candidate(DeclaredDispatcher("torch", spec), DeclaredRunner("ascend_npu", runner))
    check_distributed_ranks(backend, pair)


def test_rows_of_nobody_never_reach_a_token() -> None:
    rows = torch.full((4, 8), torch.nan, dtype=torch.bfloat16)
    rows[0], rows[1] = 1.0, 2.0
    row_map = torch.tensor([[0, -1], [-1, -1], [1, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 9.0], [9.0, 9.0], [0.25, 1.0]])
    output = combine(rows, (row_map, weights))
    assert torch.equal(output[:, 0], torch.tensor([0.5, 0.0, 1.5], dtype=torch.bfloat16))
    nowhere = torch.full_like(row_map, -1)
    assert (combine(torch.full_like(rows, torch.nan), (nowhere, weights)) == 0).all()
    # Nor does the weight of a slot without row; a token with a wrong id has a row on the rank that tells of it.
    weights[row_map < 0] = torch.nan
    assert torch.equal(combine(rows, (row_map, weights)), output)
    weights[2] = torch.nan
    assert combine(rows, (row_map, weights)).isnan().all(1).tolist() == [False, False, True]


_SMOKE = """
import torch
from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.environment import PRESETS
from moe_core.manager import BackendManager
from moe_plugin_ascend import local, plugin
from moe_plugin_ascend.emulation import Emulation
from moe_plugin_ascend.emulation import install
manager = BackendManager()
manager.register("ascend_npu", plugin)
request = LayerRequest(num_experts=2, top_k=1, hidden_size=32, intermediate_size=32)
layer = MoELayer(request, environment=PRESETS["ascend-a3"], manager=manager)
draw = lambda *shape: torch.randn(*shape).to(torch.bfloat16)
layer.load_weights(RawWeights(tensors={"w13": draw(2, 64, 32), "w2": draw(2, 32, 32)}))
print(layer(draw(3, 32), torch.tensor([[0], [1], [0]]), torch.ones(3, 1)).isfinite().all().item(), install())
"""


def test_the_shipped_schemas_do_where_the_vendor_is_missing() -> None:
    environment = {**os.environ, VARIABLE: "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _SMOKE], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True shipped schema list", done.stderr
