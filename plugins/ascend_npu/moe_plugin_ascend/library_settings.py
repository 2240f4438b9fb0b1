"""What the environment says to Ascend's DeepEP before it is called: checked where a route is bound.

A contradiction would show as wrong counts, a failed assertion or a hang in the first forward.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from moe_core.errors import PluginError
from moe_core.plan import MoEPlan, Route
from moe_plugin_ascend.deepep_specs import crosses_hosts

_MIB = 1 << 20
#: Of a communication domain where nothing is set, in MiB.
_DEFAULT_BUFFER = 200
#: Variable -> the values that mean what this plugin expects; unset always does.
_EXPECTED = {
    "MOE_EXPERT_TOKEN_NUMS_TYPE": ("1",),  # counts of tokens, not their running sums
    "MOE_SHARED_EXPERT_RANK_NUM": ("0",),  # every rank has routed experts
    "DEEP_USE_MODE": ("default",),  # other transports read dtype and weights from elsewhere
}


def check_settings(plan: MoEPlan, route: Route, max_tokens: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise unless the environment fits one route.

    Args:
        plan: The layer's plan.
        route: The route that is bound.
        max_tokens: Most tokens of one rank in one forward.
        environ: The environment.

    Raises:
        PluginError: A variable contradicts the route, or communication buffers are too small; says what to set.
    """
    part = route.dispatcher or route.runner
    on_a2, across_hosts = part.spec.archs == ("a2",), crosses_hosts(route)
    faults = [
        f"{name}={environ[name]}: expected {' or '.join(values)}, or unset"
        for name, values in _EXPECTED.items()
        if environ.get(name, values[0]).lower() not in values
    ]
    if on_a2:
        faults += _a2_faults(across_hosts, environ)
    needed, variable = _needed_buffer(plan, max_tokens, across_hosts), _buffer_variable(environ)
    size = environ.get(variable, str(_DEFAULT_BUFFER))
    if not size.isdecimal() or int(size) < needed:
        told = "unset" if variable not in environ else size
        faults.append(
            f"{variable} ({told}): {max_tokens} tokens per rank need at least {needed} (MiB, {_DEFAULT_BUFFER} if "
            "unset); set it before the process group is made, or declare Workload(max_tokens=...)"
        )
    if faults:
        raise PluginError(f"{part.full_name} cannot run with this environment: {'; '.join(faults)}")


def _a2_faults(across_hosts: bool, environ: Mapping[str, str]) -> list[str]:
    faults = []
    if "HCCL_OP_EXPANSION_MODE" in environ:
        faults.append("HCCL_OP_EXPANSION_MODE is set: unset it on A2")
    names = ("HCCL_INTRA_PCIE_ENABLE", "HCCL_INTRA_ROCE_ENABLE")
    is_layered = tuple(map(environ.get, names)) == ("1", "0")
    if is_layered != across_hosts:
        wanted = "must be 1 and 0 between two hosts" if across_hosts else "are 1 and 0: unset them on one host"
        faults.append(f"{' and '.join(names)} {wanted}")
    return faults


def _buffer_variable(environ: Mapping[str, str]) -> str:
    return "DEEPEP_HCCL_BUFFSIZE" if "DEEPEP_HCCL_BUFFSIZE" in environ else "HCCL_BUFFSIZE"


def _needed_buffer(plan: MoEPlan, max_tokens: int, across_hosts: bool) -> int:
    """MiB of a communication domain, after the library's documents: two directions of every row that may arrive."""
    request = plan.request
    row = request.hidden_size * 2
    if across_hosts:
        needed = request.num_slots * max_tokens * (row + 16 * request.top_k) + 804 * _MIB
    else:
        rows = max_tokens * request.ep_size * min(request.max_local_experts, request.top_k)
        needed = 2 * (rows * row + 2 * _MIB)
    return -(-needed // _MIB)
