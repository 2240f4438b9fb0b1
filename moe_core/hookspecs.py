"""The hooks: the whole surface between the core and a plugin, and the manual of it.

A plugin is a module that an entry point of group `moe_core.backends` names. It declares what it can do, and
implements what it declared with functions marked `@hookimpl`. Four rules hold for every hook:

* the core asks one plugin at a time and names it in every error, so nothing depends on registration order;
* arguments are matched by name; an implementation may leave out those it does not need and gives no defaults;
* a hook is a plain function that returns its answer: no wrapper, no generator, not async;
* importing the plugin module needs neither torch nor the kernel library: import them inside the functions, names for
  annotations under `TYPE_CHECKING`, and begin with `from __future__ import annotations`, so that none is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from moe_core.declared import Candidate
    from moe_core.payloads import ExpertGroup, ExpertsFn, FusedFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route
    from moe_core.request import LayerRequest
    from moe_core.specs import DispatcherSpec, PluginSpec, RunnerSpec, TokenDtype

PROJECT = "moe_core"
ENTRY_POINT_GROUP = "moe_core.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def declare_backends() -> PluginSpec:  # type: ignore[empty-body]
    """Say what this plugin can do.

    Called once, right after the plugin was loaded, on every machine where it is installed: also where its
    kernel library, its device or torch is missing. Each plugin is asked by itself; raising (or exiting) makes
    this plugin `failed` and touches no other. Nothing stops a plugin that waits: ask no device and no network. What
    it prints becomes a warning, and so does an import or a declaration that takes more than two seconds.

    Returns:
        A `PluginSpec` whose `name` is the entry point's and whose `hook_api` is the literal number of the
        interface that the plugin was written for. It and its parts are of the plain types, not of subclasses.

    Example:
        >>> from moe_core.activation import ActivationPattern
        >>> from moe_core.hookspecs import hookimpl
        >>> from moe_core.quant import BF16
        >>> from moe_core.specs import PluginSpec, RunnerSpec, TokenDtype
        >>> @hookimpl
        ... def declare_backends():
        ...     runner = RunnerSpec(
        ...         name="toy",
        ...         kernel="standard",
        ...         format="standard",
        ...         reads=(TokenDtype("bf16"),),
        ...         schemes=(BF16,),
        ...         activations=(ActivationPattern(),),
        ...         dtypes=("bf16",),
        ...         weight_layout="toy",
        ...     )
        ...     return PluginSpec(name="toy", hook_api=1, runners=(runner,))
        >>> declare_backends().runners[0].short_name
        'toy.standard'

    Since: hook API 1.
    """


@hookspec
def select_dispatcher(request: LayerRequest, candidates: Sequence[Candidate]) -> Candidate | None:
    """Choose among the combinations that can run.

    Called once per workload while a plan is made, or once for each range of its token counts where measured times
    split it. Policy plugins (which implement a select hook and declare no backends) are asked first, by name; then
    the plugin of the first candidate's runner, unless the user's `prefer` or a measurement made the order; then the
    core takes `candidates[0]`. Stops at the first answer that is not None; the plan records who answered.

    Args:
        request: The layer, with the one workload in question; of a range, up to its largest token count.
        candidates: Feasible combinations, best first, already narrowed by the user's pins; never empty.

    Returns:
        One element of `candidates`, or None to leave the choice to the next. Anything else is an error that
        names the plugin.

    Example:
        >>> from moe_core.hookspecs import hookimpl
        >>> @hookimpl
        ... def select_dispatcher(candidates):
        ...     wanted = [c for c in candidates if c.a2a_backend == "none"]
        ...     return wanted[0] if wanted else None
        >>> select_dispatcher([]) is None
        True

    Since: hook API 1.
    """


@hookspec
def select_output_dtype(
    request: LayerRequest, dispatcher: DispatcherSpec | None, runner: RunnerSpec, candidates: Sequence[TokenDtype]
) -> TokenDtype | None:
    """Choose the dtype in which tokens reach the runner.

    Called once per route, after `select_dispatcher`, in the same order of plugins, unless the user pinned a
    dispatch dtype (or the deprecated variable asked for bf16). Stops at the first answer that is not None.

    Args:
        request: The layer, with the one workload in question.
        dispatcher: The chosen dispatcher, None for a fused runner.
        runner: The chosen runner.
        candidates: What the dispatcher sends and the runner reads here; the rules' own choice comes first.

    Returns:
        One element of `candidates`, or None. Anything else is an error that names the plugin.

    Example:
        >>> from moe_core.hookspecs import hookimpl
        >>> @hookimpl
        ... def select_output_dtype(candidates):
        ...     return next((token for token in candidates if token.dtype == "bf16"), None)
        >>> from moe_core.specs import TokenDtype
        >>> str(select_output_dtype([TokenDtype("fp8", "row_128"), TokenDtype("bf16")]))
        'bf16'

    Since: hook API 1.
    """


@hookspec
def process_weights_after_loading(  # type: ignore[empty-body]
    plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None
) -> PreparedWeights:
    """Bring one layer's weights into the runner's layout.

    Called when weights are loaded, and again at every reload. Only the plugin of the plan's runner is asked.
    The core has checked names, shapes and dtypes before.

    Warning:
        `weights` is read-only. Of `out` only the values of its tensors, `activation` and `post_norm` may change: its
        layout, its names and each tensor's memory, shape, strides and dtype are checked. Check before writing:
        whatever is raised with `out` given, the layer refuses forwards until a complete reload.

    Args:
        plan: The layer's plan; its `weight_layout` tag is the one to produce.
        weights: Canonical tensors of this rank's experts: `w13 [L, 2I, H]` rows [gate; up] (not gated:
            `[L, I, H]`; interleaved where `plan.request.activation.row_order` says so), `w2 [L, H, I]`, `b13`, `b2`,
            scales; any strides. `weights.release(e)`, if not None, gives expert `e`'s raw memory back: call it once
            for each expert that was copied.
        out: None to make new tensors; otherwise the earlier result, to be refilled in the same storage and given
            the callables of `weights` (the core binds again if these have changed).

    Returns:
        `PreparedWeights` with the tag of the layout that was made (written, not copied from the plan, so that a plan
        for another one is noticed) and **every** per-expert tensor; `out` itself if given. The names of the tensors
        become attributes of `MoELayer`, so none that it has itself (`plan`, `request`, `training`, ...).
        Work expert by expert (one expert of extra memory). A raw tensor that needs no change may be returned
        as it is, with `owned=False`.

    Example:
        >>> from moe_core.hookspecs import hookimpl
        >>> @hookimpl
        ... def process_weights_after_loading(plan, weights, out):
        ...     from moe_core.payloads import PreparedTensor, PreparedWeights
        ...
        ...     if out is None:
        ...         borrowed = {n: PreparedTensor(data=t, owned=False) for n, t in weights.tensors.items()}
        ...         return PreparedWeights(layout="toy", tensors=borrowed)
        ...     for expert in range(len(weights.tensors["w13"])):
        ...         for name, tensor in weights.tensors.items():
        ...             out[name][expert].copy_(tensor[expert])
        ...         if weights.release is not None:
        ...             weights.release(expert)
        ...     return out

    Since: hook API 1.
    """


@hookspec
def fused_experts(  # type: ignore[empty-body]
    plan: MoEPlan, route: Route, weights: PreparedWeights, group: ExpertGroup
) -> ExpertsFn | FusedFn:
    """Bind the experts of one route to its prepared weights.

    Called once per route at load time; only the route's runner's plugin is asked. Check the vendor's signature
    and everything else that can fail here: the function returned runs in every forward, and no hook does.

    Args:
        plan: The layer's plan.
        route: The route to bind; `route.token_dtype` and `route.runner.spec` say what will arrive.
        weights: The prepared weights, in the layout that this plugin declared; they stay as they are, which is checked.
        group: This process's place among the expert-parallel ranks, for fused routes, which communicate themselves.

    Returns:
        For `standard`: `experts(StandardTokens) -> [T, H]`, weighted and summed over K, in the layer's dtype.
        For `contiguous` and `masked`: `experts(tokens) -> [R, H]` or `[L, M, H]`, unweighted, in the layer's dtype (in
        fp16 layers also in fp32); rows beyond the counts may hold anything.
        For `fused`: `experts(hidden_states, topk_ids, topk_weights) -> [T, H]`.

    Example:
        >>> from moe_core.hookspecs import hookimpl
        >>> @hookimpl
        ... def fused_experts(plan, route, weights):
        ...     import torch
        ...
        ...     w13, w2 = weights["w13"], weights["w2"]
        ...
        ...     def experts(tokens):
        ...         out = torch.zeros_like(tokens.hidden_states)
        ...         for expert in range(w13.shape[0]):
        ...             token, slot = torch.where(tokens.topk_ids == expert)
        ...             gate, up = (tokens.hidden_states[token] @ w13[expert].T).chunk(2, dim=-1)
        ...             rows = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        ...             out.index_add_(0, token, rows * tokens.topk_weights[token, slot, None].to(rows.dtype))
        ...         return out
        ...
        ...     return experts

    Since: hook API 1.
    """
