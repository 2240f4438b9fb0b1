"""How plans, and the machines that they are for, look on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from moe_core.cli.output import fields
from moe_core.decision import Decision
from moe_core.environment import Environment
from moe_core.errors import counted
from moe_core.feasibility import pin_reasons
from moe_core.model_config import LayerGroup
from moe_core.plan import MoEPlan, Route
from moe_core.problem_list import in_ranges
from moe_core.request import LayerRequest, Pins
from moe_core.vocabulary import ANY


def layer_ranges(layers: Sequence[int]) -> str:
    """`layers 0-3, 5` for ascending indices, `layer` for none."""
    return " ".join(filter(None, (f"layer{'s' if len(layers) > 1 else ''}", in_ranges(layers))))


def group_title(group: LayerGroup) -> str:
    """`layers 0-3, 5`, `draft layer 6`."""
    return f"{'draft ' if group.draft else ''}{layer_ranges(group.layers)}"


def machine_fields(environment: Environment) -> RenderableType:
    """A machine as labels and texts."""
    device = " ".join(filter(None, (environment.device_type, environment.arch)))
    name = environment.device_name if environment.device_name != environment.device_type else ""
    device = ", ".join(filter(None, (device, name, environment.thread_words)))
    return fields(
        {
            "machine": ", ".join(filter(None, (device, environment.driver, environment.source))),
            "packages": ", ".join(f"{module} {version}".strip() for module, version in environment.packages),
            "variables": ", ".join(f"{name}={value}" for name, value in environment.variables),
            "programs": ", ".join(f"{name} {path or 'not found'}" for name, path in environment.programs),
        }
    )


def machine_view(decision: Decision) -> RenderableType:
    """The machine that was decided for, and the plugins that could not take part."""
    failed = {
        f"plugin {plugin.name}": f"{plugin.status}: {plugin.error}" for plugin in decision.plugins if plugin.error
    }
    return Group(machine_fields(decision.environment), *([fields(failed)] if failed else []))


def plan_view(
    title: str,
    plan: MoEPlan,
    decision: Decision,
    spelled: Callable[[str], str],
    assumed: str = "",
) -> RenderableType:
    """One plan: of which layers, what was asked, each route, the weights, and what to know about it.

    Args:
        title: Of which layers.
        plan: The plan.
        decision: The one behind it, for what the rank went by.
        spelled: Puts notes into the words of the command line.
        assumed: What nobody asked for, but was taken; "" for nothing.
    """
    partial = "" if plan.output_is_complete else "a partial sum: reduce it over the ranks that hold the parts"
    rows = {
        "asked": request_line(plan.request),
        "assumed": assumed,
        **_route_rows(plan, decision),
        "weights": f"layout {plan.weight_layout}, prepared by plugin {plan.runner_plugin}",
        "output": partial,
        "notes": spelled("\n".join(plan.notes)),
    }
    heading = Text(f"\nplan of {title}", style="bold")
    return Group(heading, fields({f"  {label}": text for label, text in rows.items()}))


def _route_rows(plan: MoEPlan, decision: Decision) -> dict[str, str]:
    """A row for each route; routes of one phase are told apart by the token counts that they take."""
    phases = [route.phase for route in plan.routes]
    rows, ends = {}, dict.fromkeys(phases, 0)
    for route in plan.routes:
        label, first = route.phase, ends[route.phase] + 1
        if phases.count(route.phase) > 1:
            label += f" {first}-{route.max_tokens}" if route.max_tokens else f" {first}+"
        ends[route.phase] = route.max_tokens or 0
        rows[label] = _route_line(plan, route, decision)
    return rows


def request_line(request: LayerRequest) -> str:
    """A request in one line."""
    parts = [
        sizes_line(request),
        f"{request.dtype}, weights {request.quant.label}, {request.activation}",
        "biases" if request.bias else "",
        f"ep {request.ep_size}, {request.token_placement} tokens" if request.ep_size > 1 else "",
        f"tp {request.tp_size}" if request.tp_size > 1 else "",
        "deterministic" if request.deterministic else "",
    ]
    return ", ".join(filter(None, parts))


def sizes_line(request: LayerRequest) -> str:
    """`128 experts, top-8, H 2048, I 768`."""
    experts = counted(request.num_experts, "expert")
    return f"{experts}, top-{request.top_k}, H {request.hidden_size}, I {request.intermediate_size}"


def _route_line(plan: MoEPlan, route: Route, decision: Decision) -> str:
    asked = f", asked for {route.dtype_requested}" if route.dtype_requested else ""
    limit = f"up to {counted(route.max_tokens, 'token')}" if route.max_tokens else ""
    graph = "graph capture" if route.graph_capture else ""
    dtype = f"dispatch dtype {route.token_dtype} (by {route.dtype_rule}{asked})"
    chosen = f"chosen by {_chosen_by(plan, route, decision)}"
    return "\n".join((route.candidate.full_name, ", ".join(filter(None, (dtype, chosen, limit, graph)))))


def _chosen_by(plan: MoEPlan, route: Route, decision: Decision) -> str:
    """`rank (tier generic)`, `pin (runner torch), then prefer (none), then rank (measured times)`.

    A fallback has dropped pins, which are left out.
    """
    request = plan.request
    pins = (request.pins(workload) for workload in request.workloads if route.phase in (workload.phase, ANY))
    single = dict.fromkeys(pin for each in pins for pin in (Pins(a2a=each.a2a), Pins(runner=each.runner)))
    kept = [str(pin) for pin in single if pin != Pins() and not pin_reasons(route.candidate, pin)]
    by = _by_rank(route, decision) if route.selected_by == "rank" else [f"plugin {route.selected_by}"]
    return ", then ".join([f"pin ({', '.join(kept)})"] * bool(kept) + by)


def _by_rank(route: Route, decision: Decision) -> list[str]:
    """What of the order decided, and by what it set the route apart from the next: the user's preference goes first."""
    of_route = [
        workload
        for workload in decision.workloads
        if workload.ranked and workload.ranked[0].candidate == route.candidate
        if route.phase in (workload.workload.phase, ANY)
        if route.max_tokens is None or workload.min_tokens <= route.max_tokens
    ]
    if not of_route:
        return ["rank"]
    workload = of_route[-1]
    first, alike = workload.ranked[0], len(workload.not_told_apart)
    is_told = not alike or "not told apart" in first.because
    doubt = "" if is_told else f", not told apart from {counted(alike, 'other')}"
    # A range's time is of one of its token counts, which the explanation names.
    because = first.because.replace(first.provenance, "measured times") if first.is_by_time else first.because
    by = [f"prefer ({', '.join(first.preferred)})"] * bool(first.preferred)
    if workload.outranked_by or because != "prefer":
        by.append(f"rank ({workload.outranked_by or because}{doubt})")
    return by
