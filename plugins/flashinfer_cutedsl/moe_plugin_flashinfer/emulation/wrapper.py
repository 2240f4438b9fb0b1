"""The library's whole MoE layer in NVFP4 as it is called: the wrapper, the functional form, and a view of scales."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import torch

from moe_core.payloads import Tensor
from moe_core.testing.memory import poison
from moe_plugin_flashinfer.emulation.fused import CHUNK, FUSED_MOE
from moe_plugin_flashinfer.emulation.memory import BLOCK, UndefinedBehaviour, swizzled_shape
from moe_plugin_flashinfer.emulation.signatures import Signatures, given, refuse_others

#: In which two-stage finalize exists; the release before takes the argument of its functional form and ignores it.
WITH_TWO_STAGES = "0.7.2.post1"
#: Number of SwiGLU among the library's activations, and the only one emulated.
SWIGLU = 3
_WEIGHTS = ("w1_weight", "w1_weight_sf", "w1_alpha", "fc2_input_scale", "w2_weight", "w2_weight_sf", "w2_alpha")


def convert_sf_to_mma_layout(sf: Tensor, m: int, k: int, num_groups: int = 1, sf_vec_size: int = BLOCK) -> Tensor:
    """Scales in tiles as `(32, 4, m/128, 4, k/64, groups)`, a view whose memory stays as it is."""
    refuse_others("convert_sf_to_mma_layout", sf_vec_size=sf_vec_size != BLOCK)
    m_pad, k_pad = swizzled_shape(m, k)
    if sf.numel() != num_groups * m_pad * k_pad:
        raise ValueError(
            f"Scale factor tensor has {sf.numel()} elements, expected {num_groups * m_pad * k_pad} for m={m}, k={k}, "
            f"num_groups={num_groups}"
        )
    return sf.view(num_groups, m_pad // 128, k_pad // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


@attrs.frozen(kw_only=True)
class _Layer:
    """What does not change between calls; further settings of the library must be those that are emulated."""

    num_experts: int
    top_k: int
    num_local_experts: int | None = None
    local_expert_offset: int = 0
    output_dtype: torch.dtype = torch.bfloat16
    use_fused_finalize: bool = True
    enable_pdl: bool = True
    activation_type: int = attrs.field(default=SWIGLU)
    quant_mode: str = "w4a4"

    def __attrs_post_init__(self) -> None:
        refuse_others(
            "CuteDslMoE",
            output_dtype=self.output_dtype != torch.bfloat16,
            activation_type=self.activation_type != SWIGLU,
            quant_mode=self.quant_mode not in ("w4a4", "nvfp4"),
        )

    def __call__(
        self, x: Tensor, x_sf: Tensor, ids: Tensor, weights: Tensor, operands: dict[str, Tensor], out: Tensor
    ) -> Tensor:
        """Write and return `out [T, H]`; memory that the library does not look at is not looked at here."""
        for name, tensor in (("token_selected_experts", ids), ("token_final_scales", weights)):
            if tensor.dim() != 2 or tuple(tensor.shape) != (ids.shape[0], self.top_k):
                raise AssertionError(f"{name} must be 2D: num_tokens, top_k")
        if out.shape[0] != ids.shape[0]:
            raise AssertionError("moe_output must be sliced to num_tokens rows before calling _moe_core_impl")
        experts = self.num_local_experts or self.num_experts
        sizes = [self.local_expert_offset, experts, *_sizes(x, operands["w1_weight"], operands["w2_weight"], experts)]
        FUSED_MOE(
            x, x_sf, ids.contiguous().int(), weights, *(operands[name] for name in _WEIGHTS), out, sizes,
            self.use_fused_finalize,
        )  # fmt: skip
        return out


def _sizes(x: Tensor, w1: Tensor, w2: Tensor, experts: int) -> tuple[int, int]:
    """`H` and `I`, by the shapes that the library takes them from.

    Raises:
        ValueError: What its kernels cannot implement by their own word.
        UndefinedBehaviour: What they do not ask and cannot compute.
    """
    hidden, rows, inner = 2 * x.shape[1], w1.shape[1], 2 * w2.shape[2]
    if hidden % 32 or rows % 8 or inner % 32 or w2.shape[1] % 8:
        raise ValueError(f"Unsupported configuration: shape=({x.shape[0]}, {rows}, {hidden}, {w1.shape[0]})")
    if x.dtype != torch.uint8 or w1.dtype.itemsize != 1 or w2.dtype.itemsize != 1:
        raise UndefinedBehaviour(f"packed bytes are read from {x.dtype}, {w1.dtype} and {w2.dtype}")
    if rows != 2 * inner or w2.shape[1] != hidden or min(w1.shape[0], w2.shape[0]) < experts:
        raise UndefinedBehaviour(f"{experts} experts, x [.., {hidden}], w1 {list(w1.shape)} and w2 {list(w2.shape)}")
    if inner % CHUNK or hidden % 128:
        raise UndefinedBehaviour(f"hidden {hidden} and intermediate size {inner} are multiples of 128 and {CHUNK}")
    return hidden, inner


def functional_form(signatures: Signatures, *, is_deprecated: bool) -> Callable[..., Tensor]:
    """The layer in one call, as the function of a release."""

    def cute_dsl_fused_moe(
        *,
        x: Tensor,
        x_sf: Tensor,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        moe_output: Tensor | None = None,
        aux_stream: object = None,
        **others: Any,
    ) -> Tensor:
        """`[T, H]` of packed tokens; ids are global, and those of other ranks or -1 add nothing."""
        if is_deprecated:
            warnings.warn("cute_dsl_fused_moe_nvfp4 is deprecated; use cute_dsl_fused_moe", DeprecationWarning, 3)
        operands = {name: others.pop(name) for name in _WEIGHTS}
        layer = _layer(signatures, others)
        if moe_output is None:
            moe_output = _output(token_selected_experts.shape[0], operands["w2_weight"].shape[1])
        return layer(x, x_sf, token_selected_experts, token_final_scales, operands, moe_output)

    return cute_dsl_fused_moe


def _layer(signatures: Signatures, settings: dict[str, Any]) -> _Layer:
    known = {field.name for field in attrs.fields(_Layer)}
    refuse_others("CuteDslMoE", **{name: value for name, value in settings.items() if name not in known})
    layer = _Layer(**{name: value for name, value in settings.items() if name in known})
    return layer if signatures.release == WITH_TWO_STAGES else attrs.evolve(layer, use_fused_finalize=True)


def _output(num_tokens: int, hidden_size: int) -> Tensor:
    return poison(torch.empty((num_tokens, hidden_size), dtype=torch.bfloat16))


def wrapper_class(signatures: Signatures) -> type:
    """`CuteDslMoEWrapper` of a release."""
    made, run_signature = (signatures[f"fused_moe.CuteDslMoEWrapper.{name}"] for name in ("__init__", "run"))

    class CuteDslMoEWrapper:
        """The layer behind an object that may hold memory for device graphs."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            settings = given(made, args, kwargs)
            self.hidden_size, self.intermediate_size = settings.pop("hidden_size"), settings.pop("intermediate_size")
            self.device = settings.pop("device", "cuda")
            for ignored in ("tile_size", "sf_vec_size"):
                settings.pop(ignored, None)
            most, keeps_memory = settings.pop("max_num_tokens", 4096), settings.pop("use_cuda_graph", False)
            # The later release takes memory anew for each call.
            self._most = most if keeps_memory and signatures.release != WITH_TWO_STAGES else None
            self._output = None if self._most is None else _output(self._most, self.hidden_size)
            self._layer = _layer(signatures, settings)

        def run(self, *args: Any, **kwargs: Any) -> Tensor:
            """`[T, H]` of packed tokens; ids are global, and those of other ranks or -1 add nothing."""
            arguments = given(run_signature, args, kwargs)
            refuse_others("run", tactic=arguments.pop("tactic", None), scale=arguments.pop("per_token_scale", None))
            names = ("x", "x_sf", "token_selected_experts", "token_final_scales")
            x, x_sf, ids, weights = (arguments.pop(name) for name in names)
            if signatures.release == WITH_TWO_STAGES and x.dtype != torch.uint8:
                raise TypeError("quant_mode='w4a4' requires packed uint8 input")
            if self._most is not None and ids.shape[0] > self._most:
                raise ValueError(f"num_tokens ({ids.shape[0]}) exceeds max_num_tokens ({self._most})")
            out = _output(ids.shape[0], self.hidden_size) if self._output is None else self._output[: ids.shape[0]]
            return self._layer(x, x_sf, ids, weights, arguments, out)

    CuteDslMoEWrapper.__signature__ = made  # type: ignore[attr-defined]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    whole = run_signature.replace(parameters=[this, *run_signature.parameters.values()])
    CuteDslMoEWrapper.run.__signature__ = whole  # type: ignore[attr-defined]
    return CuteDslMoEWrapper
