"""Options that several commands share, and how words, folders and files that they are given are checked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from moe_core.cli.document import alone_if
from moe_core.cli.output import print_error
from moe_core.described import OF_PLUGINS, check_described, doubts, unasked
from moe_core.environment import PRESETS, Environment
from moe_core.errors import SpecError, UnknownNameError
from moe_core.manager import BackendManager, default_manager
from moe_core.measurements import MeasurementTable
from moe_core.model_config import read_config
from moe_core.planner import decide
from moe_core.regular_file import read_regular
from moe_core.request import LayerRequest
from moe_core.vocabulary import FLOAT_DTYPES


def known_word(kind: str, word: str, words: Iterable[str], hint: str = "") -> str:
    """`word` if it is one of `words`; raises `UnknownNameError` with did-you-mean and the hint otherwise."""
    known = tuple(words)
    if word not in known:
        raise UnknownNameError(kind, word, known, hint)
    return word


#: Rows are numbered in int32.
LARGEST_COUNT = 2**31 - 1


def _known_device(word: str | None) -> str | None:
    if word is None:
        return None
    # `meta` computes nothing.
    known = (device for device in default_manager().device_types() if device != "meta")
    return known_word("device type", word, known, f"Others {OF_PLUGINS}.")


#: A model that runs or is written again; what only looks at layers takes `Model` of `layer_options`.
ModelFolder = Annotated[Path, typer.Option("--model", metavar="DIR", help="Folder of a Hugging Face MoE model.")]
TextWindow = Annotated[int, typer.Option(min=2, metavar="N", help="Tokens per window of that text.")]
ComputedDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help=f"Dtype of unquantized weights and of tokens: {', '.join(FLOAT_DTYPES)}.",
        show_default="the checkpoint's",
    ),
]
A2aBackend = Annotated[
    str | None,
    typer.Option("--a2a-backend", metavar="NAME", help="Pin the dispatcher: a name from list-backends."),
]
RunnerBackend = Annotated[
    str | None, typer.Option("--runner-backend", metavar="NAME", help="Pin the runner: a name from list-backends.")
]
Device = Annotated[
    str | None,
    typer.Option(
        callback=_known_device,
        metavar="TYPE",
        help="Device type, for example cpu or cuda.",
        show_default="the accelerator, else cpu",
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--environment",
        metavar="NAME|FILE",
        help=f"Decide for this machine: {', '.join(PRESETS)}, or a JSON file.",
        show_default="this machine, probed",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", callback=alone_if, is_eager=True, help="Print one JSON document instead."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")]


def check_model_folder(folder: Path) -> None:
    """Raise `SpecError` unless `folder` has a `config.json` that can be read."""
    if not folder.is_dir():
        raise SpecError(
            f"no model at {folder}: expected a folder with a config.json and weights; models of a hub are downloaded "
            "first, for example by `hf download`"
        )
    read_config(folder)


def check_names(a2a_backend: str | None = None, runner_backend: str | None = None, exclude: Iterable[str] = ()) -> None:
    """Raise what planning would about a name that means nothing, before a model is loaded or anything measured."""
    # Names are the same for every layer and machine, and no times are asked for.
    request = LayerRequest(
        num_experts=1,
        top_k=1,
        hidden_size=1,
        intermediate_size=1,
        a2a_backend=a2a_backend,
        runner_backend=runner_backend,
        exclude=tuple(exclude),
    )
    decide(default_manager(), request, PRESETS["cpu"], MeasurementTable())


def read_text(path: Path) -> str:
    """The content of a UTF-8 file; raises `SpecError` if it is none."""
    try:
        return read_regular(path)
    except OSError as error:
        raise SpecError(f"text {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"text {path}: not readable as UTF-8 ({error})") from error


def check_machine(manager: BackendManager, machine: Environment) -> None:
    """Warn of what a machine is said to have and no plugin knows: it may be a slip of the pen, or a plugin is missing.

    Raises:
        SpecError: It has a device type or a generation that nobody knows.
    """
    check_described(machine, manager.specs())
    asked = {
        "packages": ("torch", "triton", *manager.modules_required()),
        "variables": manager.variables_read(),
        "programs": [program.name for program in manager.programs_started()],
    }
    for doubt in (*doubts(machine, manager.specs()), *unasked(machine, asked)):
        print_error(doubt, label="warning")
