"""The masked kernel behind DeepEP's low latency mode on two real ranks, both libraries emulated."""

from __future__ import annotations

import pytest
import torch
from moe_plugin_flashinfer.runner_specs import MASKED

from moe_core.testing.compare import relative_error
from moe_core.testing.ranks import RankError, run_on_ranks
from moe_core.testing.tolerance import tolerance

pytest.importorskip("moe_plugin_deepgemm", reason="the dispatcher deepep comes from the plugin cuda_deepgemm")
ranks = pytest.importorskip("cutedsl_ranks", reason="the emulated deep_ep comes with the tests of cuda_deepgemm")


@pytest.mark.parametrize("tokens", ["bf16", "nvfp4/block_16_tiled"])
def test_two_ranks_that_decode(tokens: str) -> None:
    counts, sends_nvfp4 = [7, 3], tokens != "bf16"
    for rank, found in enumerate(run_on_ranks(ranks.output_and_answers, [(counts, sends_nvfp4)] * len(counts))):
        assert not isinstance(found, RankError), found
        plan, arrays = found
        assert "deepep" in plan
        assert MASKED in plan
        assert f", {tokens} by" in plan
        output, answer, twice = map(torch.from_numpy, arrays)
        limit = tolerance(ranks.request())
        assert relative_error(output, answer) < limit, rank
        assert relative_error(twice, answer) > 2 * limit
        if counts[rank] > 2:
            assert (output[1] == 0).all(), "a token without experts is zero whatever it holds"


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("apart", "texts"),
    [
        pytest.param(
            True, ["WeightsError", "rank 0: ", "rank 1: ", "as load_experts gives them"], id="calibrated apart"
        ),
        pytest.param(False, ["PluginError", "low_latency_dispatch", "use_nvfp4"], id="a build without the argument"),
    ],
)
def test_what_cannot_send_nvfp4_says_so_before_the_first_token(apart: bool, texts: list[str]) -> None:
    for found in run_on_ranks(ranks.refusal, [(apart,)] * 2):
        assert not isinstance(found, RankError), found
        for text in texts:
            assert text in found
