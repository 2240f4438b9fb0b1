"""The torch dispatchers: local permutations, replicated tokens, and all-to-all over real gloo ranks."""

from __future__ import annotations

import attrs
import pytest
import torch
from layers import (
    agree_or_time_out,
    build,
    exact,
    fp8_tokens,
    layer_output,
    layer_outputs,
    outputs_without_assertions,
    random_tensors,
    random_tokens,
    rows_told,
    scale_of_one,
    scales_compared,
)
from ranks import RankError, run_on_ranks
from reference_moe import rel

from moe_core import ExpertGroup, ExpertPlacement, LayerRequest, Workload
from moe_core.backends.torch import local
from moe_core.errors import InputError, ResolutionError
from moe_core.kernels import checks, ops
from moe_core.kernels.wire import decode_message, encode_message
from moe_core.specs import TokenDtype
from moe_core.testing.capture import emulated_graph

SMALL = LayerRequest(num_experts=7, top_k=3, hidden_size=40, intermediate_size=24, dtype="fp32", bias=True)
MODES = ("standard", "contiguous", "masked")
#: The last one with further copies of the experts 2 and 5.
PLACEMENTS = (
    ExpertPlacement(),
    ExpertPlacement("round_robin"),
    ExpertPlacement("map", [2, 5, 0, 1, 2, 6, 4, 3, 5, 2]),
)
#: One rounding of the output and one of every GEMM's operands; sums are in fp32.
TOLERANCE = {"fp32": 2e-6, "bf16": 1e-2, "fp16": 2e-3}


def _with(mode: str, name: str = "none", **more: object) -> LayerRequest:
    return attrs.evolve(SMALL, a2a_backend=f"{name}.{mode}", **more)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_every_format_on_one_rank(mode: str, weight_on_input: bool, dtype: str) -> None:
    request = LayerRequest(
        **{**_fields(SMALL), "dtype": dtype}, a2a_backend=f"none.{mode}", weight_on_input=weight_on_input
    )
    tensors, tokens = random_tensors(request), random_tokens(request, 19)
    output = build(request, tensors)(*tokens)
    assert output.dtype == tokens[0].dtype
    assert rel(output.double(), exact(request, tensors, tokens)) < TOLERANCE[dtype]


@pytest.mark.parametrize("mode", MODES[1:])
def test_weighted_rows_become_codes_in_one_rounding(mode: str) -> None:
    codes = TokenDtype("fp8", "column_128")
    permutation = local.LocalPermutation(num_local_experts=3, row_alignment=8, weight_on_input=True, codes=codes)
    x, ids, weights = torch.randn(9, 256).bfloat16(), torch.randint(-1, 3, (9, 2)), torch.rand(9, 2)
    # A block holds a token once.
    ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], -1, ids[:, 1])
    tokens, (row_map, on_output) = getattr(permutation, mode)(x, ids, weights)
    rows, scales = tokens.hidden_states.flatten(0, -2), tokens.scales.flatten(0, -2)
    assert on_output is None
    for token, slot in (ids >= 0).nonzero().tolist():
        want, want_scale = ops.quantize((x[token] * weights[token, slot, None])[None].float(), codes)
        row = row_map[token, slot]
        assert torch.equal(rows[row].float(), want[0].float())
        assert torch.equal(scales[row], want_scale[0])


def _fields(request: LayerRequest) -> dict[str, object]:
    return {
        name: getattr(request, name) for name in ("num_experts", "top_k", "hidden_size", "intermediate_size", "bias")
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where no GPU is")
@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 19])
@pytest.mark.parametrize("mode", MODES[1:])
def test_rows_moved_by_triton_are_those_moved_by_torch(
    mode: str, num_tokens: int, weight_on_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="needs triton")
    request = _with(mode, weight_on_input=weight_on_input)
    layer, tokens = build(request, random_tensors(request)), random_tokens(request, num_tokens)
    want = layer(*tokens)
    monkeypatch.setattr(ops, "_uses_triton", lambda tensor: True)
    assert torch.equal(layer(*tokens), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(mode: str, num_tokens: int) -> None:
    tensors, tokens = random_tensors(SMALL), random_tokens(SMALL, num_tokens)
    output = build(_with(mode), tensors)(*tokens)
    assert output.shape == (num_tokens, 40)
    assert rel(output.double(), exact(SMALL, tensors, tokens)) < 2e-6 or num_tokens == 0


@pytest.mark.parametrize("mode", MODES)
def test_no_token_has_an_expert(mode: str) -> None:
    hidden_states, topk_ids, topk_weights = random_tokens(SMALL, 5)
    output = build(_with(mode), random_tensors(SMALL))(
        torch.full_like(hidden_states, torch.nan), torch.full_like(topk_ids, -1), topk_weights
    )
    assert torch.equal(output, torch.zeros_like(output))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.kind)
def test_parts_of_replicated_tokens_sum_to_the_whole(mode: str, placement: ExpertPlacement) -> None:
    request = _with(mode, ep_size=3, token_placement="replicated", placement=placement)
    tensors, tokens = random_tensors(SMALL), random_tokens(SMALL, 11)
    layers = [build(request, tensors, ExpertGroup(rank=rank, size=3)) for rank in range(3)]
    assert not layers[0].plan.output_is_complete
    parts = sum(layer(*tokens).double() for layer in layers)
    assert rel(parts, exact(SMALL, tensors, tokens)) < 2e-6


@pytest.mark.parametrize(
    ("counts", "placement"), list(zip([(5, 0, 9), (1, 17), (0, 0, 3, 4)], PLACEMENTS, strict=True))
)
def test_all_to_all_gives_every_rank_its_own_rows(counts: tuple[int, ...], placement: ExpertPlacement) -> None:
    size = len(counts)
    requests = [_with(mode, "torch_alltoall", ep_size=size, placement=placement) for mode in MODES]
    tensors = random_tensors(SMALL)
    tokens = [random_tokens(SMALL, count, seed=10 + rank) for rank, count in enumerate(counts)]
    by_rank = run_on_ranks(layer_outputs, [(requests, tensors, tokens[rank]) for rank in range(size)])
    for outputs, own in zip(by_rank, tokens, strict=True):
        assert isinstance(outputs, torch.Tensor), outputs
        want = exact(SMALL, tensors, own)
        for mode, output in zip(MODES, outputs, strict=True):
            assert output.shape == want.shape
            assert rel(output, want) < 2e-6 or not want.numel(), mode


class TestDevicesWithoutAssertion:
    """A wrong id cannot be an error there; it makes its token NaN, and nobody waits to find out."""

    @pytest.fixture(autouse=True)
    def _device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "ASSERTING", ())

    def tokens(self, seed: int, top_k: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, ids, weights = random_tokens(SMALL, 6, seed)
        # Experts of a token differ: a block has one row for each token.
        ids = torch.rand(6, 7, generator=torch.Generator().manual_seed(seed)).topk(top_k, dim=1).indices
        return hidden, ids, weights[:, :top_k]

    def spoil(self, ids: torch.Tensor) -> list[int]:
        """Ids that are out of range, in a token that has other experts and in one that has none."""
        ids[1, 0], ids[3], ids[4, 1] = 7, torch.tensor([-1, 9, -1]), -1
        return [1, 3]

    def compare(self, output: torch.Tensor, want: torch.Tensor, bad: list[int], tolerance: float = 2e-6) -> None:
        good = [token for token in range(6) if token not in bad]
        assert output[bad].isnan().all()
        assert rel(output[good].double(), want[good]) < tolerance

    @pytest.mark.parametrize("weight_on_input", [False, True])
    @pytest.mark.parametrize("mode", MODES)
    def test_on_one_rank(self, mode: str, weight_on_input: bool) -> None:
        request, tensors = _with(mode, weight_on_input=weight_on_input), random_tensors(SMALL)
        hidden, ids, weights = self.tokens(0)
        want = exact(request, tensors, (hidden, ids.clone(), weights))
        bad = self.spoil(ids)
        want[4] = exact(request, tensors, (hidden, ids.clamp(max=6), weights))[4]
        self.compare(build(request, tensors)(hidden, ids, weights), want, bad)

    def test_a_repeated_id_where_a_block_has_a_row_per_token(self) -> None:
        request, tensors = _with("masked"), random_tensors(SMALL)
        hidden, ids, weights = self.tokens(0)
        want = exact(request, tensors, (hidden, ids, weights))
        ids[2, 2] = ids[2, 0]
        self.compare(build(request, tensors)(hidden, ids, weights), want, [2])

    def test_replicated_tokens(self) -> None:
        request, tensors = _with("standard", ep_size=3, token_placement="replicated"), random_tensors(SMALL)
        hidden, ids, weights = self.tokens(0)
        want = exact(request, tensors, (hidden, ids.clone(), weights))
        bad = self.spoil(ids)
        want[4] = exact(request, tensors, (hidden, ids.clamp(max=6), weights))[4]
        layers = [build(request, tensors, ExpertGroup(rank=rank, size=3)) for rank in range(3)]
        self.compare(sum(layer(hidden, ids, weights) for layer in layers), want, bad)

    def test_between_ranks(self) -> None:
        requests = [_with(mode, "torch_alltoall", ep_size=2) for mode in MODES]
        tensors, tokens = random_tensors(SMALL), [self.tokens(rank) for rank in range(2)]
        answers = []
        for hidden, ids, weights in tokens:
            bad = self.spoil(ids)
            answers.append(exact(SMALL, tensors, (hidden, ids.clamp(max=6), weights)))
        for rank, outputs in enumerate(
            run_on_ranks(outputs_without_assertions, [(requests, tensors, own) for own in tokens])
        ):
            assert isinstance(outputs, torch.Tensor), outputs
            for output in outputs:
                self.compare(output, answers[rank], bad)

    @pytest.mark.parametrize("mode", MODES[1:])
    def test_a_captured_forward_finds_it_too(self, mode: str) -> None:
        request = _with(mode)
        plan = build(request, random_tensors(request)).plan
        bind = {"contiguous": local.bind_contiguous, "masked": local.bind_masked}[mode]
        dispatch, combine = bind(plan, plan.routes[0], ExpertGroup())

        def forward(tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
            dispatched, handle = dispatch(*tokens)
            return combine(dispatched.hidden_states, handle)

        tokens = self.tokens(0)
        replay = emulated_graph(forward, tokens, self.tokens(1))
        assert replay().isfinite().all()
        self.spoil(tokens[1])
        assert replay().isnan().any(1).tolist() == [False, True, False, True, False, False]


def test_all_to_all_with_the_weight_on_the_input_and_more_ranks_than_experts() -> None:
    request = LayerRequest(
        num_experts=3,
        top_k=2,
        hidden_size=24,
        intermediate_size=16,
        dtype="fp32",
        ep_size=4,
        weight_on_input=True,
        a2a_backend="torch_alltoall.standard",
    )
    tensors, tokens = random_tensors(request), random_tokens(request, 6)
    outputs = run_on_ranks(layer_output, [(request, tensors, tokens)] * 4)
    for output in outputs:
        assert isinstance(output, torch.Tensor), output
        assert rel(output, exact(request, tensors, tokens)) < 2e-6


def test_all_to_all_chooses_the_route_by_phase() -> None:
    workloads = [Workload(phase="prefill"), Workload(phase="decode", max_tokens=4)]
    request = _with("standard", "torch_alltoall", ep_size=2, workloads=workloads)
    tensors, tokens = random_tensors(SMALL), random_tokens(SMALL, 3)
    outputs = run_on_ranks(layer_output, [(request, tensors, tokens, "decode"), (request, tensors, tokens, "decode")])
    assert all(isinstance(output, torch.Tensor) for output in outputs), outputs
    (error, _) = run_on_ranks(layer_output, [(request, tensors, tokens, None)] * 2)
    assert isinstance(error, RankError)
    assert "say which with phase=" in error.text


def test_ranks_that_disagree_are_told_the_field_and_both_values() -> None:
    request = _with("standard", "torch_alltoall", ep_size=2)
    other = attrs.evolve(request, top_k=2)
    tensors = random_tensors(SMALL)
    errors = run_on_ranks(
        layer_output, [(request, tensors, random_tokens(request, 2)), (other, tensors, random_tokens(other, 2))]
    )
    for error in errors:
        assert isinstance(error, RankError)
        assert error.text.startswith("PlanMismatchError")
        assert "'request.top_k': rank 0: 3, rank 1: 2; give all of them equal requests" in error.text


def test_fp8_tokens_travel_as_bytes_over_a_transport_without_fp8() -> None:
    request = attrs.evolve(_with("standard", "torch_alltoall", ep_size=2), num_experts=4, top_k=1, hidden_size=256)
    tokens = [random_tokens(request, 3, seed=rank) for rank in (0, 1)]
    for _, topk_ids, _ in tokens:
        topk_ids[:, 0] = torch.tensor([0, 3, 1])
    received = run_on_ranks(fp8_tokens, [(request, own) for own in tokens])
    # Rank 0 owns experts 0 and 1 (rows 0 and 2 of both ranks), rank 1 expert 3 (row 1).
    for got, rows, ids in zip(received, ([0, 2], [1]), ([0, 1], [1]), strict=True):
        assert isinstance(got, torch.Tensor), got
        want = torch.cat([own[0][rows] for own in tokens]).double()
        assert ((got[:, :-1] - want).abs() <= want.abs() / 16 + 1e-6).all()
        assert got[:, -1].tolist() == ids * 2


@pytest.mark.parametrize(
    ("counts", "num_experts", "top_k"),
    # Of three experts one rank has two.
    [((96, 96), 16, 4), ((0, 256), 16, 4), ((96, 96), 3, 1)],
)
def test_experts_are_told_how_many_rows_to_expect(counts: tuple[int, int], num_experts: int, top_k: int) -> None:
    layer = _with("standard", "torch_alltoall", ep_size=2)
    request = attrs.evolve(layer, num_experts=num_experts, top_k=top_k, hidden_size=8)
    tokens = []
    for num_tokens in counts:
        ids = torch.rand(num_tokens, num_experts).topk(top_k).indices
        tokens.append((torch.randn(num_tokens, 8), ids, torch.ones(num_tokens, top_k)))
    for told in run_on_ranks(rows_told, [(request, own) for own in tokens]):
        assert isinstance(told, torch.Tensor), told
        expected, rows = told.tolist()
        # The spread of so many draws is below a tenth.
        assert abs(expected / rows - 1) < 0.25


@pytest.mark.parametrize(
    ("scales", "listed", "remedy"),
    [
        ((672.0, 700.5), "rank 0: 672, rank 1: 700.5", "the largest over all experts"),
        ((0.0, 3.0), "rank 0: 0, rank 1: 3", "a rank without experts has none"),
    ],
)
def test_ranks_that_would_round_tokens_differently_are_told_every_scale(
    scales: tuple[float, float], listed: str, remedy: str
) -> None:
    for error in run_on_ranks(scales_compared, [(scale,) for scale in scales]):
        assert isinstance(error, RankError)
        assert error.text.startswith("WeightsError")
        assert f"({listed}): " in error.text
        assert remedy in error.text


def test_ranks_that_round_tokens_alike_go_on() -> None:
    assert all(isinstance(result, torch.Tensor) for result in run_on_ranks(scales_compared, [(672.0,), (672.0,)]))


def test_a_rank_that_stays_away_is_an_error_in_time() -> None:
    request = _with("standard", "torch_alltoall", ep_size=2)
    error, _ = run_on_ranks(agree_or_time_out, [(request, True), (request, False)])
    assert isinstance(error, RankError)
    assert "not every rank sent its plan, given up after 2." in error.text
    assert "this process group cannot be used any more" in error.text


@pytest.mark.error_path
def test_a_connection_that_closes_is_not_called_late() -> None:
    error, _ = run_on_ranks(scale_of_one, [()] * 2)
    assert isinstance(error, RankError)
    assert "sent its scale of tokens, given up after 0." in error.text


@pytest.mark.error_path
def test_an_id_out_of_range_is_named() -> None:
    layer = build(_with("standard"), random_tensors(SMALL))
    hidden_states, topk_ids, topk_weights = random_tokens(SMALL, 2)
    topk_ids[1, 1] = 7
    with pytest.raises(InputError, match=r"id 7 .*num_experts is 7"):
        layer(hidden_states, topk_ids, topk_weights)


@pytest.mark.error_path
def test_local_tokens_need_to_be_called_replicated() -> None:
    with pytest.raises(ResolutionError, match="say token_placement='replicated'"):
        build(_with("standard", ep_size=2), random_tensors(SMALL), ExpertGroup(rank=0, size=2))


@pytest.mark.error_path
def test_transport_without_a_process_group_is_refused() -> None:
    with pytest.raises(InputError, match=r"needs ExpertGroup\.process_group"):
        build(_with("standard", "torch_alltoall", ep_size=2), random_tensors(SMALL), ExpertGroup(rank=0, size=2))


@pytest.mark.parametrize("hidden_size", [40, 256, 333])
@pytest.mark.parametrize("token_dtype", [TokenDtype("fp8", "row_128"), TokenDtype("bf16")], ids=str)
def test_a_message_holds_tokens_scales_ids_and_weights(token_dtype: TokenDtype, hidden_size: int) -> None:
    hidden_states = (torch.randn(6, hidden_size) * torch.logspace(-3, 3, 6)[:, None]).bfloat16()
    hidden_states[2] = 0
    topk_ids, topk_weights = torch.randint(-1, 5, (6, 2)), torch.rand(6, 2)
    message = encode_message(hidden_states, topk_ids, topk_weights, token_dtype)
    assert message.dtype == torch.uint8
    tokens = decode_message(message, hidden_size, 2, token_dtype)
    assert torch.equal(tokens.topk_ids, topk_ids.int())
    assert torch.equal(tokens.topk_weights, topk_weights)
    values, limit = tokens.hidden_states.float(), torch.zeros(())
    if tokens.scales is not None:
        scales = tokens.scales.repeat_interleave(128, dim=1)[:, :hidden_size]
        values = values * scales
        # Three fraction bits: half a step is 1/16 of the value, or of the smallest normal number, 2 ** -6, below it.
        limit = torch.maximum(hidden_states.float().abs(), scales * 2.0**-6) / 16
    # The scale and the product are rounded to fp32.
    assert ((values - hidden_states.float()).abs() <= limit * (1 + 1e-6)).all()
    assert (values[2] == 0).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.parametrize("token_dtype", [TokenDtype("fp8", "row_128"), TokenDtype("bf16")], ids=str)
def test_messages_of_few_tokens_with_any_strides(token_dtype: TokenDtype, num_tokens: int) -> None:
    # An odd number of bytes before the ids, and one slot whose stride means nothing.
    hidden_states = torch.randn(num_tokens, 65).bfloat16()
    topk_ids, topk_weights = torch.randint(-1, 5, (1, num_tokens)).T, torch.rand(1, num_tokens).T
    tokens = decode_message(encode_message(hidden_states, topk_ids, topk_weights, token_dtype), 65, 1, token_dtype)
    assert torch.equal(tokens.topk_ids, topk_ids.int())
    assert torch.equal(tokens.topk_weights, topk_weights)
    assert tokens.hidden_states.shape == hidden_states.shape
