"""This machine as an `Environment`: its packages, programs, variables, and the device that torch finds.

`probe_environment` is the one function of the core that asks a machine for its devices. Everything else takes what it
gave, so that a laptop can answer for an H100.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from moe_core.environment import Environment
from moe_core.errors import SpecError, counted
from moe_core.installed import installed_packages, programs_found, variables_set

if TYPE_CHECKING:
    from moe_core.requirement import Program
    from moe_core.specs import DeviceGeneration


def unprobed_environment(
    modules: Iterable[str] = (), variables: Iterable[str] = (), programs: Iterable[Program] = ()
) -> Environment:
    """This machine's packages, variables and programs without a look at its devices; imports nothing."""
    return Environment(
        device_type="cpu",
        device_name="not probed",
        packages=installed_packages(modules),
        variables=variables_set(variables),
        programs=programs_found(programs),
        source="unprobed",
    )


def generation_of(device_type: str, device_name: str, generations: Iterable[DeviceGeneration]) -> str:
    """The arch of the longest prefix that fits a device's name, "" if none does."""
    fitting = [g for g in generations if g.device_type == device_type and device_name.startswith(g.name_prefix)]
    return max(fitting, key=lambda generation: len(generation.name_prefix)).arch if fitting else ""


def _cpu_name() -> str:
    """`AMD EPYC 7763 64-Core Processor, 2 CPUs`, or `cpu` where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return "cpu"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, "")
    return f"{name}, {counted(len(os.sched_getaffinity(0)), 'CPU')}" if name else "cpu"


def _device_name(device_type: str) -> str:
    """As its module in torch calls it; not every device type has one that can."""
    import torch

    try:
        module = torch.get_device_module(device_type)
    except RuntimeError:
        return device_type
    return str(getattr(module, "get_device_name", lambda: device_type)())


def probe_environment(
    modules: Iterable[str] = (),
    device_type: str | None = None,
    generations: Iterable[DeviceGeneration] = (),
    variables: Iterable[str] = (),
    programs: Iterable[Program] = (),
) -> Environment:
    """Describe this machine; imports torch and asks it for its accelerator.

    Args:
        modules: Import names whose versions matter, usually the loaded plugins' requirements.
        device_type: Describe this device type of the machine instead of its accelerator.
        generations: What the loaded plugins know about names of devices.
        variables: Environment variables that matter, usually those that the loaded plugins' libraries read.
        programs: Programs that matter, usually those that the loaded plugins' libraries start.

    Raises:
        SpecError: `device_type` is asked for and this torch cannot reach such a device.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    found = accelerator.type if accelerator is not None else "cpu"
    device = device_type or found
    if device not in (found, "cpu", "meta"):
        raise SpecError(f"device type {device!r} was asked for, but torch {torch.__version__} finds {found!r} here")
    described = Environment(
        device_type=device,
        device_name=device,
        packages=installed_packages({"torch", "triton", *modules}),
        variables=variables_set(variables),
        programs=programs_found(programs),
        source="probed",
    )
    if device == "cpu":
        return attrs.evolve(described, device_name=_cpu_name(), threads=torch.get_num_threads())
    if device == "meta":
        return described
    name = _device_name(device)
    described = attrs.evolve(described, device_name=name, arch=generation_of(device, name, generations))
    if device != "cuda":
        return described
    major, minor = torch.cuda.get_device_capability()
    return attrs.evolve(described, arch=f"sm{major}{minor}", driver=f"CUDA {torch.version.cuda}")
