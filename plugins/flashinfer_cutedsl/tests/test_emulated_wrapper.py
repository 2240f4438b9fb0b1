"""The emulated whole layer, on operands that were laid out by hand, against float64 with the same roundings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_plugin_flashinfer.emulation import emulated, find, unordered_atomics
from moe_plugin_flashinfer.emulation.memory import UndefinedBehaviour
from moe_plugin_flashinfer.emulation.signatures import RELEASES
from nvfp4_by_hand import bf16, in_tiles, mma_view, rounded, silu

from moe_core.testing.compare import relative_error
from moe_core.testing.memory import same_bits

HIDDEN, INNER, EXPERTS, TOP_K = 256, 128, 5, 3
FIRST, LOCAL = 1, 3
EARLIER = "0.6.11.post3"


def by_turns(up: int, gate: int, inner: int) -> torch.Tensor:
    """Rows of [gate; up] in the kernel's order: 64 of `up`'s half, 64 of `gate`'s."""
    order = []
    for start in range(0, inner, 64):
        for half in (up, gate):
            order += range(half * inner + start, half * inner + start + 64)
    return torch.tensor(order)


class Layer:
    """A layer of five experts, of which this rank has the three from the second on, and its operands."""

    def __init__(self, tokens: int = 9) -> None:
        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        # The gate half is larger, so that exchanged halves show.
        self.w13 = [rounded(draw(2 * INNER, HIDDEN) * torch.tensor([2.0, 1.0]).repeat_interleave(INNER)[:, None], 300.0)
                    for _ in range(LOCAL)]  # fmt: skip
        self.w2 = [rounded(draw(HIDDEN, INNER), 300.0) for _ in range(LOCAL)]
        self.x = rounded(draw(tokens, HIDDEN).bfloat16(), 600.0)
        self.inner_scale = 4.0
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)]).int()
        self.ids[0], self.ids[1, 1] = -1, -1
        self.weights = torch.rand(tokens, TOP_K, generator=generator) + 0.25
        self.order = by_turns(1, 0, INNER)
        self.alphas = torch.tensor([1.0, 0.5, 2.0]) / (600 * 300), torch.tensor([2.0, 1.0, 0.5]) / (4 * 300)

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        laid_out = [expert.ordered(self.order) for expert in self.w13]
        return {
            "x": self.x.packed,
            "x_sf": self.x.scales,
            "token_selected_experts": self.ids,
            "token_final_scales": self.weights,
            "w1_weight": torch.stack([expert.packed for expert in laid_out]),
            "w1_weight_sf": mma_view([in_tiles(expert.scales) for expert in laid_out]),
            "w1_alpha": self.alphas[0],
            "fc2_input_scale": torch.tensor([self.inner_scale]),
            "w2_weight": torch.stack([expert.packed for expert in self.w2]),
            "w2_weight_sf": mma_view([in_tiles(expert.scales) for expert in self.w2]),
            "w2_alpha": self.alphas[1],
        }

    @property
    def settings(self) -> dict[str, Any]:
        return {"num_experts": EXPERTS, "top_k": TOP_K, "num_local_experts": LOCAL, "local_expert_offset": FIRST}

    def run(self, **changes: Any) -> torch.Tensor:
        wrapper = find("fused_moe.CuteDslMoEWrapper")
        made = wrapper(hidden_size=HIDDEN, intermediate_size=INNER, device="cpu", **self.settings)
        return made.run(**self.operands | changes)

    def answer(self, *, rounds_inside_to_bf16: bool = False) -> torch.Tensor:
        """float64, with nothing rounded but what the kernel rounds between both GEMMs."""
        out = torch.zeros(self.ids.shape[0], HIDDEN, dtype=torch.float64)
        for token, slot in (self.ids >= 0).nonzero().tolist():
            expert = int(self.ids[token, slot]) - FIRST
            if 0 <= expert < LOCAL:
                sums = self.x.raw[token] @ self.w13[expert].raw.T * float(self.alphas[0][expert])
                inside = silu(sums[:INNER]) * sums[INNER:]
                inside = bf16(inside) if rounds_inside_to_bf16 else inside
                codes = rounded(inside[None], self.inner_scale).raw[0]
                row = codes @ self.w2[expert].raw.T * float(self.alphas[1][expert])
                out[token] += row * float(self.weights[token, slot])
        return out


def test_the_layer_is_the_sum_of_its_local_slots() -> None:
    layer = Layer()
    out = layer.run()
    # Up to three sums of bf16.
    assert relative_error(out, layer.answer()) < 5e-3
    assert (out[0] == 0).all(), "a token without experts is zero"


def test_nothing_is_rounded_to_bf16_before_the_second_gemm() -> None:
    layer = Layer(tokens=64)
    wrapper = find("fused_moe.CuteDslMoEWrapper")
    settings = {**layer.settings, "use_fused_finalize": False}
    made = wrapper(hidden_size=HIDDEN, intermediate_size=INNER, device="cpu", **settings)
    out = made.run(**layer.operands)
    right, rounded_twice = (relative_error(out, layer.answer(rounds_inside_to_bf16=each)) for each in (False, True))
    assert right < 3e-3
    assert rounded_twice > 3 * right


def test_ids_of_other_ranks_and_none_are_neither_read_nor_added() -> None:
    layer = Layer()
    elsewhere = (layer.ids < FIRST) | (layer.ids >= FIRST + LOCAL)
    outs = []
    for other in (-1, 0, FIRST + LOCAL, 2**31 - 1):
        outs.append(layer.run(token_selected_experts=torch.where(elsewhere, other, layer.ids).int()))
    assert all(same_bits(out, outs[0]) for out in outs)
    # A weight of a slot that is not here may be anything.
    assert same_bits(layer.run(token_final_scales=torch.where(elsewhere, torch.nan, layer.weights)), outs[0])
    # And so may a token that is nowhere here.
    layer.x.scale_codes[0] = 127
    assert same_bits(layer.run(), outs[0])


def test_weights_are_read_as_fp32_and_ids_converted() -> None:
    layer = Layer()
    out = layer.run()
    assert same_bits(layer.run(token_selected_experts=layer.ids.long()), out)
    assert not same_bits(layer.run(token_final_scales=layer.weights.double()), out)


def test_fused_finalize_depends_on_the_order_of_slots_and_two_stages_do_not() -> None:
    layer = Layer(tokens=64)
    with unordered_atomics():
        assert len({layer.run().float().sum().item() for _ in range(TOP_K)}) > 1
        fused = find("fused_moe.cute_dsl_fused_moe")
        outs = [fused(**layer.operands, **layer.settings, use_fused_finalize=False) for _ in range(TOP_K)]
        assert all(same_bits(out, outs[0]) for out in outs)
        # The release before takes the argument, and adds as ever.
        with emulated(EARLIER):
            fused = find("fused_moe.cute_dsl_fused_moe_nvfp4")
            outs = [fused(**layer.operands, **layer.settings, use_fused_finalize=False) for _ in range(TOP_K)]
        assert not all(same_bits(out, outs[0]) for out in outs)


def test_the_functional_form_is_the_wrapper() -> None:
    layer = Layer()
    out = torch.full((9, HIDDEN), torch.nan, dtype=torch.bfloat16)
    with emulated(EARLIER):
        found = find("fused_moe.cute_dsl_fused_moe_nvfp4")(**layer.operands, **layer.settings, moe_output=out)
    assert found is out
    assert same_bits(out, layer.run())
    assert same_bits(out, find("fused_moe.cute_dsl_fused_moe")(**layer.operands, **layer.settings))
    with pytest.warns(DeprecationWarning, match="use cute_dsl_fused_moe"):
        assert same_bits(find("fused_moe.cute_dsl_fused_moe_nvfp4")(**layer.operands, **layer.settings), out)


def test_a_wrapper_for_device_graphs_gives_its_own_memory_in_the_first_release() -> None:
    layer = Layer()
    graph = {"use_cuda_graph": True, "max_num_tokens": 16, "hidden_size": HIDDEN, "intermediate_size": INNER}
    for release, is_kept in zip(RELEASES, (True, False), strict=True):
        with emulated(release):
            made = find("fused_moe.CuteDslMoEWrapper")(**layer.settings, **graph, device="cpu")
        first = made.run(**layer.operands)
        assert (made.run(**layer.operands).data_ptr() == first.data_ptr()) == is_kept


def test_a_view_of_scales_moves_no_byte() -> None:
    tiles = torch.stack([in_tiles(expert.scales).view(torch.uint8) for expert in Layer().w2])
    view = find("cute_dsl.convert_sf_to_mma_layout")(tiles.view(-1, 8), m=HIDDEN, k=INNER, num_groups=LOCAL)
    assert view.shape == (32, 4, 2, 4, 2, LOCAL)
    assert view.data_ptr() == tiles.data_ptr()
    assert view[5, 1, 1, 2, 0, 2] == tiles.view(LOCAL, -1)[2, (1 * 2 + 0) * 512 + 5 * 16 + 1 * 4 + 2]
    with pytest.raises(ValueError, match="expected 6144"):
        find("cute_dsl.convert_sf_to_mma_layout")(tiles[:2], m=HIDDEN, k=INNER, num_groups=LOCAL)


@pytest.mark.error_path
def test_the_wrapper_refuses_what_the_library_refuses() -> None:
    layer = Layer()
    graph = {"use_cuda_graph": True, "max_num_tokens": 8, "hidden_size": HIDDEN, "intermediate_size": INNER}
    with pytest.raises(AssertionError, match="2D"):
        layer.run(token_final_scales=layer.weights[:, :2])
    with pytest.raises(NotImplementedError, match="quant_mode"):
        find("fused_moe.CuteDslMoEWrapper")(**layer.settings, **graph, quant_mode="w4a16")
    with pytest.raises(TypeError, match="packed uint8"):
        layer.run(x=layer.x.packed.view(torch.int8))
    with emulated(EARLIER):
        with pytest.raises(ValueError, match=r"num_tokens \(9\) exceeds max_num_tokens \(8\)"):
            find("fused_moe.CuteDslMoEWrapper")(**layer.settings, **graph, device="cpu").run(**layer.operands)
        with pytest.raises(TypeError, match="use_fused_finalize"):
            find("fused_moe.CuteDslMoEWrapper")(**layer.settings, **graph, use_fused_finalize=False)
        with pytest.raises(TypeError, match="per_token_scale"):
            layer.run(per_token_scale=torch.ones(9))


@pytest.mark.error_path
@pytest.mark.parametrize(("hidden", "inner"), [(192, 64), (256, 96), (264, 64)])
def test_sizes_without_whole_tiles_are_refused(hidden: int, inner: int) -> None:
    layer, k_pad = Layer(), -(-hidden // 64) * 4
    sizes = {
        "x": torch.zeros(9, hidden // 2, dtype=torch.uint8),
        "x_sf": torch.zeros(9, hidden // 16, dtype=torch.uint8),
        "w1_weight": torch.zeros(LOCAL, 2 * inner, hidden // 2, dtype=torch.uint8),
        "w1_weight_sf": torch.zeros(LOCAL, 256, k_pad, dtype=torch.uint8),
        "w2_weight": torch.zeros(LOCAL, hidden, inner // 2, dtype=torch.uint8),
        "w2_weight_sf": torch.zeros(LOCAL, 384, 8, dtype=torch.uint8),
    }
    with pytest.raises((ValueError, UndefinedBehaviour), match=r"multiples of|Unsupported configuration"):
        find("fused_moe.cute_dsl_fused_moe")(**layer.operands | sizes, **layer.settings)


@pytest.mark.error_path
def test_operands_of_another_form_are_refused_where_their_sizes_show_it() -> None:
    layer = Layer()
    with pytest.raises(UndefinedBehaviour):
        layer.run(w2_weight=layer.operands["w2_weight"].mT.contiguous())
    with pytest.raises(UndefinedBehaviour):
        layer.run(w1_weight=layer.operands["w1_weight"][:2])
    with pytest.raises(UndefinedBehaviour):
        layer.run(x_sf=layer.operands["x_sf"][:8].clone())


def test_each_planted_fault_in_an_operand_gives_wrong_numbers() -> None:
    layer = Layer()
    right, operands = layer.run(), layer.operands
    stored = [expert.ordered(by_turns(0, 1, INNER)) for expert in layer.w13]
    plain = torch.stack([expert.packed for expert in layer.w13])
    linear = torch.stack([expert.scales.view(torch.uint8) for expert in layer.w13]).view(torch.float8_e4m3fn)
    faults: dict[str, dict[str, Any]] = {
        "halves exchanged": {
            "w1_weight": torch.stack([expert.packed for expert in stored]),
            "w1_weight_sf": mma_view([in_tiles(expert.scales) for expert in stored]),
        },
        "rows as stored": {"w1_weight": plain, "w1_weight_sf": mma_view([in_tiles(e.scales) for e in layer.w13])},
        "scales in the order of the stored rows": {"w1_weight_sf": mma_view([in_tiles(e.scales) for e in layer.w13])},
        "scales without tiles": {"w1_weight_sf": linear},
        "a contiguous copy of the view": {"w1_weight_sf": operands["w1_weight_sf"].contiguous()},
        "tiles of tokens": {"x_sf": in_tiles(layer.x.scales)},
        "odd elements first": {"x": operands["x"] << 4 | operands["x"] >> 4},
        "alpha of the second GEMM": {"w1_alpha": layer.alphas[1]},
        "scale inverted": {"fc2_input_scale": 1 / operands["fc2_input_scale"]},
        "local ids": {"token_selected_experts": (layer.ids - FIRST).clamp(min=-1).int()},
    }
    for name, changes in faults.items():
        error = relative_error(layer.run(**changes), right.double())
        assert not error < 0.05, f"{name}: error {error:.2g}"
