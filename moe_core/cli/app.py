"""The application: its commands, and how errors become exit codes.

Exit codes: 0 done, 1 it cannot be done here (no feasible combination, a failed plugin), 2 it was asked wrongly (usage,
unknown names, bad values, missing files), and those that shells give to signals: 130 an interrupt, 141 a closed pipe.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, TextIO

import typer
from typer.core import TyperCommand

from moe_core.cli import bench, doctor, list_backends, new_plugin, quantize, resolve, run, tune, verify
from moe_core.cli.command import Command
from moe_core.cli.eval import evaluate
from moe_core.cli.failures import failure
from moe_core.cli.option_words import in_options, options_of
from moe_core.cli.output import print_error
from moe_core.cli.stopping import INTERRUPTED, exit_with_reader
from moe_core.errors import MoeCoreError, SpecError, UnknownNameError, is_interrupt
from moe_core.planner import PlanWarning

CANNOT, ASKED_WRONGLY = 1, 2

app = typer.Typer(
    name="moe-core",
    help="Choose, explain and run the kernels of Mixture-of-Experts layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Typer's boxes cut long option names in a terminal of 80 columns.
    rich_markup_mode=None,
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "list-backends": list_backends.list_backends,
    "doctor": doctor.doctor,
    "resolve": resolve.resolve,
    "run": run.run,
    "eval": evaluate,
    "quantize": quantize.quantize,
    "tune": tune.tune,
    "bench": bench.bench,
    "verify": verify.verify,
    "new-plugin": new_plugin.new_plugin,
}
for _name, _function in _COMMANDS.items():
    app.command(_name, cls=Command)(_function)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moe-core {importlib.metadata.version('moe-core')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: What follows the program's name; default: `sys.argv`.

    Raises:
        SystemExit: Always; see the exit codes above.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Models write, and files are called, in letters that not every terminal has; errors are printed so, too.
        sys.stdout.reconfigure(errors="backslashreplace")
    with exit_with_reader(), warnings.catch_warnings():
        warnings.filterwarnings("always", category=DeprecationWarning, module=r"moe_core\.")
        # The notes of the printed plan say the same.
        warnings.filterwarnings("ignore", category=PlanWarning)
        warnings.showwarning = _show_warning
        try:
            _run(words, is_process=arguments is None)
        except MoeCoreError as error:
            message = "\n".join([str(error), *getattr(error, "__notes__", ())])
            _tell(error, in_options(message, _options(words)), words)
            sys.exit(ASKED_WRONGLY if isinstance(error, SpecError | UnknownNameError) else CANNOT)
        except BaseException as error:
            if is_interrupt(error):
                # One alone has become an exit already; this is a group that holds one.
                sys.exit(INTERRUPTED)
            message = failure(error)
            if not message:
                raise
            _tell(error, message, words)
            sys.exit(CANNOT)


def _run(words: list[str], *, is_process: bool) -> None:
    """The command; what it holds until it ends is held until the process ends, if that is all that there is to do."""
    with contextlib.ExitStack() as held:
        try:
            app(args=words, prog_name="moe-core", obj=held)
        finally:
            if is_process:
                held.pop_all()


def _tell(error: BaseException, message: str, words: list[str]) -> None:
    """The message on stderr, below the traceback where it was asked for."""
    if {"-v", "--verbose"} & set(words):
        sys.stderr.write("".join(traceback.format_exception(error)))
    print_error(message)


def _options(words: list[str]) -> dict[str, str]:
    """The options of the command that was typed."""
    command = typer.main.get_group(app).commands.get(words[0] if words else "")
    return options_of(command) if isinstance(command, TyperCommand) else {}


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print_error(str(message), label="warning")
