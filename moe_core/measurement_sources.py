"""Where measured times come from: the user's file, which `moe-core tune` writes, and those that ship with the package.

The user's counts only where nothing has changed since: card, driver, threads of a CPU, versions. A shipped one counts
for its card, whatever the versions: kernels change, their order on one card seldom does, and the decision says what it
was measured with. A file that does not fit is reported and not used: no cache may keep a layer from being planned.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import attrs

from moe_core.environment import Environment
from moe_core.errors import SpecError, counted
from moe_core.measurement_files import MeasurementFile, changes_since, is_of_card
from moe_core.measurements import MeasurementTable

SHIPPED = Path(__file__).parent / "tables"

#: Inode, time of the last change in nanoseconds, and size of a file.
_State: TypeAlias = tuple[int, int, int]


class MeasurementWarning(UserWarning):
    """A file of measured times is not used; the message says why."""


def user_file(environment: Environment) -> Path:
    """Where the user's times for a machine are: below `$XDG_CACHE_HOME`, or `~/.cache`; not absolute without a home.

    One file for each card, and of a CPU for each number of threads.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else _home() / ".cache"
    parts = (environment.device_type, environment.arch, environment.device_name, environment.thread_words)
    words = " ".join(filter(None, parts))
    return base / "moe-core" / "measurements" / f"{re.sub(r'[^a-z0-9]+', '-', words.lower()).strip('-')}.json"


def _home() -> Path:
    """The user's home folder; where nobody knows one a relative path, at which nothing lies.

    An empty `$HOME` would be the root folder, and a relative one another folder in every process: both are none.
    """
    given = os.environ.get("HOME", "")
    if os.path.isabs(given):
        return Path(given)
    try:
        import pwd
    except ImportError:
        return Path.home()
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("~")


def older_file(environment: Environment) -> Path | None:
    """The user's times from before threads were told apart, as long as there are none with this number of them."""
    if not environment.threads or _state(user_file(environment)) is not None:
        return None
    older = _without_threads(environment)
    return None if _state(older) is None else older


def older_file_problem(path: Path) -> str:
    """Why the times of `older_file` do not count."""
    return f"measurements {path}: with how many threads they were taken is not known; run moe-core tune again"


def _none_text(environment: Environment, others: tuple[int, ...]) -> str:
    """That there are no times, and with which other numbers of threads there would be some."""
    if not others:
        return "none for this machine; moe-core tune makes them"
    *few, most = others
    numbers = f"{', '.join(map(str, few))} and {most} threads" if few else counted(most, "thread")
    here = environment.thread_words or "a number of threads that nobody knows"
    how = "OMP_NUM_THREADS says how many a program has" if environment.threads else "its description may say `threads`"
    return f"none for this machine with {here}, but for {numbers}; {how}, and moe-core tune makes others"


def _other_threads(environment: Environment) -> tuple[int, ...]:
    """With how many other threads a CPU was measured, by the names of the user's files."""
    alike = _without_threads(environment)
    with_threads = re.compile(re.escape(alike.stem) + r"-([1-9][0-9]*)-threads?\.json")
    try:
        names = os.listdir(alike.parent) if environment.device_type == "cpu" else []
    except OSError:
        return ()
    found = {int(match[1]) for name in names if (match := with_threads.fullmatch(name))}
    return tuple(sorted(found - {environment.threads}))


def _without_threads(environment: Environment) -> Path:
    return user_file(attrs.evolve(environment, threads=0))


def default_measurements(environment: Environment, plugins: Mapping[str, str]) -> MeasurementTable:
    """The user's times for a machine and, for shapes that they leave out, those that ship with the package.

    Args:
        environment: The machine.
        plugins: Plugin name -> its distribution and version.

    Returns:
        The table; its origins tell what is in it and what was ignored. Ignoring a file also warns.
    """
    files = (older_file(environment) or user_file(environment), *sorted(SHIPPED.glob("*.json")))
    states = tuple((path, state) for path in files if (state := _state(path)) is not None)
    table, problems = _known(states, environment, tuple(sorted(plugins.items())))
    if not table.origins:
        table = attrs.evolve(table, origins=(_none_text(environment, _other_threads(environment)),))
    for problem in problems:
        warnings.warn(f"{problem}; what it has of that is not used", MeasurementWarning, stacklevel=2)
    return table


def explicit_measurements(path: Path, environment: Environment) -> MeasurementTable:
    """The times of one file for its card.

    Raises:
        SpecError: The file cannot be read, or is of another card.
    """
    file = MeasurementFile.read(path)
    if not is_of_card(file.environment, environment):
        raise SpecError(f"measurements {path}: they are of {file.environment.card}, the machine is {environment.card}")
    return file.table(path.name)


# Every layer of a model asks anew: files are read, and found unfit, only once while they do not change.
@functools.lru_cache(maxsize=16)
def _known(
    files: tuple[tuple[Path, _State], ...], environment: Environment, plugins: tuple[tuple[str, str], ...]
) -> tuple[MeasurementTable, tuple[str, ...]]:
    """The table of `default_measurements` as far as there is one, and why some files or parts of them are not in it."""
    table, problems = MeasurementTable(), []
    own = user_file(environment)
    for path, _ in files:
        try:
            if path == own:
                found, problem = _own(path, environment, dict(plugins))
            elif path == _without_threads(environment):
                raise SpecError(older_file_problem(path))
            else:
                found, problem = _shipped(path, environment), ""
        except SpecError as error:
            problems.append(str(error))
            continue
        table = table.over(found)
        problems += [problem] if problem else []
    origins = (*table.origins, *(f"ignored: {problem}" for problem in problems))
    return attrs.evolve(table, origins=origins), tuple(problems)


def _own(path: Path, environment: Environment, plugins: Mapping[str, str]) -> tuple[MeasurementTable, str]:
    """The rows of the user's file that still hold, and why others do not, "" if all do."""
    file = MeasurementFile.read(path)
    changes = ", ".join(changes_since(file.environment, environment))
    if changes:
        raise SpecError(f"measurements {path}: the machine has changed: {changes}; run moe-core tune again")
    kept, changed = file.without_changed_plugins(plugins)
    problem = f"measurements {path}: other versions of {changed}; run moe-core tune again" if changed else ""
    return kept.table("your cache"), problem


def _shipped(path: Path, environment: Environment) -> MeasurementTable:
    """The rows of a file of the package, none if it is of another card."""
    file = MeasurementFile.read(path)
    return file.table(f"shipped {path.stem}") if is_of_card(file.environment, environment) else MeasurementTable()


def _state(path: Path) -> _State | None:
    """Changes when the file does; None where nothing is, or nothing that one may look at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns, found.st_size
