"""Environment variables that Ascend's DeepEP and HCCL read, and what they must be.

The resolver looks at them; in a forward a contradiction would be wrong counts, a failed assertion or a hang. How large
a communication domain must be is what the operators check where they do, and what the documents say elsewhere.

Source: README, documents, and the tiling of the operators of sgl-kernel-npu (August 2026).
"""

from __future__ import annotations

from moe_core.specs import BufferSize, Setting

#: Whether the normal mode sends int8, wherever no argument says so.
INT8 = "DEEP_NORMAL_MODE_USE_INT8_QUANT"
#: Whether the low-latency mode skips slots with id -1.
SKIP = "MOE_ENABLE_TOPK_NEG_ONE"
#: Set for the length of a call, so that no value of theirs contradicts anything.
SET_BY_CALLS = (INT8, SKIP)


def _expected(name: str, value: str, hint: str) -> Setting:
    """What the library takes if nothing is set, and what this plugin expects."""
    return Setting(values={name: ("", value)}, hint=f"unset it: {hint}")


#: Of every mode.
EXPECTED = (
    _expected("MOE_EXPERT_TOKEN_NUMS_TYPE", "1", "counts of tokens are read, not their running sums"),
    _expected("MOE_SHARED_EXPERT_RANK_NUM", "0", "every rank has routed experts"),
    _expected("DEEP_USE_MODE", "default", "other transports read dtype and weights from elsewhere"),
)
#: Of the normal modes.
ONE_ROUND = (
    _expected("DEEPEP_NORMAL_LONG_SEQ_ROUND", "1", "how rows of several rounds are grouped is not documented"),
    _expected("DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS", "8192", "one round takes all tokens"),
)

_UNEXPANDED = Setting(values={"HCCL_OP_EXPANSION_MODE": ("",)}, hint="unset it on A2")
_LAYERED = {"HCCL_INTRA_PCIE_ENABLE": ("1",), "HCCL_INTRA_ROCE_ENABLE": ("0",)}
#: Of A2.
ON_ONE_HOST = (_UNEXPANDED, Setting(values=_LAYERED, holds=False, hint="unset them on one host"))
BETWEEN_HOSTS = (_UNEXPANDED, Setting(values=_LAYERED, hint="set both before the process group is made"))

_MIB = 1 << 20
_TOKEN = ("max_tokens", "hidden_size")


def _domain(*bytes_needed: tuple[int, tuple[str, ...]]) -> BufferSize:
    """Of a communication domain; 200 MiB if nobody says how large it is."""
    return BufferSize(
        variables=("DEEPEP_HCCL_BUFFSIZE", "HCCL_BUFFSIZE"),
        default=200,
        unit=_MIB,
        bytes_needed=bytes_needed,
        hint="it is in MiB: set it before the process group is made",
    )


#: Two buffers of each slot's row in bf16 for dispatch and for combine, in whole 512 bytes, and of states.
A3_NORMAL = _domain((8, (*_TOKEN, "top_k")), (2048, ("max_tokens", "top_k")), (2 * 106 * _MIB, ()))
#: Two buffers, with a place for every token of every rank at every expert, and at each slot for combine.
A3_LOW_LATENCY = _domain(
    (4, (*_TOKEN, "ep_size", "num_local_experts")),
    (1024, ("max_tokens", "ep_size", "num_local_experts")),
    (4, (*_TOKEN, "top_k")),
    (1024, ("max_tokens", "top_k")),
)
#: One host: two buffers of every row that may arrive.
A2 = _domain((4, ("max_rows", "hidden_size")), (4 * _MIB, ()))
A2_TWO_HOSTS = _domain((2, ("num_experts", *_TOKEN)), (16, ("num_experts", "max_tokens", "top_k")), (804 * _MIB, ()))
#: Fuse mode -> size. Every token of every rank at every expert, twice; rows as bytes, thrice.
FUSED = {
    1: _domain((4, (*_TOKEN, "ep_size", "num_local_experts"))),
    2: _domain((3, (*_TOKEN, "top_k")), (10 * _MIB, ())),
}
