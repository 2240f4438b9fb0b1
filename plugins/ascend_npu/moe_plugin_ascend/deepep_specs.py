"""Declarations of dispatcher `deepep`: Ascend's DeepEP in its modes, with the limits that its documentation gives.

Both modes write rows grouped by expert: the format that CUDA's low-latency mode writes does not exist here. Limits
differ between generations and, on A2, between one host and two, and so does what can be sent; each of these is a mode
of its own.

Source: documents of the normal and the low-latency API of sgl-kernel-npu (August 2026), and the checks of its Python
and C++ layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.specs import BufferSize, DispatcherSpec, Limit, Requirement, TokenDtype
from moe_plugin_ascend import variables
from moe_plugin_ascend.machine import DEVICES

if TYPE_CHECKING:
    from moe_core.plan import Route

#: Ascend's library shares its import name with CUDA's. It carries its own version, whatever it can do.
DEEP_EP = Requirement(module="deep_ep", install="build deep_ep of sgl-kernel-npu for this machine")

_INT8, _BF16 = TokenDtype("int8", "token"), TokenDtype("bf16")
_CHUNKS = "send the tokens in chunks"
_ALONE = "one rank needs no transport (a2a_backend='none')"
#: Numbers of ranks that the library's table of configurations knows; it asserts on others, though it uses none of them.
_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
#: Ranks of one A2 host, and of two.
_ONE_HOST, _TWO_HOSTS = 8, 16
_BETWEEN_HOSTS = "a2_normal_two_hosts"

_TOP_K = Limit("top_k", "<=", 16)
_EXPERTS = Limit("num_experts", "<=", 512)
_SEVERAL = Limit("ep_size", ">=", 2, _ALONE)


def _deepep(
    mode: str, arch: str, sends: tuple[TokenDtype, ...], buffer_size: BufferSize, limits: tuple[Limit, ...]
) -> DispatcherSpec:
    low_latency = "low_latency" in mode
    rounds = () if low_latency else variables.ONE_ROUND
    hosts = () if arch == "a3" else variables.BETWEEN_HOSTS if mode == _BETWEEN_HOSTS else variables.ON_ONE_HOST
    return DispatcherSpec(
        name="deepep",
        mode=mode,
        binder=f"moe_plugin_ascend.deepep:bind_{'low_latency' if low_latency else 'normal'}",
        format="contiguous",
        sends=sends,
        row_alignment=1,
        # Neither dispatch nor combine knows fp16.
        dtypes=("bf16",),
        devices=DEVICES,
        archs=(arch,),
        limits=(_TOP_K, _EXPERTS, *limits),
        requirements=(DEEP_EP,),
        settings=(*variables.EXPECTED, *rounds, *hosts),
        buffer_sizes=(buffer_size,),
        # A prefill has more tokens than it takes; who does not say what a forward is gets the mode that takes any.
        phases=("decode", "verify") if low_latency else ("any", "prefill", "decode", "verify"),
        # Normal mode reads the counts on the host, in every forward.
        graph_safe=low_latency,
    )


#: Of the low-latency mode. The hidden sizes of A3 are not documented, so that those of A2 are declared for both.
_LOW_LATENCY = (
    Limit("max_tokens", "<=", 512, _CHUNKS),
    Limit("hidden_size", "<=", 7168),
    Limit("hidden_size", "multiple_of", 32),
)
_A2_HIDDEN = Limit("hidden_size", "in", (7168,), "deepep.a2_low_latency takes other sizes")

DISPATCHERS = (
    _deepep(
        "normal",
        "a3",
        (_INT8, _BF16),
        variables.A3_NORMAL,
        (
            Limit("max_tokens", "<=", 8192, _CHUNKS),
            Limit("hidden_size", ">=", 1024),
            Limit("hidden_size", "<=", 7168),
            Limit("ep_size", "in", _RANKS, f"{_ALONE}; deepep.low_latency takes other numbers"),
        ),
    ),
    _deepep("low_latency", "a3", (_INT8, _BF16), variables.A3_LOW_LATENCY, (*_LOW_LATENCY, _SEVERAL)),
    _deepep(
        "a2_normal",
        "a2",
        (_INT8, _BF16),
        variables.A2,
        (
            Limit("max_tokens", "<=", 8192, _CHUNKS),
            _A2_HIDDEN,
            Limit(
                "ep_size",
                "in",
                tuple(ranks for ranks in _RANKS if ranks <= _ONE_HOST),
                f"{_ALONE}; two hosts have {_TWO_HOSTS} ranks: deepep.{_BETWEEN_HOSTS}",
            ),
        ),
    ),
    _deepep(
        _BETWEEN_HOSTS,
        "a2",
        # Across hosts quantized tokens are not supported.
        (_BF16,),
        variables.A2_TWO_HOSTS,
        (
            Limit("max_tokens", "<=", 4096, _CHUNKS),
            Limit("top_k", ">=", 2),
            _A2_HIDDEN,
            Limit("ep_size", "in", (_TWO_HOSTS,), "one host: deepep.a2_normal"),
        ),
    ),
    # Across hosts the low-latency mode cannot skip a slot without expert, which every model may have.
    _deepep(
        "a2_low_latency",
        "a2",
        (_INT8, _BF16),
        variables.A2,
        (*_LOW_LATENCY, _SEVERAL, Limit("ep_size", "<=", _ONE_HOST)),
    ),
)


def crosses_hosts(route: Route) -> bool:
    """Whether the library takes its path between hosts, which other settings and limits go with."""
    return route.dispatcher is not None and route.dispatcher.spec.mode == _BETWEEN_HOSTS
