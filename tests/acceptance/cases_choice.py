"""Acceptance cases from public bug reports: plugins, and the choice of what runs."""

from __future__ import annotations

from typing import Any

from case_lib import T_, Lib, case


@case(
    "MC-181",
    "plugin failures",
    "A plugin that raises while it declares is not half there",
    ["simonw/llm#1351 p 2026-02-07", "simonw/llm#1465 p 2026-05-31"],
    "One plugin's exception while registering stopped the host, or left an entry that failed again at each use.",
    "It is listed before it is asked, and nothing is rolled back.",
    "registering it raises with its words; the name is free; a good plugin takes it, and then loading goes on.",
)
def raises_while_declaring(library: Lib, comparisons: T_) -> None:
    registry = library.registry()
    comparisons.raises(
        "raises", lambda: registry.register("case_x", library.make_plugin("raises")), "broken on purpose"
    )
    comparisons.same("not listed", "case_x" not in registry.names(), registry.names())
    registry.register("case_x", library.make_plugin("good"))
    comparisons.same("the name is free", "case_x" in registry.names())


@case(
    "MC-182",
    "plugin failures",
    "A plugin without the required hook is refused when it is registered",
    ["vllm-project/vllm-ascend#253 i ~2025-03-06"],
    "What a plugin lacked became None and failed in the first forward.",
    "Objects are taken as they come.",
    "registering it is an error that says what is missing; loading goes on with the others and keeps the reason.",
)
def lacks_the_hook(library: Lib, comparisons: T_) -> None:
    registry = library.registry()
    comparisons.raises("registered", lambda: registry.register("case_x", library.make_plugin("lacks")), "missing")
    kinds = {"case_a": "raises", "case_b": "lacks", "case_c": "good"}
    makers = [(name, lambda kind=kind: library.make_plugin(kind)) for name, kind in kinds.items()]
    registry.load(makers)
    comparisons.same("the good one is there", list(registry.names()) == ["case_c"], registry.names())
    told = {name: text for name, text in registry.failures()}
    named = "broken on purpose" in told.get("case_a", "") and "missing" in told.get("case_b", "")
    comparisons.same("both reasons are kept", named, told)


@case(
    "MC-183",
    "plugin names",
    "Taking away what is not there is an error that names it",
    ["pytest-dev/pluggy#379 p 2023-03-24"],
    "A bare assertion, or nothing, for a name that was misspelt.",
    "Look-ups that fail are not told from those that find nothing to do.",
    "unregistering an unknown name raises and names it; names that are there stay.",
)
def unknown_names(library: Lib, comparisons: T_) -> None:
    registry = library.registry()
    registry.register("case_x", library.make_plugin("good"))
    comparisons.raises("unknown", lambda: registry.unregister("case_y"), "case_y")
    comparisons.same("the other stays", "case_x" in registry.names())


@case(
    "MC-184",
    "pins",
    "A runner that was asked for runs, or there is an error",
    [
        "NVIDIA/TensorRT-LLM#19003 p 2026-09-10",
        "NVIDIA/TensorRT-LLM#15861 p 2026-07-02",
        "lightseekorg/tokenspeed#374 p 2026-06-09",
    ],
    "A request was turned down on all 92 layers and another backend ran; a warning a layer was the only trace.",
    "The request is the first entry of a list that goes on.",
    "each restricted runner on a CPU and on sm_75: an error that names it and the device; the portable one runs.",
)
def pins(library: Lib, comparisons: T_) -> None:
    devices: list[dict[str, Any]] = [{"type": "cpu"}, {"type": "cuda", "sm": 75}]
    for runner in library.restricted_runners:
        for device in devices:
            found = str(device.get("sm", device["type"]))
            ask = lambda runner=runner, device=device: library.select("fp8_block", device, runner=runner)  # noqa: E731
            comparisons.raises(f"{runner} on {found}", ask, runner, found)
    chosen = library.select("fp8_block", devices[0], runner=library.reference_runner)
    comparisons.same("the portable one", chosen[1] == library.reference_runner, chosen)


@case(
    "MC-185",
    "combinations",
    "What was not known is told with what is",
    ["vllm-project/vllm#45661 i ~2026-06"],
    "'No backend' and nothing else, for a word with one letter wrong.",
    "The names are looked up in a table that the message does not have.",
    "an unknown a2a, runner and expert-parallel size 0: errors that name them.",
)
def words_that_are_not_known(library: Lib, comparisons: T_) -> None:
    device = {"type": "cpu"}
    comparisons.raises("a2a", lambda: library.select("none", device, a2a="depep"), "depep", "none")
    runner = library.reference_runner
    comparisons.raises("runner", lambda: library.select("none", device, runner=runner + "x"), runner + "x", runner)
    comparisons.raises("ep 0", lambda: library.local_experts(4, 0), "ep")
