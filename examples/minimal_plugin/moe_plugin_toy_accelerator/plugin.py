"""What the backend `toy_accelerator` can do, and the hooks that do it.

moe-core imports this file on every machine where the plugin is installed, to list and to explain: it needs neither
torch nor a kernel library at module level. Import both inside the hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.activation import ActivationPattern
from moe_core.hookspecs import hookimpl
from moe_core.quant import BF16
from moe_core.specs import PluginSpec, Requirement, RunnerSpec, TokenDtype

if TYPE_CHECKING:
    from moe_core.payloads import ExpertsFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route

#: The tag of the weights that this plugin makes. A tag means one layout in every plugin: begin it with your own name.
WEIGHT_LAYOUT = "toy_accelerator_transposed"

RUNNER = RunnerSpec(
    name="toy_accelerator",
    kernel="contiguous",
    # How tokens lie in memory: rows grouped by expert. Others: `standard` (as they came), `masked` (a padded block per
    # expert), `fused` (one call does everything). Declare one runner for each kernel.
    format="contiguous",
    # What the kernel reads, best first. A kernel that reads fp8 rows with scales: TokenDtype("fp8", "row_128").
    reads=(TokenDtype("bf16"),),
    # Schemes of the stored weights: constants of moe_core.quant, or patterns with "any" in a field.
    schemes=(BF16,),
    # Dtypes of the layer's input and output.
    dtypes=("bf16",),
    # Plain SwiGLU and nothing else. Whatever is not declared is never asked for.
    activations=(ActivationPattern(),),
    weight_layout=WEIGHT_LAYOUT,
    # For a GPU kernel: devices=("cuda",), archs=("sm90",). The toy runs anywhere.
    devices=("any",),
    # Rows of each expert come padded to a multiple of this; the rows between are undefined memory.
    row_alignment=8,
    # Sizes that the kernel takes: limits=(Limit("hidden_size", "multiple_of", 128), Limit("top_k", "<=", 8)).
    limits=(),
    # What an installation needs besides torch, with what to type: looked up, never imported.
    requirements=(),
    # Decides the order where nothing was measured: `reference` comes last. Say `tuned` once it is fast.
    tier="reference",
)


@hookimpl
def declare_backends() -> PluginSpec:
    """Say what this plugin can do."""
    return PluginSpec(
        name="toy_accelerator",
        # The number of the interface that this plugin was written for. A literal: an imported constant always matches.
        hook_api=1,
        description="a toy accelerator that is torch underneath",
        # Dispatchers move tokens between ranks. A runner alone uses those of moe-core and of other plugins.
        dispatchers=(),
        runners=(RUNNER,),
        requirements=(Requirement(module="torch", minimum="2.10", install="pip install 'torch>=2.10'"),),
    )


@hookimpl
def process_weights_after_loading(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Bring a layer's weights into the kernel's layout; with `out`, refill what an earlier load made."""
    from moe_plugin_toy_accelerator.weights import prepare

    return prepare(weights, out, WEIGHT_LAYOUT)


@hookimpl
def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """Bind the experts of one route: once per load, so check here whatever can fail."""
    from moe_plugin_toy_accelerator.experts import bind

    return bind(weights)
