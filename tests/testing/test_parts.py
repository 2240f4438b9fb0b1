"""The parts of the kit: formats, reference, stored weights, sizes, cells, tolerances, messages, the pytest class."""

from __future__ import annotations

import doctest
import os
import time
import types
from unittest import mock

import attrs
import pytest
import reference_moe as oracle
import torch
import toy_backend as toy
from fakes import dispatcher, runner

from moe_core import ExpertGroup, LayerRequest
from moe_core.activation import SWIGLU_OAI, ActivationPattern, ActivationSpec
from moe_core.declared import Candidate, DeclaredDispatcher, DeclaredRunner
from moe_core.environment import load_environment
from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights
from moe_core.quant import BF16, FP8_BLOCK128, MXFP4_W4A16, NVFP4, SCHEMES, LayerQuant, QuantScheme
from moe_core.specs import Limit
from moe_core.testing import BackendConformance, Case, ConformanceError, Kit, NotRun, formats
from moe_core.testing.cells import activations_of, cells_of, schemes_of
from moe_core.testing.checks.ranks import why_untried
from moe_core.testing.compare import mismatch, relative_error, require_answer, require_apart
from moe_core.testing.memory import PoisonedMemory, State
from moe_core.testing.outcome import FAILED, NOT_RUN, PASSED
from moe_core.testing.parallel import run_cases
from moe_core.testing.ranks import RankError, run_on_ranks
from moe_core.testing.readings import readings
from moe_core.testing.rounding import activation_rounder
from moe_core.testing.sizes import base_sizes, odd_sizes
from moe_core.testing.stored import draw_layer
from moe_core.testing.tolerance import tolerance

W4A16_ZERO = QuantScheme(weight_dtype="int4", weight_block=(1, 32), weight_scale="bf16", zero_point=True)
REQUEST = LayerRequest(num_experts=5, top_k=2, hidden_size=64, intermediate_size=48)


# --- numbers -------------------------------------------------------------------------------------------------------


def test_every_e4m3_code_means_what_torch_reads() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        formats.decode_e4m3(codes), codes.view(torch.float8_e4m3fn).double(), rtol=0, atol=0, equal_nan=True
    )


def test_rounding_to_formats_agrees_with_the_acceptance_oracle() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 100
    assert torch.equal(formats.round_to_e4m3(values), oracle.to_e4m3fn(values))
    assert torch.equal(formats.round_to_e2m1(values / 40), oracle.to_e2m1(values / 40))
    assert torch.equal(formats.power_of_two_at_least(values.abs()), oracle.ceil_pow2(values.abs()))
    assert formats.power_of_two_up_to(torch.tensor([1.0, 1.9, 2.0, 0.3])).tolist() == [1.0, 1.0, 2.0, 0.25]


def test_packed_codes_agree_with_the_acceptance_oracle() -> None:
    packed = torch.arange(256, dtype=torch.uint8)[None]
    codes = oracle.unpack_nibbles(packed)
    assert torch.equal(formats.decode_e2m1(packed), oracle.decode_e2m1(codes))
    assert torch.equal(formats.decode_int4(packed), oracle.int4_values(codes).double())
    exponents = formats.decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert torch.equal(exponents.nan_to_num(-1), oracle.decode_e8m0(torch.arange(256)).nan_to_num(-1))


@pytest.mark.parametrize(
    ("scheme", "quantize"),
    [
        ("w8a8_int8", lambda x: oracle.quant_int(x, 8)),
        ("w4a4_int4", lambda x: oracle.quant_int(x, 4)),
        ("fp8_block128", oracle.quant_fp8_group),
        ("fp8_block128_ue8m0", lambda x: oracle.quant_fp8_group(x, 128, True)),
        ("fp8_channel", oracle.quant_fp8_row),
        ("mxfp4", oracle.quant_mxfp4),
        ("nvfp4", lambda x: oracle.quant_nvfp4(x, torch.tensor(0.002))),
    ],
)
def test_activation_rounding_agrees_with_the_acceptance_oracle(scheme: str, quantize: object) -> None:
    rows = torch.randn(9, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[3] = 0.0
    rounded = activation_rounder(SCHEMES[scheme], torch.tensor([0.002]))(rows, [0] * len(rows))
    assert relative_error(rounded, quantize(rows).deq) < 1e-7  # type: ignore[operator]


@pytest.mark.parametrize(
    ("activation", "name", "parameters"),
    [
        (ActivationSpec(), "swiglu", {}),
        (ActivationSpec(kind="gelu"), "geglu", {}),
        (SWIGLU_OAI, "swiglu_oai", {}),
        (ActivationSpec(limit=1.5), "swiglu_limit", {"limit": 1.5}),
        (ActivationSpec(limit=1.5, clamp="after"), "swiglu_step", {"limit": 1.5}),
        (ActivationSpec(kind="relu2", gated=False), "relu2", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("weight_on_input", [False, True])
def test_the_reference_agrees_with_the_acceptance_oracle(
    activation: ActivationSpec, name: str, parameters: dict[str, float], weight_on_input: bool
) -> None:
    request = attrs.evolve(REQUEST, activation=activation, bias=True, weight_on_input=weight_on_input)
    layer = draw_layer(request).reference
    hidden, ids, weights = torch.randn(6, 64), torch.randint(-1, 5, (6, 2)), torch.rand(6, 2) + 0.1
    want = oracle.moe(
        hidden, layer.w13, layer.w2, ids, weights, activation=name, b13=layer.b13, b2=layer.b2,
        weight_on_input=weight_on_input, **parameters,
    )  # fmt: skip
    assert relative_error(layer(hidden, ids, weights), want) < 1e-12


def test_stored_weights_mean_what_the_acceptance_oracle_reads() -> None:
    stored = draw_layer(attrs.evolve(REQUEST, quant=NVFP4))
    tensors = stored.tensors
    factor = tensors["w13_global_scale"].double().repeat_interleave(48, dim=1)[..., None]
    want = oracle.dequant_nvfp4(oracle.unpack_nibbles(tensors["w13"]), tensors["w13_scale"], factor)
    assert torch.equal(stored.reference.w13, want)
    stored = draw_layer(attrs.evolve(REQUEST, quant=FP8_BLOCK128, hidden_size=256, intermediate_size=128))
    scales = oracle.expand_blocks(stored.tensors["w13_scale"].double(), 256, 256, 128, 128)
    assert torch.equal(stored.reference.w13, stored.tensors["w13"].double() * scales)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in ("fp32", "fp16")])
def test_readings_of_a_layer_are_far_apart(name: str) -> None:
    quant = LayerQuant.of(SCHEMES[name])
    sizes = base_sizes(quant, ())
    request = attrs.evolve(
        REQUEST, quant=quant, hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size
    )
    try:
        layer = draw_layer(request)
    except NotRun as reason:
        pytest.skip(str(reason))
    generator = torch.Generator().manual_seed(0)
    tokens = (
        torch.randn(7, sizes.hidden_size, generator=generator),
        torch.rand(7, 5, generator=generator).topk(2).indices,
        torch.rand(7, 2, generator=generator) / 2 + 0.25,
    )
    for reading in ("swapped", "interleaved rows", "not applied", "applied twice"):
        require_apart(layer, reading, tokens, tolerance(request))


def test_readings_without_a_difference_prove_nothing() -> None:
    layer = draw_layer(REQUEST)
    tokens = (torch.randn(3, 64), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
    with pytest.raises(ConformanceError, match="proves nothing"):
        require_apart(layer, "applied twice", tokens, 0.01)
    with pytest.raises(NotRun, match="cannot be misread"):
        require_apart(layer, "biases", tokens, 0.01)
    assert len({reading.name for reading in readings(layer)}) == len(list(readings(layer)))


@pytest.mark.parametrize("quant", [NVFP4, W4A16_ZERO, toy.STATIC_INT8], ids=str)
def test_a_misreading_is_named(quant: QuantScheme) -> None:
    request = attrs.evolve(REQUEST, quant=quant, bias=True)
    stored, limit = draw_layer(request), tolerance(request)
    generator = torch.Generator().manual_seed(3)
    tokens = (torch.randn(9, 64, generator=generator), torch.randint(-1, 5, (9, 2)), torch.rand(9, 2) / 2 + 0.25)
    named = 0
    for reading in readings(stored):
        output = reading.layer(*tokens)
        if mismatch(output, stored.reference(*tokens), limit) is None:
            continue
        with pytest.raises(ConformanceError) as raised:
            require_answer(output, stored, tokens, limit, "an output")
        # Two of them may be as near to each other as the tolerance; the first is named then.
        named += str(raised.value).endswith(f"it is what comes out if {reading.name}")
    assert named > 15


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out: out[1, 3].fill_(torch.nan), "NaN or infinity in tokens 1"),
        (lambda out: out.mul_(1.5), "relative error 0.5"),
        (lambda out: out[2].mul_(1.07), "in tokens 2"),
        (lambda out: out[0, 5].add_(0.4), "in columns 5"),
        (lambda out: out[3].fill_(1.0), "tokens 3 have no expert and must be zero"),
    ],
)
def test_what_is_wrong_with_an_output(spoil: object, message: str) -> None:
    want = torch.randn(24, 1024, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want[3] = 0.0
    out = want.clone()
    assert mismatch(out, want, 0.02) is None
    spoil(out)  # type: ignore[operator]
    assert message in (mismatch(out, want, 0.02) or "")


# --- what is tried -------------------------------------------------------------------------------------------------


def test_sizes_keep_limits() -> None:
    limits = (
        Limit("hidden_size", "in", (2048, 4096)),
        Limit("intermediate_size", "multiple_of", 128),
        Limit("top_k", "<=", 9),
        Limit("num_experts", ">=", 8),
        Limit("max_tokens", "<=", 100),
    )
    sizes = base_sizes(LayerQuant.of(BF16), limits)
    assert (sizes.hidden_size, sizes.intermediate_size, sizes.top_k, sizes.max_tokens) == (2048, 128, 2, 100)
    assert sizes.num_experts == 8
    assert 9 in {other.top_k for other in odd_sizes(LayerQuant.of(BF16), limits)}
    for other in odd_sizes(LayerQuant.of(BF16), limits):
        for limit in limits:
            assert limit.allows(getattr(other, limit.field)), (limit, other)


def test_free_sizes_are_odd_and_packed_ones_even() -> None:
    assert any(sizes.hidden_size % 2 and sizes.intermediate_size % 2 for sizes in odd_sizes(LayerQuant.of(BF16), ()))
    for sizes in odd_sizes(LayerQuant.of(MXFP4_W4A16), ()):
        assert sizes.hidden_size % 2 == sizes.intermediate_size % 2 == 0
    block = base_sizes(LayerQuant.of(FP8_BLOCK128), ())
    assert (block.hidden_size, block.intermediate_size) >= (256, 256)


def test_sizes_that_do_not_exist_or_are_too_large_are_not_run() -> None:
    with pytest.raises(NotRun, match="no hidden_size keeps hidden_size in"):
        base_sizes(LayerQuant.of(BF16), (Limit("hidden_size", "in", (8,)), Limit("hidden_size", "multiple_of", 7)))
    with pytest.raises(NotRun, match="too many for a float64 answer"):
        base_sizes(LayerQuant.of(BF16), (Limit("hidden_size", "in", (1 << 20,)),))


def test_patterns_have_representatives() -> None:
    activations = activations_of(ActivationPattern(kind="any", gated=None, parameters=True, interleaved=True))
    assert {activation.kind for activation in activations} == {"silu", "gelu", "gelu_tanh", "relu", "relu2"}
    assert any(a.limit and a.clamp == "after" for a in activations)
    assert any(a.row_order == "interleaved" for a in activations)
    assert activations_of(ActivationPattern()) == [ActivationSpec()]
    tiled = attrs.evolve(FP8_BLOCK128, weight_block="any")
    schemes = schemes_of(LayerQuant.of(tiled))
    assert LayerQuant.of(FP8_BLOCK128) in schemes
    assert any(quant.w13.weight_block == (8, 128) for quant, is_named in schemes.items() if not is_named)
    odd = QuantScheme(weight_dtype="int8", weight_block=(4, 4), weight_scale="any", zero_point=True)
    (made,) = schemes_of(LayerQuant.of(odd))
    assert made.w13.matches(odd)
    assert not made.w13.is_pattern


def test_every_declared_cell_is_a_case() -> None:
    kit = Kit(toy.make_plugin("toy", toy.Parts(runner={"schemes": (BF16, SCHEMES["w8a8_int8"])})), device="cpu")
    (pair,) = kit.backend.pairs
    cells = cells_of(pair)
    names = [case.subject for case in kit.cases() if case.check == "answer"]
    assert names == [str(cell) for cell in cells]
    assert len(set(names)) == len(names)
    combinations = {(cell.quant, cell.activation) for cell in cells if not cell.feature}
    assert len(combinations) == 2 * len({cell.activation for cell in cells})


@pytest.mark.parametrize(
    ("format_", "declared", "tried"),
    [("contiguous", True, True), ("contiguous", False, False), ("masked", False, False), ("standard", False, True)],
)
def test_weights_on_the_input_are_tried_where_the_dispatcher_does_its_part(
    format_: str, declared: bool, tried: bool
) -> None:
    pair = Candidate(
        DeclaredDispatcher("toy", dispatcher(format=format_, weight_on_input=declared)),
        DeclaredRunner("toy", runner(format=format_, weight_on_input=True)),
    )
    assert ("weight_on_input" in {cell.feature for cell in cells_of(pair)}) == tried


def test_another_machines_cells_are_not_run_and_say_why() -> None:
    parts = toy.Parts(runner={"devices": ("cuda",), "archs": ("sm90",)})
    results = [case.run() for case in Kit(toy.make_plugin("toy", parts), device="cpu").cases()]
    (row,) = [result for result in results if result.check == "answer"]
    assert row.status == NOT_RUN
    assert row.text == "device: needs cuda, found cpu; arch: needs sm90, found no device generation (10 cells)"


@pytest.mark.parametrize("sizes", [(16,), (5, 8), (4, 16)])
def test_what_no_check_can_start_is_not_run_and_says_so(sizes: tuple[int, ...]) -> None:
    # The toy's dispatcher takes tokens that every rank has.
    parts = toy.Parts(format="contiguous", runner={"limits": (Limit("ep_size", "in", sizes),)})
    kit = Kit(toy.make_plugin("toy", parts), device="cpu", quick=True)
    (result,) = (case.run() for case in kit.cases() if " + " in case.subject)
    assert result.status == NOT_RUN
    assert result.text.startswith("the kit starts one rank, or 2, 3 or 4 with tokens of their own: it takes neither (")


@pytest.mark.parametrize(
    ("sizes", "placement", "is_tried"),
    [
        ((1, 16), "replicated", True),
        ((16,), "distributed", False),
        ((4, 16), "distributed", True),
        ((4, 16), "replicated", False),
    ],
)
def test_what_the_kit_can_start(sizes: tuple[int, ...], placement: str, is_tried: bool) -> None:
    limits = (Limit("ep_size", "in", sizes),)
    sender = dispatcher(format="contiguous", token_placements=(placement,), limits=limits)
    pair = Candidate(DeclaredDispatcher("toy", sender), DeclaredRunner("toy", runner(format="contiguous")))
    assert (why_untried(pair) == "") == is_tried


@pytest.mark.parametrize("device", ["cpu", None])
def test_a_described_machine_runs_what_is_emulated_here(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody says where tensors lie, and this machine has no such device.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    parts = toy.Parts(runner={"devices": ("cuda",), "archs": ("sm90",)})
    kit = Kit(toy.make_plugin("toy", parts), environment=load_environment("h100"), device=device, quick=True)
    results = [case.run() for case in kit.cases()]
    assert {result.check for result in results if result.status != PASSED} == {"import"}


# --- outcomes ------------------------------------------------------------------------------------------------------


def _raises(error: BaseException) -> Case:
    def function() -> None:
        raise error

    return Case(check="a", subject="b", function=function)


def test_a_case_becomes_a_result() -> None:
    assert Case(check="a", subject="b", function=lambda: None).run().status == PASSED
    assert _raises(NotRun("why")).run().text == "why"
    assert _raises(ConformanceError("what")).run().status == FAILED
    result = _raises(SystemExit(3)).run()
    assert (result.status, result.text) == (FAILED, "it raised SystemExit: 3")
    assert "SystemExit" in result.traceback
    # As libraries in Rust raise it.
    assert _raises(BaseException("panic")).run().text == "it raised BaseException: panic"


def test_an_interrupt_ends_the_kit() -> None:
    with pytest.raises(KeyboardInterrupt):
        _raises(KeyboardInterrupt()).run()


class Adopted(BackendConformance):
    plugin = toy.make_plugin("toy_in_class", toy.Parts())
    device = "cpu"
    expected_failures = types.MappingProxyType({"a[*": "known"})


def test_expected_failures_are_strict() -> None:
    adopted = Adopted()
    with pytest.raises(pytest.xfail.Exception, match="known"):
        adopted.test_conformance(_raises(ConformanceError("what")))
    with pytest.raises(ConformanceError, match="take it out of the list"):
        adopted.test_conformance(Case(check="a", subject="b", function=lambda: None))
    with pytest.raises(ConformanceError, match=r"c\[d\]: it raised ValueError: oops\nTraceback"):
        adopted.test_conformance(attrs.evolve(_raises(ValueError("oops")), check="c", subject="d"))
    with pytest.raises(pytest.skip.Exception, match="not run: why"):
        adopted.test_conformance(_raises(NotRun("why")))


@pytest.mark.error_path
def test_the_standard_tests_cannot_be_overridden() -> None:
    with pytest.raises(ConformanceError, match="Hollow overrides test_conformance; list what fails"):
        type("Hollow", (BackendConformance,), {"test_conformance": lambda self: None})


def test_the_example_of_the_kit_runs() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(Kit, "Kit", globs={})
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.error_path
def test_a_plugin_that_cannot_be_registered() -> None:
    module = toy.make_plugin("toy", toy.Parts(hooks={"fused_experts": lambda *arguments: None}))
    with pytest.raises(ConformanceError, match="fake_toy cannot be registered"):
        Kit(module)


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["plan", "request", "training", "_bound"])
def test_a_tensor_named_like_an_attribute_of_the_layer_fails(name: str) -> None:
    def prepare(weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
        prepared = toy.prepare(weights, out)
        prepared.tensors.setdefault(name, PreparedTensor(data=torch.zeros(1), expert_axis=None))
        return prepared

    module = toy.make_plugin("toy", toy.Parts(prepare=prepare))
    cases = Kit(module, device="cpu", quick=True).cases()
    results = [case.run() for case in cases if case.check == "prepared_form"]
    assert {result.status for result in results} == {FAILED}
    assert all(f"which has {name} itself" in result.text for result in results)


def test_poison_and_state() -> None:
    with PoisonedMemory():  # type: ignore[no-untyped-call]
        assert torch.empty(2).isnan().all()
        assert torch.zeros(3).new_empty(2).isnan().all()
        assert torch.empty(2, dtype=torch.float8_e4m3fn).double().isnan().all()
        assert int(torch.empty(1, dtype=torch.int32)) == torch.iinfo(torch.int32).max // 2
    before = State.now()
    torch.rand(1)
    assert State.now().changed_since(before) == ["torch.random.get_rng_state()"]


def test_several_processes_give_the_results_of_one() -> None:
    kit = Kit("sets_a_variable_plugin", device="cpu", quick=True)
    alone, together = list(run_cases(kit)), list(run_cases(kit, jobs=2))
    os.environ.pop("TOY_MODE", None)
    assert [(r.check, r.subject, r.status) for r in together] == [(r.check, r.subject, r.status) for r in alone]


def _mean(group: object, value: float) -> torch.Tensor:
    total = torch.tensor([value])
    torch.distributed.all_reduce(total)
    return total


def test_jobs_on_ranks() -> None:
    totals = run_on_ranks(_mean, [(1.0,), (2.0,)])
    assert [float(total) for total in totals] == [3.0, 3.0]
    (error,) = run_on_ranks(_mean, [("text",)])
    assert isinstance(error, RankError)
    assert "too many dimensions" in error.text


def _left_alone(group: ExpertGroup, seconds: float) -> int:
    """As if the others came later than a rank waits for them in the end."""
    torch.distributed.barrier = mock.Mock(side_effect=torch.distributed.DistBackendError("Timed out"))
    time.sleep(seconds)
    return group.rank


def test_a_rank_that_has_answered_does_not_answer_again() -> None:
    assert run_on_ranks(_left_alone, [(1.0,), (0.0,)]) == [0, 1]
