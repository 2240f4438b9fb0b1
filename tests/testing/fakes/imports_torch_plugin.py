"""A plugin that imports torch and prints when it is imported."""

from __future__ import annotations

import torch
import toy_backend as toy

from moe_core.hookspecs import hookimpl

NAME, VERSION = "imports_torch", torch.__version__
for _hook, _function in toy.hooks_of(NAME, toy.Parts()).items():
    globals()[_hook] = hookimpl(_function)
