"""How plans and decisions look on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from moe_core.cli.output import fields, table, verdict
from moe_core.decision import Decision, Ranked, Reason, WorkloadDecision
from moe_core.environment import Environment
from moe_core.model_config import LayerGroup
from moe_core.plan import MoEPlan, Route
from moe_core.request import LayerRequest


def layer_ranges(layers: Sequence[int]) -> str:
    """`layers 0-3, 5` for ascending indices, `layer` for none."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return " ".join(filter(None, (f"layer{'s' if len(layers) > 1 else ''}", ", ".join(words))))


def group_title(group: LayerGroup) -> str:
    """`layers 0-3, 5`, `draft layer 6`."""
    return f"{'draft ' if group.draft else ''}{layer_ranges(group.layers)}"


def machine_fields(environment: Environment) -> Table:
    """A machine as labels and texts."""
    device = " ".join(filter(None, (environment.device_type, environment.arch)))
    name = environment.device_name if environment.device_name != environment.device_type else ""
    return fields(
        {
            "machine": ", ".join(filter(None, (device, name, environment.driver, environment.source))),
            "packages": ", ".join(f"{module} {version}".strip() for module, version in environment.packages),
        }
    )


def machine_view(decision: Decision) -> RenderableType:
    """The machine that was decided for, and the plugins that could not take part."""
    failed = {
        f"plugin {plugin.name}": f"{plugin.status}: {plugin.error}" for plugin in decision.plugins if plugin.error
    }
    return Group(machine_fields(decision.environment), *([fields(failed)] if failed else []))


def plan_view(title: str, plan: MoEPlan) -> RenderableType:
    """One plan: of which layers, what was asked, each route, the weights, and what to know about it."""
    partial = "" if plan.output_is_complete else "a partial sum: reduce it over the ranks that hold the parts"
    rows = {
        "asked": request_line(plan.request),
        **_route_rows(plan),
        "weights": f"layout {plan.weight_layout}, prepared by plugin {plan.runner_plugin}",
        "output": partial,
        "notes": "\n".join(plan.notes),
    }
    heading = Text(f"\nplan of {title}", style="bold")
    return Group(heading, fields({f"  {label}": text for label, text in rows.items()}))


def _route_rows(plan: MoEPlan) -> dict[str, str]:
    """A row for each route; routes of one phase are told apart by the token counts that they take."""
    phases = [route.phase for route in plan.routes]
    rows, ends = {}, dict.fromkeys(phases, 0)
    for route in plan.routes:
        label, first = route.phase, ends[route.phase] + 1
        if phases.count(route.phase) > 1:
            label += f" {first}-{route.max_tokens}" if route.max_tokens else f" {first}+"
        ends[route.phase] = route.max_tokens or 0
        rows[label] = _route_line(route)
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
    return f"{request.num_experts} experts, top-{request.top_k}, H {request.hidden_size}, I {request.intermediate_size}"


def _route_line(route: Route) -> str:
    asked = f", asked for {route.dtype_requested}" if route.dtype_requested else ""
    limit = f"up to {route.max_tokens} tokens" if route.max_tokens else ""
    graph = "graph capture" if route.graph_capture else ""
    dtype = f"dispatch dtype {route.token_dtype} (by {route.dtype_rule}{asked})"
    chosen = f"chosen by {route.selected_by}"
    return "\n".join((route.candidate.full_name, ", ".join(filter(None, (dtype, chosen, limit, graph)))))


def decision_view(group: LayerGroup, decision: Decision, spelled: Callable[[str], str]) -> RenderableType:
    """Everything that was considered for one group of layers: both stages and the ranking of every workload.

    Args:
        group: The layers.
        decision: About them.
        spelled: Puts a reason into the words of the command line.
    """
    heading = Text(f"\n{group_title(group)}: {request_line(decision.request)}", style="bold")
    sections = decision.sections()
    views = [view for workload, is_new in sections for view in _workload_views(workload, is_new, spelled)]
    return Group(heading, fields({"measurements": "\n".join(decision.measurements)}), *views)


def _workload_views(
    decision: WorkloadDecision, is_new: bool, spelled: Callable[[str], str]
) -> Iterable[RenderableType]:
    title = f"workload {decision.title}"
    if is_new:
        specs = ((spec.declared.full_name, spec.reasons) for spec in decision.specs)
        yield _verdicts(f"\n{title}: 1. each spec alone", specs, spelled)
        pairs = ((pair.candidate.full_name, pair.reasons) for pair in decision.joined)
        yield _verdicts(f"\n{title}: 2. pairs of those that passed", pairs, spelled)
        if decision.num_unjoined:
            yield Text(f"and {decision.num_unjoined} more whose formats differ", style="dim")
    yield _ranking(f"\n{title}: 3. order of those that fit", decision.ranked)
    yield fields({"note": "\n".join(decision.notes)})


def _verdicts(title: str, rows: Iterable[tuple[str, tuple[Reason, ...]]], spelled: Callable[[str], str]) -> Tree:
    tree = Tree(Text(title, style="bold"), guide_style="dim")
    for name, reasons in rows:
        branch = tree.add(Text.assemble(verdict("no" if reasons else "yes"), "  " if not reasons else "   ", name))
        for reason in reasons:
            branch.add(Text(spelled(str(reason))))
    if not tree.children:
        tree.add(Text("none"))
    return tree


def _ranking(title: str, ranked: Sequence[Ranked]) -> RenderableType:
    if not ranked:
        return Text(f"{title}\nnone")
    rows = table("", "COMBINATION", "FIRST BECAUSE", "DISPATCH DTYPE", title=title)
    for place, entry in enumerate(ranked, start=1):
        dtype = entry.dtype
        asked = f", asked for {dtype.requested}" if dtype.requested else ""
        text = "\n".join((f"{dtype.token_dtype} by {dtype.rule}{asked}", *dtype.notes))
        rows.add_row(str(place), entry.candidate.full_name, entry.because, text)
    return rows
