"""Quantized tokens: every form that has a meaning is sent, read, and told from a wrong one."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import toy_backend as toy
from toy_backend import Parts

from moe_core.quant import BF16, QuantScheme
from moe_core.specs import TokenDtype
from moe_core.testing import Kit
from moe_core.testing.outcome import FAILED, NOT_RUN, PASSED, NotRun, Result
from moe_core.testing.tokens import WIRE_DTYPES, as_tokens, check_token_form, token_values

#: Half a step of each code over the largest value of its group, with a margin for scales that are powers of two.
HALF_STEP = {"fp8": 2.0**-4, "mxfp8": 2.0**-4, "int8": 1 / 127, "nvfp4": 0.25, "mxfp4": 0.34}


#: Scales in tiles exist for blocks of rows only, whose sizes are multiples of a tile's.
TILED = TokenDtype("nvfp4", "block_16_tiled")
UNTILED = [token_dtype for token_dtype in WIRE_DTYPES if token_dtype != TILED]
SHAPES = [(6, 200), (1, 66), (0, 64), (3, 5, 256)]


@pytest.mark.parametrize(
    ("token_dtype", "shape"),
    [
        *((token_dtype, shape) for token_dtype in UNTILED for shape in SHAPES),
        (TILED, (128, 64)),
        (TILED, (3, 256, 320)),
    ],
    ids=str,
)
def test_tokens_survive_the_way_there_and_back(token_dtype: TokenDtype, shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    unit = 2.0**-8 if token_dtype.is_calibrated else None
    codes, scales = as_tokens(rows, token_dtype, unit)
    check_token_form(codes, scales, token_dtype, shape[-1])
    values = token_values(codes, scales, token_dtype, unit or 1.0).view(shape)
    assert values.shape == rows.shape
    assert (values - rows.double()).abs().max() <= HALF_STEP[token_dtype.dtype] * 4.5 if rows.numel() else True


class Reader:
    """Experts of a toy that reads any tokens; `spoil` is what it takes their scales for."""

    def __init__(self, spoil: Any = None) -> None:
        self.spoil = spoil

    def bind(self, parts: Parts, weights: toy.Weights, plan: Any) -> Any:
        token_dtype = plan.routes[0].token_dtype
        static = weights.tensors.get("w13_input_scale")
        unit = 1.0 if static is None else float(static[0])

        def experts(tokens: Any) -> torch.Tensor:
            is_spoilt = self.spoil is not None and tokens.scales is not None
            scales = self.spoil(tokens.scales) if is_spoilt else tokens.scales
            values = token_values(tokens.hidden_states, scales, token_dtype, unit)
            plain = attrs.evolve(tokens, hidden_states=values.to(torch.bfloat16), scales=None)
            return toy.experts_of(parts, weights, plan)(_in_blocks(plain, tokens))

        return experts


def _in_blocks(plain: Any, tokens: Any) -> Any:
    shape = (*tokens.hidden_states.shape[:-1], -1)
    return attrs.evolve(plain, hidden_states=plain.hidden_states.view(shape))


def _results(reads: tuple[TokenDtype, ...], spoil: Any = None, scheme: QuantScheme = BF16) -> list[Result]:
    parts = Parts(bind=Reader(spoil).bind, runner={"reads": reads}, scheme=scheme)
    kit = Kit(toy.make_plugin("reads_wire", parts), device="cpu", quick=True)
    return [case.run() for case in kit.cases() if case.check in ("answer", "reload", "odd_sizes")]


def test_scales_in_tiles_lie_where_the_declaration_says() -> None:
    rows = torch.randn((2, 256, 320), generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(20).repeat(16)
    _, plain = as_tokens(rows, TokenDtype("nvfp4", "block_16"), 2.0**-8)
    _, tiled = as_tokens(rows, TILED, 2.0**-8)
    assert tiled.shape == plain.shape
    bytes_of = tiled.view(torch.uint8)
    for expert, m, k in ((0, 0, 0), (0, 33, 5), (1, 129, 19), (1, 255, 3)):
        place = ((m // 128) * (320 // 64) + k // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
        assert bytes_of[expert].flatten()[place] == plain.view(torch.uint8)[expert, m, k]


@pytest.mark.error_path
@pytest.mark.parametrize("shape", [(127, 64), (128, 32)], ids=str)
def test_parts_of_tiles_have_no_meaning(shape: tuple[int, int]) -> None:
    with pytest.raises(NotRun, match="no whole tiles"):
        as_tokens(torch.zeros(shape), TILED, 1.0)


@pytest.mark.parametrize("token_dtype", UNTILED, ids=str)
def test_a_right_reader_passes(token_dtype: TokenDtype) -> None:
    results = _results((token_dtype,))
    if token_dtype.is_calibrated:
        assert {result.status for result in results} == {NOT_RUN}
        assert "need the calibrated scale" in results[0].text
    else:
        assert [result for result in results if result.status != PASSED] == []
        assert {result.check for result in results} == {"answer", "reload", "odd_sizes"}


def test_tokens_with_a_calibrated_scale() -> None:
    assert {result.status for result in _results((TokenDtype("int8", "tensor"),), scheme=toy.STATIC_INT8)} == {PASSED}


@pytest.mark.parametrize(
    ("token_dtype", "spoil"),
    [
        (TokenDtype("fp8", "ue8m0_128"), lambda scales: scales + 1),
        (TokenDtype("int8", "token"), lambda scales: scales.roll(1)),
        (TokenDtype("fp8", "row_128"), lambda scales: scales.flip(0)),
    ],
    ids=["one power of two up", "of another token", "in reverse order"],
)
def test_a_reader_that_takes_scales_wrongly_fails(token_dtype: TokenDtype, spoil: Any) -> None:
    results = _results((TokenDtype("bf16"), token_dtype), spoil)
    failed = {result.subject for result in results if result.status == FAILED and result.check == "answer"}
    assert failed
    assert all(f"tokens {token_dtype}" in subject for subject in failed)


def test_every_declared_pair_is_tried_or_said_not_to_be() -> None:
    reads = (TokenDtype("bf16"), TokenDtype("fp8", "row_128"), TokenDtype("fp8", "token"), TokenDtype("int4", "token"))
    kit = Kit(toy.make_plugin("reads_wire", Parts(runner={"reads": reads})), device="cpu", quick=True)
    subjects = [case.subject for case in kit.cases() if case.check == "answer"]
    for token_dtype in reads[1:3]:
        assert any(f"tokens {token_dtype}" in subject for subject in subjects)
    (left,) = [case.run() for case in kit.cases() if case.subject == "reads_wire:toy.standard"]
    assert left.status == NOT_RUN
    assert "no form of tokens in int4/token" in left.text
