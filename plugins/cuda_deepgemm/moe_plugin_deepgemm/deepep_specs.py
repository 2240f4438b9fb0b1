"""Declarations of dispatcher `deepep`: DeepEP in its normal and its low-latency mode, with the limits of its kernels.

The normal mode takes any number of tokens and writes rows grouped by expert; the low-latency mode takes few tokens,
without a word from the host, and writes one block of rows per expert. Both are declared for the GPUs of one host.

Source: assertions and kernel instances of DeepEP v1.2.1.
"""

from __future__ import annotations

import attrs

from moe_core.specs import DispatcherSpec, Limit, Requirement, TokenDtype
from moe_plugin_deepgemm.machine import DEVICES, UNVERIFIED_ARCHS, VERIFIED_ARCHS

DEEP_EP = Requirement(
    module="deep_ep",
    install="pip install tokenspeed-deepep, the build for your release of torch, or build DeepEP 1.2.1 (https://github.com/deepseek-ai/DeepEP)",
)

#: Builds of another distribution, with numbers of its own, whose low-latency dispatch takes `use_nvfp4`.
_FIRST_WITH_NVFP4 = "0.1.1"
DEEP_EP_NVFP4 = Requirement(
    module="deep_ep",
    minimum=_FIRST_WITH_NVFP4,
    excluded=">=1",
    install=f"pip install 'sgl-deep-ep>={_FIRST_WITH_NVFP4}', the build for your release of torch",
)
#: All others: where both modes could serve, the name would decide in which dtype tokens travel.
_DEEP_EP_WITHOUT = attrs.evolve(DEEP_EP, excluded=f">={_FIRST_WITH_NVFP4},<1")

_BF16, _FP8 = TokenDtype("bf16"), TokenDtype("fp8", "column_128")
#: The kernels of Blackwell read scales as packed powers of two.
_FP8_POWERS = TokenDtype("fp8", "ue8m0_128")
_NVFP4 = TokenDtype("nvfp4", "block_16_tiled")
_ONE_HOST = "one rank needs no transport (a2a_backend='none'); several hosts: torch_alltoall"
_CHUNKS = "send the tokens in chunks, or use deepep.normal"
#: What the low-latency kernels were compiled for.
_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
#: Most tokens of a rank: its messages have to fit into the queues that `nvshmem_settings` asks for, after the number
#: was rounded up to whole tiles, which are up to 128 tokens.
MAX_LOW_LATENCY_TOKENS = 896

_NORMAL = DispatcherSpec(
    name="deepep",
    mode="normal",
    binder="moe_plugin_deepgemm.deepep_normal:bind",
    format="contiguous",
    sends=(_FP8, _BF16),
    # Combine adds up in bf16 only.
    dtypes=("bf16",),
    devices=DEVICES,
    archs=VERIFIED_ARCHS,
    limits=(
        Limit("ep_size", "in", (2, 4, 8), f"{_ONE_HOST}; deepep.low_latency takes other numbers of GPUs"),
        # One thread per expert counts its tokens, one lane per slot sends a token.
        Limit("num_local_experts", "<=", 128, "use more ranks"),
        Limit("top_k", "<=", 32),
        # Half a token and a barrier lie in 8 KiB of shared memory.
        Limit("hidden_size", "<=", 8176, "deepep.low_latency takes 8192"),
        Limit("hidden_size", "multiple_of", 32),
    ),
    requirements=(DEEP_EP,),
    phases=("any", "prefill", "decode", "verify"),
    # The host waits for the counts in every forward.
    graph_safe=False,
)

_LOW_LATENCY = attrs.evolve(
    _NORMAL,
    mode="low_latency",
    binder="moe_plugin_deepgemm.deepep_low_latency:bind",
    format="masked",
    limits=(
        Limit("ep_size", "in", tuple(range(2, 9)), _ONE_HOST),
        Limit("top_k", "<=", 11, "builds of sgl-deep-ep since 0.1.2 take more"),
        Limit("hidden_size", "in", _HIDDEN_SIZES, "deepep.normal takes other sizes"),
        Limit("max_tokens", "<=", MAX_LOW_LATENCY_TOKENS, _CHUNKS),
    ),
    # A prefill has more tokens than it takes; who does not say what a forward is gets the mode that takes any.
    phases=("decode", "verify"),
    graph_safe=True,
)


def _unverified(spec: DispatcherSpec) -> DispatcherSpec:
    """The same on Blackwell, where nothing of it was run."""
    return attrs.evolve(
        spec,
        mode=f"{spec.mode}_unverified",
        archs=UNVERIFIED_ARCHS,
        sends=(_FP8_POWERS, _BF16),
        graph_safe=False,
    )


_low_latency = _unverified(_LOW_LATENCY)
#: The same mode of either distribution, of which one rounds to NVFP4 too.
_BLACKWELL_LOW_LATENCY = (
    attrs.evolve(_low_latency, requirements=(_DEEP_EP_WITHOUT,)),
    attrs.evolve(
        _low_latency,
        mode="low_latency_nvfp4_unverified",
        sends=(_NVFP4, *_low_latency.sends),
        requirements=(DEEP_EP_NVFP4,),
    ),
)
DISPATCHERS = (_NORMAL, _LOW_LATENCY, _unverified(_NORMAL), *_BLACKWELL_LOW_LATENCY)
