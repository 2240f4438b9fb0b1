"""The command line as a whole: imports, help, exit codes of usage errors."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import typer

from moe_core.cli.app import app

pytestmark = pytest.mark.error_path

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "code",
    [
        "import moe_core.cli",
        "from moe_core.cli import main\ntry: main(['list-backends', '--no-probe', '--json'])\nexcept SystemExit: pass",
    ],
    ids=["import", "list-backends --no-probe"],
)
def test_torch_is_not_imported(python, code):
    result = python(
        f"{code}\nimport sys; sys.stderr.write(str([n for n in ('torch', 'transformers') if n in sys.modules]))"
    )
    assert result.returncode == 0
    assert result.stderr == "[]"


def test_commands():
    assert sorted(COMMANDS) == [
        "bench",
        "doctor",
        "eval",
        "list-backends",
        "new-plugin",
        "quantize",
        "resolve",
        "run",
        "tune",
        "verify",
    ]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (name, option)
        for name, command in COMMANDS.items()
        for option in command.params
        if option.param_type_name == "option"
    ],
    ids=lambda value: value if isinstance(value, str) else value.opts[0],
)
def test_every_option_is_documented(command, option):
    assert option.help
    assert option.help.endswith(".")
    assert COMMANDS[command].help


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_is_plain_text_of_80_columns(moe_core, command):
    result = moe_core(command, "--help")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    options = [name for p in COMMANDS[command].params if p.param_type_name == "option" for name in p.opts]
    assert all(name in result.stdout for name in options)


def test_defaults_of_sizes_are_in_the_help(call):
    code, out, _ = call("resolve", "--help")
    assert code == 0
    assert all(f"[default: ({size})]" in " ".join(out.split()) for size in (128, 8, 2048, 768, "silu"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rezolve"], "rezolve"),
        (["resolve", "--num-experts", "many"], "--num-experts"),
        (["resolve", "--quant-scheme", "fp8_blok128"], "did you mean 'fp8_block128'"),
        (["resolve", "--dtype", "bf61"], "did you mean 'bf16'"),
        (["resolve", "--dtype", "float16"], "did you mean 'fp16'"),
        (["eval", "--model", ".", "--text", ".", "--dtype", "bfloat16"], "did you mean 'bf16'"),
        (["bench", "--read", "x", "--top-k", "2", "--memory"], "--top-k, --memory cannot be combined"),
        (["resolve", "--dispatch-dtype", "fp9"], "unknown dispatch dtype 'fp9'"),
        (["resolve", "--activation", "gelutanh"], "did you mean 'gelu_tanh'"),
        (["resolve", "--token-placement", "replicate"], "did you mean 'replicated'"),
        (["resolve", "--workload", "prefil"], "did you mean 'prefill'"),
        (["resolve", "--workload", "prefill:many"], "phase[:max_tokens][:graph]"),
        (["resolve", "--environment", "h10"], "did you mean 'h100'"),
        (["resolve", "--environment", "cpu", "--runner-backend", "torhc"], "did you mean 'torch'"),
        (["resolve", "--environment", "cpu", "--a2a-backend", "torch_altoall"], "did you mean 'torch_alltoall'"),
        (["resolve", "--environment", "cpu", "--exclude", "nobody"], "unknown backend 'nobody'"),
        (["resolve", "--environment", "cpu", "--top-k", "200"], "--top-k 200 exceeds --num-experts 128"),
        (["resolve", "--model", "/does/not/exist"], "no model at /does/not/exist"),
        (["resolve", "--model", ".", "--num-experts", "4"], "--num-experts cannot be combined with --model"),
        (["run", "--model", "/does/not/exist", "--prompt", "a"], "no model at /does/not/exist"),
        (["run", "--model", "."], "--prompt"),
        (["run", "--model", ".", "--prompt", "a", "--device", "cudda"], "did you mean 'cuda'"),
        (["run", "--model", ".", "--prompt", "a", "--device", "meta"], "unknown device type 'meta'"),
        (["verify", "torch", "--device", "meta"], "unknown device type 'meta'"),
        (["resolve", "--environment", ""], "unknown environment ''"),
        (["bench", "--combination", "", "--peer", "none"], "combination '': expected a runner"),
    ],
)
def test_asked_wrongly(call, words, message):
    code, out, err = call(*words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


def test_verbose_shows_the_traceback(call):
    code, _, err = call("resolve", "--environment", "h10", "-v")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: unknown environment 'h10'")


@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT], ids=["stdout", "both"])
@pytest.mark.parametrize(
    "words",
    [
        ("resolve", "--environment", "h100", "--explain"),
        ("resolve", "--environment", "h100", "--json"),
        ("resolve", "--help"),
        ("--version",),
    ],
    ids=" ".join,
)
def test_a_closed_pipe_ends_a_command_quietly_as_sigpipe_does(words, stderr):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run([sys.executable, "-m", "moe_core", *words], stdout=writing, stderr=stderr, check=False)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr or b"") == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [("resolve", "--environment", "h100"), ("list-backends", "--no-probe", "--json")])
def test_a_full_disk_is_told_in_a_line(words):
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "moe_core", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (
        1,
        "error: the output cannot be written: no space is left on its device\n",
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_an_output_lacks_are_escaped(moe_core, tmp_path, encoding):
    file = tmp_path / "\u00e9\u2192.json"
    file.write_text('{"device_type": "cpu", "packages": {"torch": "2.13.0"}}', encoding="utf-8")
    words = ("resolve", "--environment", str(file))
    printed = moe_core(*words, "--json", PYTHONIOENCODING=f"{encoding}:strict", PYTHONUTF8="1")
    assert printed.returncode == 0, printed.stderr
    (group,) = json.loads(printed.stdout)["groups"]
    assert group["decision"]["environment"]["source"] == str(file)
    told = moe_core(*words, PYTHONIOENCODING=f"{encoding}:strict", PYTHONUTF8="1", COLUMNS="400")
    assert told.returncode == 0, told.stderr
    written = file.name.encode(encoding, errors="backslashreplace")
    assert written.decode("utf-8", errors="replace") in told.stdout


def test_an_error_that_nobody_reads_is_a_closed_pipe(moe_core):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        words = ("resolve", "--environment", "h10")
        ended = subprocess.run([sys.executable, "-m", "moe_core", *words], stdout=writing, stderr=writing, check=False)
    finally:
        os.close(writing)
    assert ended.returncode == 141


@pytest.mark.skipif(os.name != "posix", reason="needs a shell that closes a file")
@pytest.mark.parametrize("words", ["--version", "resolve --environment h100", "resolve --environment h100 --json"])
def test_a_command_without_an_output_ends_as_one_with(words):
    line = f'exec "$0" -m moe_core {words} >&-'
    ended = subprocess.run(["sh", "-c", line, sys.executable], stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_version(moe_core):
    assert moe_core("--version").stdout.startswith("moe-core ")


def test_json_is_the_only_output_on_stdout(moe_core):
    result = moe_core("resolve", "--environment", "cpu", "--json", SGLANG_DEEPEP_BF16_DISPATCH="1")
    assert json.loads(result.stdout)["schema"] == 1
    assert result.stderr.startswith("warning: environment variable SGLANG_DEEPEP_BF16_DISPATCH is deprecated")


#: Options that mean something else in each command, or may be repeated in some, and say so.
OF_THE_COMMAND = {
    "--dtype",
    "--exclude",
    "--model",
    "--output",
    "--quant-scheme",
    "--seconds",
    "--strict",
    "--text",
    "--verbose",
    "--window",
}


def test_options_of_several_commands_say_the_same_in_all_of_them():
    said = {}
    for command in COMMANDS.values():
        for option in command.params:
            if option.opts[0].startswith("--") and option.opts[0] not in OF_THE_COMMAND:
                said.setdefault(option.opts[0], set()).add((option.help, option.metavar))
    assert {name for name, texts in said.items() if len(texts) > 1} == set()


def _options(command):
    return [option for option in command.params if option.param_type_name == "option"]


def test_commands_say_in_one_line_what_they_do(moe_core):
    listed = moe_core("--help", COLUMNS="80").stdout
    assert "..." not in listed.partition("Commands:")[2]


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(sorted(COMMANDS), 2)])
def test_options_of_two_commands_stand_in_one_order(one, other):
    first, second = ([option.opts[0] for option in _options(COMMANDS[name])] for name in (one, other))
    assert [name for name in first if name in second] == [name for name in second if name in first]


def test_what_an_option_takes_is_a_word_in_capitals():
    taken = {option.metavar for command in COMMANDS.values() for option in _options(command) if not option.is_flag}
    assert None not in taken
    assert all(word.replace(":graph", "") == word.replace(":graph", "").upper() for word in taken)


def test_no_option_takes_a_word_that_is_its_own_name():
    # typer 0.27 makes an argument of it, and knows no such option.
    options = [option for command in COMMANDS.values() for option in _options(command) if not option.is_flag]
    assert [option.name for option in options if option.metavar.lower() == option.name] == []


def test_a_model_is_always_named_by_the_same_option():
    positional = {
        name: [param.name for param in command.params if param.param_type_name == "argument"]
        for name, command in COMMANDS.items()
    }
    assert {name: names for name, names in positional.items() if names} == {
        "verify": ["backends"],
        "new-plugin": ["name"],
    }
    of_models = {name for name, command in COMMANDS.items() if "model" in {param.name for param in command.params}}
    assert of_models == {"bench", "eval", "quantize", "resolve", "run", "tune"}


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--prompt", "a", "--model", "{model}", "--text", "{pipe}"),
        ("eval", "--model", "{model}", "--text", "{pipe}"),
        ("quantize", "--model", "{model}", "--output", "{new}", "--scheme", "nvfp4", "--calibrate", "{pipe}"),
        ("quantize", "--model", "{model}", "--output", "{pipe}", "--scheme", "fp8_block128"),
        ("resolve", "--model", "{pipe}"),
        ("resolve", "--environment", "{pipe}"),
        ("resolve", "--measurements", "{pipe}"),
        ("bench", "--read", "{pipe}"),
        ("bench", "--output", "{pipe}"),
        ("bench", "--plot", "{pipe}"),
        ("tune", "--output", "{pipe}"),
        ("verify", "--junit", "{pipe}"),
    ],
    ids=" ".join,
)
def test_a_pipe_is_refused_and_not_waited_for(call, tmp_path, words):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    paths = {name: str(tmp_path / name) for name in ("model", "pipe", "new")}
    code, out, err = call(*(word.format(**paths) for word in words))
    assert (code, out) == (2, "")
    assert paths["pipe"] in err
    assert "regular file" in err or "not an empty folder" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resolve", "--top-k", "abc"), "'--top-k': .*'abc'"),
        (("resolve", "--top-k=1e3"), "'--top-k': .*'1e3'"),
        (("bench", "--tokens", "7", "--tokens=0"), "'--tokens': .*'7', '0'\n"),
        (("tune", "--minutes", "nan"), "'--minutes': .*'nan'"),
        (("verify", "-j", "-1"), "'--jobs' / '-j': .*'-1'"),
        (("resolve", "--top-k"), "requires an argument"),
        (("run", "--model", "x"), "Missing option '--prompt'.\n"),
        # Nothing was typed.
        (("run",), "Missing option '--model'.\n"),
        (("new-plugin",), "Missing argument 'NAME'.\n"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_a_value_that_is_refused_is_repeated(call, words, message):
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert re.search(message, err)
