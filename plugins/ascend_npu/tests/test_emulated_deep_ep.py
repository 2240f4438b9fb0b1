"""The emulated library: the vendor's signatures, its refusals, and poison where it promises nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from moe_plugin_ascend.emulation import deep_ep

from moe_core import ExpertGroup
from moe_core.testing.ranks import run_on_ranks

#: As sgl-kernel-npu of August 2026 has them.
SIGNATURES = {
    "__init__": "self group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl normal_strategy low_latency_strategy",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "get_dispatch_layout": "self topk_idx num_experts previous_event async_finish allocate_on_comm_stream",
    "dispatch": "self x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert "
    "topk_idx topk_weights expert_alignment num_worst_tokens config previous_event async_finish "
    "allocate_on_comm_stream dispatch_wait_recv_cost_stats quant_mode",
    "combine": "self x handle topk_weights bias config previous_event async_finish allocate_on_comm_stream "
    "combine_send_cost_stats",
    "low_latency_dispatch": "self x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats use_fp8 round_scale use_ue8m0 use_mxfp4 async_finish return_recv_hook "
    "topk_weights quant_mode",
    "low_latency_combine": "self x topk_idx topk_weights handle zero_copy async_finish return_recv_hook out",
    "fused_deep_moe": "self x topk_idx topk_weights gmm1_permuted_weight gmm1_permuted_weight_scale gmm2_weight "
    "gmm2_weight_scale num_max_dispatch_tokens_per_rank num_experts quant_mode fuse_mode profile_enable",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_the_vendors(name: str) -> None:
    assert " ".join(inspect.signature(getattr(deep_ep.Buffer, name)).parameters) == SIGNATURES[name]


def test_assumptions_are_told() -> None:
    assert all(isinstance(text, str) and text for text in deep_ep.ASSUMPTIONS)


def both_modes(group: ExpertGroup) -> Any:
    """A rank's job: what arrives in either mode, and the library's refusals."""
    import os

    buffer = deep_ep.Buffer(group.process_group, low_latency_mode=True)
    x = torch.full((2, 8), group.rank + 1.0).bfloat16()
    ids = torch.tensor([[0, 1], [1, 1]])
    weights = torch.tensor([[1.0, 0.5], [0.25, 2.0]])
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 4)
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids,
        "topk_weights": weights,
    }
    os.environ["DEEP_NORMAL_MODE_USE_INT8_QUANT"] = "1"
    (codes, scales), *_ = buffer.dispatch(x, **layout)
    rows, _, _, counts, handle, _ = buffer.dispatch(x, **layout, quant_mode="bf16")
    os.environ["MOE_EXPERT_TOKEN_NUMS_TYPE"] = "0"
    sums = buffer.dispatch(x, **layout)[3]
    combined = buffer.combine(rows, handle, topk_weights=torch.zeros(2, 2))[0]
    quick, quick_counts, *_ = buffer.low_latency_dispatch(x, ids, 4, 4, use_fp8=False)
    refusals = [
        refused(lambda: buffer.low_latency_dispatch(x, ids - 1, 4, 4)),
        refused(lambda: buffer.low_latency_dispatch(x[:0], ids[:0], 4, 4)),
        refused(lambda: buffer.low_latency_dispatch(x, ids, 1, 4)),
        refused(lambda: buffer.low_latency_dispatch(x.float(), ids, 4, 4)),
        refused(lambda: buffer.low_latency_dispatch(x, ids.int(), 4, 4)),
        refused(lambda: deep_ep.Buffer(group.process_group).low_latency_dispatch(x, ids, 4, 4)),
        refused(lambda: buffer.dispatch(x, topk_idx=ids, topk_weights=weights)),
        refused(lambda: buffer.get_dispatch_layout(ids, 3)),
    ]
    return {
        "layout": (per_rank.tolist(), per_expert.tolist(), in_rank.tolist()),
        "rows": rows.float().tolist(),
        "int8": (codes.tolist(), scales.tolist(), str(codes.dtype)),
        "counts": (counts, sums),
        "combined": combined.float().tolist(),
        "quick": (list(quick.shape), quick[:6, 0].tolist(), bool(quick[6:].isnan().all()), quick_counts.tolist()),
        "refusals": refusals,
    }


def refused(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "taken"


def test_both_modes() -> None:
    first, second = run_on_ranks(both_modes, [()] * 2)
    assert isinstance(first, dict), first
    assert first["layout"] == second["layout"] == ([2, 0], [1, 3, 0, 0], [[1, 0], [1, 0]])
    # Expert 0 has a row of each rank, expert 1 three of each: one token named it twice.
    assert [row[0] for row in first["rows"]] == [1, 2, 1, 1, 1, 2, 2, 2]
    assert first["counts"] == ([2, 6], [2, 8])
    assert first["int8"][0] == [[127] * 8] * 8
    assert [round(scale * 127) for scale in first["int8"][1]] == [1, 2, 1, 1, 1, 2, 2, 2]
    # The weights of the dispatch count, not those given to combine.
    assert first["combined"] == [[1.5] * 8, [2.25] * 8]
    assert second["combined"] == [[3.0] * 8, [4.5] * 8]
    # Two ranks, four tokens each, two experts: up to sixteen rows, of which eight arrived.
    assert first["quick"] == ([16, 8], [1, 2, 1, 1, 1, 2], False, [2, 6])
    # Nothing for the second rank: one undefined row.
    assert second["counts"] == ([0, 0], [0, 0])
    assert all(value != value for value in second["rows"][0])
    assert second["quick"][1:] == ([pytest.approx(torch.nan, nan_ok=True)] * 6, True, [0, 0])
    assert "taken" not in first["refusals"] + second["refusals"]
    assert "without MOE_ENABLE_TOPK_NEG_ONE=1" in first["refusals"][0]
