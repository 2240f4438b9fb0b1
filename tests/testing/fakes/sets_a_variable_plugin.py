"""A plugin that sets an environment variable when it binds, once and for all."""

from __future__ import annotations

import os
from typing import Any

import toy_backend as toy

from moe_core.hookspecs import hookimpl

NAME = "sets_a_variable"


def bind(parts: toy.Parts, weights: toy.Weights, plan: Any) -> Any:
    os.environ["TOY_MODE"] = "fast"
    return toy.experts_of(parts, weights, plan)


for _hook, _function in toy.hooks_of(NAME, toy.Parts(bind=bind)).items():
    globals()[_hook] = hookimpl(_function)
