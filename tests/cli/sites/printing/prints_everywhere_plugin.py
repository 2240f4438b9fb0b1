"""A policy that prints in every way there is: here, in a process, in C without a flush, and when the program ends."""

from __future__ import annotations

import atexit
import ctypes
import os
import subprocess

from moe_core.hookspecs import hookimpl
from moe_core.specs import PluginSpec


@hookimpl
def declare_backends():
    return PluginSpec(name="prints_everywhere", hook_api=1)


@hookimpl
def select_dispatcher(request, candidates):
    print("printed by Python")
    os.write(1, b"printed below Python\n")
    subprocess.run(["echo", "printed by a child"], check=True)
    ctypes.CDLL(None).printf(b"printed by C\n")
    atexit.register(print, "printed at the end")
