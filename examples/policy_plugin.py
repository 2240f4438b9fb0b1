"""A policy: a plugin without backends of its own that overrules which combination is chosen.

It is asked before anything else, whatever the ranking says. An installation names it with an entry point:

    [project.entry-points."moe_core.backends"]
    padded_blocks = "policy_plugin"

Run this file to see what it changes: `python examples/policy_plugin.py`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from moe_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_core.declared import Candidate
    from moe_core.request import LayerRequest

#: Few tokens are sent in padded blocks, whose shapes do not depend on the routing.
FEW_TOKENS = 64


@hookimpl
def select_dispatcher(request: LayerRequest, candidates: Sequence[Candidate]) -> Candidate | None:
    """The best-ranked combination on padded blocks for workloads of few tokens; None leaves the choice to others."""
    (workload,) = request.workloads
    if workload.max_tokens is None or workload.max_tokens > FEW_TOKENS:
        return None
    return next((candidate for candidate in candidates if candidate.runner.spec.format == "masked"), None)


def main() -> None:
    """Plan one layer without the policy and with it."""
    from moe_core import BackendManager, LayerRequest, Workload, make_plan
    from moe_core.backends.torch import plugin as torch_plugin
    from moe_core.environment import load_environment

    workloads = (Workload(phase="prefill", max_tokens=4096), Workload(phase="decode", max_tokens=32))
    request = LayerRequest(num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, workloads=workloads)
    manager = BackendManager()
    manager.register("torch", torch_plugin)
    print(f"without the policy:\n{make_plan(manager, request, load_environment('cpu'))[0]}")
    manager.register("padded_blocks", sys.modules[__name__])
    print(f"with the policy:\n{make_plan(manager, request, load_environment('cpu'))[0]}")


if __name__ == "__main__":
    main()
