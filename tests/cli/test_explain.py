"""`moe-core resolve --explain`: what runs, why, what else fits, and why the rest does not."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import attrs
import pytest
from fakes import CUDA_DEEPGEMM, TORCH, VENDORS, dispatcher, manager_of, plugin, runner

from moe_core.environment import PRESETS
from moe_core.quant import NVFP4
from moe_core.specs import Limit, TokenDtype

ON_H100 = ("resolve", "--environment", "h100", "--no-measurements", "--explain")


def _words(text):
    return " ".join(re.sub("[│├└─]", " ", text).split())


@pytest.fixture
def only(monkeypatch):
    """Let the command see these plugins and no other."""

    def use(*specs):
        monkeypatch.setattr(import_module("moe_core.cli.resolve"), "default_manager", lambda: manager_of(*specs))

    return use


def _parts(out):
    """Heading -> what is below it."""
    blocks = [block.strip("\n").splitlines() for block in re.split(r"\n *\n", out)]
    return {block[0].strip(): block[1:] for block in blocks}


def test_what_runs_comes_first_and_all_fits_a_screen_or_two(call, only, monkeypatch):
    only(*VENDORS)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call(*ON_H100)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 70
    *headings, last = list(_parts(out))[1:]
    assert headings == [
        "plan of layer",
        "why for layer",
        "workload any: what fits, in order (dispatch dtype bf16 by runner)",
        "near misses: each spec alone",
        "for other layers",
        "for other devices",
    ]
    assert last == "every reason: --explain -v; those against one backend: pin it"


@pytest.mark.parametrize(("size", "is_noted"), [(96, False), (100, True), (128, False)])
def test_what_stands_in_is_said_once_with_the_plan(call, only, size, is_noted):
    whole = (Limit("intermediate_size", "multiple_of", 32),)
    tiled = runner("acme", "tiled", weight_layout="acme_tiled", limits=whole, tier="tuned")
    plain = runner("acme", "plain", weight_layout="acme_plain", stands_in_for="acme.tiled")
    only(plugin("acme", dispatchers=[dispatcher("none")], runners=[tiled, plain]))
    words = ("resolve", "--environment", "cpu", "--no-measurements", "--intermediate-size", str(size))
    note = "acme:acme.plain stands in for acme.tiled: needs intermediate_size multiple_of 32, found intermediate_size"
    for more in ((), ("--strict",), ("--explain",), ("--explain", "-v")):
        code, out, err = call(*words, *more)
        assert (code, err) == (0, "")
        assert _words(out).count(f"notes {note} {size}") == is_noted
        assert out.count("stands in for") == is_noted
    code, out, _ = call(*words, "--json")
    assert code == 0
    (group,) = json.loads(out)["groups"]
    assert group["plan"]["notes"] == group["decision"]["workloads"][0]["notes"] == [f"{note} {size}"] * is_noted
    # A plan that another workload prevents.
    limited = attrs.evolve(plain, phases=("decode",))
    only(plugin("acme", dispatchers=[dispatcher("none")], runners=[tiled, limited]))
    code, out, _ = call(*words, "--workload", "decode", "--workload", "prefill", "--explain")
    assert code == is_noted
    assert ("stands in for" in out) == is_noted


def test_the_page_shows_what_is_printed(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = (Path(__file__).parents[2] / "docs" / "another_machine.md").read_text(encoding="utf-8")
    ((command, shown),) = re.findall(r"`moe-core ([^`]+)` prints:\n\n```text\n(.*?)```", page, flags=re.DOTALL)
    _, out, _ = call(*command.split())
    # Not the number of variants, which grows.
    printed, shown = (re.sub(r" +\n", "\n", re.sub(r"\d+", "N", text)).strip() for text in (out, shown))
    assert printed == shown


def test_both_stages_are_counted_and_reasons_are_folded(call, only):
    only(*VENDORS)
    parts = _parts(call(*ON_H100)[1])
    why = _words(" ".join(parts["why for layer"]))
    assert "any first of 7 that fit: tie broken by name; nothing that was declared or measured tells it from" in why
    assert "by times 9 of 21 specs fit alone; of their pairs 7 of 7 (13 more" in why
    assert _words(" ".join(parts["for other devices"])) == (
        "ascend_npu: 7 variants need npu, found cuda flashinfer_cutedsl: 2 variants need sm100 or sm103, found sm90"
    )


def test_every_reason_is_there_if_asked_for(call, only):
    only(*VENDORS)
    out = _words(call(*ON_H100, "-v")[1])
    assert (
        "each spec alone no ascend_npu:deepep.low_latency package: needs torch_npu >= 2.7, found not installed" in out
    )
    assert "yes torch:none.standard + torch:torch.standard" in out
    assert "-v;" not in out


@pytest.mark.parametrize("columns", [72, 80, 120])
def test_no_name_is_broken(call, only, monkeypatch, columns):
    only(*VENDORS)
    code, out, _ = call(*ON_H100)
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in (ON_H100, (*ON_H100, "-v"), (*ON_H100, "--prefer", "torch")):
        code, out, _ = call(*command)
        assert code == 0
        assert max(map(len, out.splitlines())) <= columns
        words = set(_words(out).split())
        assert {"torch:torch.standard", "cuda_deepgemm:deep_gemm.contiguous_bf16", "torch:none.contiguous"} <= words


def test_a_pin_that_decided_is_said(call, only):
    only(*VENDORS)
    out = _words(call(*ON_H100, "--runner-backend", "torch")[1])
    assert "chosen by pin (runner torch), then rank" in out
    assert "any pinned: runner torch; first of 4 that fit: no permutation on one rank" in out
    assert "3 more pairs" not in out.partition("near misses: pairs")[0]
    assert "and 2 more pairs pin: needs runner backend torch, found others" in out


def test_why_not_is_told_in_full_for_what_is_pinned(call, only):
    only(*VENDORS)
    code, out, err = call(*ON_H100, "--runner-backend", "ascend_npu:fuseep.mode1")
    assert code == 1
    named = _words(out).partition("what you named: each spec alone ")[2]
    assert named.startswith(
        "ascend_npu:fuseep.mode1 device: needs npu, found cuda arch: needs a3, found sm90 package: needs torch_npu"
    )
    assert "scheme: needs w8a8_int8, found bf16" in named.partition("near misses")[0]
    assert len(err.splitlines()) <= 25


NVFP4_TO_READ = (TokenDtype("nvfp4", "block_16"), TokenDtype("bf16"))
TWO_READERS = plugin(
    "two",
    dispatchers=[dispatcher()],
    runners=[runner(name, reads=NVFP4_TO_READ, schemes=(NVFP4,)) for name in ("x", "y")],
)
SPLIT = plugin(
    "split",
    dispatchers=[dispatcher()],
    runners=[
        runner("fast", weight_layout="one", tier="tuned", phases=("decode",)),
        runner("slow", weight_layout="two"),
        *(runner("other", f"k{index}", weight_layout="three", tier="reference", phases=("decode",)) for index in "123"),
    ],
)


def test_a_layout_that_decided_is_named_and_not_every_loser(call, only):
    only(SPLIT)
    _, out, _ = call(*ON_H100, "--workload", "decode:8", "--workload", "prefill")
    words = _words(out)
    assert "decode weight-layout: two serves all workloads " in words
    assert "not used: split:toy.standard + split:fast.standard, first by rank, and 3 more" in words
    assert "other.k1" not in words.partition("near misses")[0]
    _, out, _ = call(*ON_H100, "--workload", "decode:8", "--workload", "prefill", "-v")
    assert "fit, but lack what all workloads share: split:toy.standard + split:fast.standard, " in _words(out)
    assert _words(out).count("split:toy.standard + split:other.k1") == 2


def test_what_fits_one_workload_is_listed_or_counted(call, only):
    only(SPLIT)
    out = call(*ON_H100, "--workload", "decode:8")[1]
    assert "decode first of 5 that fit: tier tuned" in _words(out)
    rows = _parts(out)["workload decode: what fits, in order (dispatch dtype bf16 by runner)"]
    assert [row.split()[0] for row in rows[1:2]] == ["1"]
    assert _words(" ".join(rows[2:])) == "and 4 more fit, but with other weight layouts than one, which the first has"
    assert "all workloads" not in out
    assert "notes" not in out
    out = _words(call(*ON_H100, "--workload", "decode:8", "-v")[1])
    assert "than one, which the first has: split:toy.standard + split:slow.standard, " in out
    assert "all workloads" not in out


def test_a_deterministic_layer_says_why_others_are_not_used(call, only):
    only(TORCH)
    out = _words(call(*ON_H100, "--deterministic")[1])
    count = int(re.search(r"first of (\d+) that fit", out)[1])
    assert f"and {count - 1} more fit, but a deterministic layer keeps the first combination" in out


def test_why_a_dtype_is_impossible_is_said_once_for_all(call, only):
    only(TWO_READERS)
    parts = _parts(call(*ON_H100, "--quant-scheme", "nvfp4")[1])
    assert "workload any: what fits, in order (dispatch dtype bf16 by runner)" in parts
    (note,) = (heading for heading in parts if heading.startswith("dispatch dtype"))
    assert note.startswith("dispatch dtype  1, 2: nvfp4 (preferred by input-global-scale) is not possible:")


def test_workloads_of_which_the_same_is_to_say_are_told_together(call, only):
    only(TORCH)
    _, out, _ = call(*ON_H100, "--workload", "decode:8", "--workload", "prefill")
    assert "workload decode; prefill: what fits, in order (dispatch dtype bf16 by runner)" in _parts(out)
    assert "decode; prefill first of 3 that fit" in _words(out)


def test_many_alternatives_are_counted(call, only):
    many = [runner("many", f"k{index:02}") for index in range(14)]
    only(plugin("toy", dispatchers=[dispatcher()], runners=many))
    _, out, _ = call(*ON_H100)
    assert "and 4 more" in out
    assert "many.k10" not in out
    assert "many.k13" in call(*ON_H100, "-v")[1]


def test_times_stand_in_the_table_and_where_they_come_from_above_it(call):
    code, out, _ = call("resolve", "--environment", "h100", "--explain")
    assert code == 0
    parts = _parts(out)
    table = next(lines for heading, lines in parts.items() if heading.startswith("workload any"))
    measured = re.search(r"measured \d+ us", table[1])
    assert measured
    assert "exact" not in " ".join(table)
    assert f"{measured[0]} (exact, T=8192; shipped h100" in _words(" ".join(parts["why for layer"]))


@pytest.mark.error_path
@pytest.mark.parametrize(
    "pin", [("--dispatch-dtype", "mxfp8"), ("--runner-backend", "flashinfer_cutedsl"), ("--bias",)]
)
@pytest.mark.parametrize("machine", ["h100", "cpu", "ascend-a3"])
def test_a_refusal_is_short_and_says_how_to_have_more(call, only, pin, machine):
    only(*(spec for spec in VENDORS if spec is not TORCH))
    code, out, err = call("resolve", "--environment", machine, *pin)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) <= 25
    assert err.endswith("  every reason: --explain -v\n")


@pytest.mark.error_path
@pytest.mark.parametrize("phases", [(), ("--workload", "decode:8", "--workload", "prefill", "--workload", "verify:9")])
def test_a_refusal_stays_short_with_very_many_variants(call, only, phases):
    runners = [runner("many", f"k{index}", limits=(Limit("ep_size", ">=", 2 + index),)) for index in range(40)]
    only(plugin("toy", dispatchers=[dispatcher()], runners=runners))
    _, out, err = call("resolve", "--environment", "cpu", "--runner-backend", "many", *phases)
    assert out == ""
    assert len(err.splitlines()) <= 25
    assert re.search(r"and \d+ more lines", err)


@pytest.mark.error_path
def test_workloads_with_the_same_reasons_are_refused_together(call, only):
    only(plugin("toy", dispatchers=[dispatcher()], runners=[runner("small", limits=(Limit("ep_size", ">=", 2),))]))
    _, _, err = call("resolve", "--environment", "cpu", "--workload", "decode:8", "--workload", "prefill")
    assert "  workload decode, prefill, no pins:\n    toy:small.standard: limit: needs ep_size >= 2" in err


@pytest.mark.error_path
def test_a_refusal_begins_with_what_the_pin_prevents(call, only):
    only(TORCH, CUDA_DEEPGEMM)
    _, _, err = call("resolve", "--environment", "h100", "--dispatch-dtype", "mxfp8")
    first = err.splitlines()[3].strip()
    assert re.match(r"\S+ \+ \S+ and \d+ more pairs: dispatch-dtype: needs pinned mxfp8, found only bf16", first)
    assert err.count("pinned mxfp8") == 1


@pytest.mark.error_path
def test_a_missing_package_is_said_once(call, only, monkeypatch):
    without = attrs.evolve(PRESETS["h100"], packages={"torch": "2.11.0"})
    monkeypatch.setattr(import_module("moe_core.cli.resolve"), "load_environment", lambda name: without)
    only(TORCH, CUDA_DEEPGEMM)
    _, out, _ = call(*ON_H100)
    assert out.count("deep_gemm >= 2.4, found not installed") == 1
    assert "cuda_deepgemm:deep_gemm.contiguous_bf16, .masked_bf16 package: needs deep_gemm >= 2.4" in _words(out)


def test_a_preference_is_not_shown_as_a_rank(call):
    on_h100 = ("resolve", "--environment", "h100", "--explain", "--prefer")
    _, out, _ = call(*on_h100, "torch")
    assert "chosen by prefer (torch), then rank (measured times)" in _words(out)
    assert re.search(r"any preferred: torch, as are 3 of \d+ that fit; first of these: measured \d+ us", _words(out))
    _, out, _ = call(*on_h100, "triton.fused")
    assert "chosen by prefer (triton.fused) weights" in _words(out)
    _, out, _ = call("resolve", "--environment", "cpu", "--runner-backend", "torch", "--prefer", "torch.masked")
    assert "chosen by pin (runner torch), then prefer (torch.masked) weights" in _words(out)
    _, out, _ = call("resolve", "--environment", "cpu", "--prefer", "triton", "--explain")
    assert "chosen by rank (tier generic)" in _words(out)
