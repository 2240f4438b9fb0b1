"""What a machine is, as a value: made by hand, read from JSON, or a named preset; `probing` looks at a real one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from moe_core.errors import SpecError, UnknownNameError, counted
from moe_core.json_files import kind_of, read_json, shown
from moe_core.vocabulary import as_sorted_tuple, at_least, instance_of, is_arch, is_device_type


def _pairs(value: Any) -> Any:
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        # For the validator to name its field.
        return value
    # JSON has lists where Python has pairs.
    return as_sorted_tuple([tuple(pair) if isinstance(pair, list) else pair for pair in pairs])


def _are_named(instance: Any, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    """An attrs validator: pairs of a name and a text, each name once."""
    where = f"Environment, field {attribute.name!r}"
    expected = f"expected ({_NAMED[attribute.name]}) texts"
    if not isinstance(value, tuple):
        raise SpecError(f"{where}: {expected} or a mapping of them, got {value!r}")
    for pair in value:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise SpecError(f"{where}: {expected}, got {pair!r}")
    if len(dict(value)) < len(value):
        raise SpecError(f"{where}: a name occurs twice in {value}")
    if "" in dict(value):
        raise SpecError(f"{where}: a name is empty in {value}")


#: Fields of pairs -> what their halves are.
_NAMED = {"packages": "import name, version", "variables": "name, value", "programs": "name, path"}


@attrs.frozen(kw_only=True, cache_hash=True)
class Environment:
    """One machine, as far as backends care.

    Attributes:
        device_type: As torch calls it: one of `DEVICE_TYPES`, or one that a plugin names; choosing checks that.
        arch: Device generation: `sm90`, `a3`; "" where the device type has none. Choosing checks it, too.
        device_name: For people.
        driver: Driver or toolkit version, for bug reports.
        threads: Of a CPU: with how many torch computes in this program; 0 where nobody knows, and for other devices.
        packages: Sorted (import name, version) pairs; version "" if unknown. Absent means not installed.
        variables: Sorted (name, value) pairs of the environment variables that plugins' libraries read. Absent means
            not set.
        programs: Sorted (name, path) pairs of the programs that plugins' libraries start; path "" for one that is not
            there. Absent means that nobody looked, which is held against nothing.
        source: How this description came about: `probed`, `preset h100`, a file name, or `by hand`.
    """

    device_type: str = attrs.field(validator=is_device_type)
    arch: str = attrs.field(default="", validator=is_arch)
    device_name: str = attrs.field(default="", validator=instance_of(str))
    driver: str = attrs.field(default="", validator=instance_of(str))
    threads: int = attrs.field(default=0, validator=at_least(0))
    packages: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_pairs, validator=_are_named)
    variables: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_pairs, validator=_are_named)
    programs: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_pairs, validator=_are_named)
    source: str = attrs.field(default="by hand", eq=False)

    def version(self, module: str) -> str | None:
        """Version of an import name: "" if unknown, None if it is not installed."""
        return dict(self.packages).get(module)

    @property
    def card(self) -> str:
        """What is called the machine's card in messages, of a CPU with its threads: `AMD EPYC, 2 CPUs, 1 thread`."""
        return ", ".join(filter(None, (self.device_name or self.arch or self.device_type, self.thread_words)))

    @property
    def thread_words(self) -> str:
        """`1 thread`, "" where nobody knows."""
        return counted(self.threads, "thread") if self.threads else ""

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back. Threads that nobody knows are left out."""
        data = {**attrs.asdict(self), **{name: dict(getattr(self, name)) for name in _NAMED}}
        return {name: value for name, value in data.items() if name != "threads" or value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = "by hand") -> Environment:
        """Read plain data; raises `SpecError` naming unknown, missing or wrong fields."""
        if not isinstance(data, Mapping):
            raise SpecError(f"environment {source}: expected an object, got {kind_of(data)}")
        known = {field.name for field in attrs.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown or "device_type" not in data:
            problem = f"unknown fields {unknown}" if unknown else "field 'device_type' is missing"
            raise SpecError(f"environment {source}: {problem}; known fields: {', '.join(sorted(known))}")
        for name, value in data.items():
            _require_json(name, value, f"environment {source}: field {name!r}")
        try:
            return cls(**{**data, "source": source})
        except SpecError as error:
            raise SpecError(f"environment {source}: {error}") from error


#: Fields of several names -> what they look like in a file.
_EXAMPLES = {
    "packages": '{"torch": "2.11.0"}',
    "variables": '{"NAME": "value"}',
    "programs": '{"nvcc": "/usr/bin/nvcc"}',
}


def _require_json(name: str, value: Any, where: str) -> None:
    """Raise `SpecError` unless a field of a file is of the right kind; what it says is checked with the values."""
    if name == "threads":
        if type(value) is not int:
            raise SpecError(f"{where}: expected a whole number, got {kind_of(value)}")
        return
    if name not in _EXAMPLES:
        if not isinstance(value, str):
            raise SpecError(f"{where}: expected a text, got {kind_of(value)}")
        if not value.isprintable():
            raise SpecError(f"{where}: expected a printable text, got {shown(value)}")
        return
    if isinstance(value, list) and value and all(isinstance(pair, list | tuple) for pair in value):
        # Pairs, as Python writes them.
        pairs = [pair for pair in value if len(pair) == 2 and all(isinstance(text, str) for text in pair)]
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        raise SpecError(f"{where}: expected an object like {_EXAMPLES[name]}, got {kind_of(value)}")
    for key, text in pairs:
        if not key.isprintable():
            raise SpecError(f"{where}: expected printable names, got {shown(key)}")
        if not isinstance(text, str):
            raise SpecError(f"{where}: expected a text for {key!r}, as in {_EXAMPLES[name]}, got {kind_of(text)}")
        # A variable is what it is on the machine.
        if name != "variables" and not text.isprintable():
            raise SpecError(f"{where}: expected a printable text for {key!r}, got {shown(text)}")


_CUDA_PACKAGES = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "deep_gemm": "2.5.0",
    "deep_ep": "1.2.1",
    "flashinfer": "0.7.2",
    "cutlass": "4.8.1",
}
_ASCEND_PACKAGES = {"torch": "2.13.0", "torch_npu": "2.13.0", "deep_ep": "1.0.0"}
#: Expert parallelism cannot do without: the default is too small for most of it.
_ASCEND_VARIABLES = {"HCCL_BUFFSIZE": "16384"}

#: Machines to ask about by name. Each states the packages and variables it assumes.
PRESETS: dict[str, Environment] = {
    name: Environment(
        device_type=device,
        arch=arch,
        device_name=label,
        driver=driver,
        packages=packages,
        variables=variables,
        source=f"preset {name}",
    )
    for name, device, arch, label, driver, packages, variables in (
        ("cpu", "cpu", "", "generic CPU", "", {"torch": "2.13.0"}, {}),
        ("h100", "cuda", "sm90", "NVIDIA H100", "CUDA 13.0", _CUDA_PACKAGES, {}),
        ("h200", "cuda", "sm90", "NVIDIA H200", "CUDA 13.0", _CUDA_PACKAGES, {}),
        ("b200", "cuda", "sm100", "NVIDIA B200", "CUDA 13.0", _CUDA_PACKAGES, {}),
        ("ascend-a2", "npu", "a2", "Ascend Atlas A2", "CANN 8.5", _ASCEND_PACKAGES, _ASCEND_VARIABLES),
        ("ascend-a3", "npu", "a3", "Ascend Atlas A3", "CANN 8.5", _ASCEND_PACKAGES, _ASCEND_VARIABLES),
    )
}


def load_environment(name: str) -> Environment:
    """An environment from a preset's name (`_` for `-` is fine) or a JSON file's path.

    A file may also be what a command printed, with the machine under `environment`.

    Raises:
        UnknownNameError: Neither a preset nor a file.
        SpecError: The file is not there, cannot be read, is not valid JSON, or holds unknown or wrong fields.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        if (preset := name.replace("_", "-")) in PRESETS:
            return PRESETS[preset]
        if os.path.lexists(name):
            raise SpecError(f"environment file {name}: it is there and is no regular file")
        if path.suffix or path.name != name:
            raise SpecError(f"environment file {name}: no such file; presets are {', '.join(sorted(PRESETS))}")
        raise UnknownNameError("environment", name, PRESETS, hint="A path to a JSON file is taken too.")
    try:
        data = read_json(path)
    except OSError as error:
        raise SpecError(f"environment file {name}: cannot be read ({error})") from error
    except ValueError as error:
        raise SpecError(f"environment file {name}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise SpecError(f"environment file {name}: expected a JSON object, got {kind_of(data)}")
    printed = data.get("environment")
    if not isinstance(printed, dict):
        return Environment.from_json(data, source=name)
    # Commands print lists `packages` and `variables` of their own.
    beside = [field for field in ("arch", "device_name", "device_type", "driver", "programs") if field in data]
    if beside:
        raise SpecError(
            f"environment file {name}: it describes two machines, one by {', '.join(beside)} and one by environment; "
            "leave one of them"
        )
    return Environment.from_json(printed, source=name)
