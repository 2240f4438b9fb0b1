"""The command line as a whole: imports, help, exit codes of usage errors."""

from __future__ import annotations

import json

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
