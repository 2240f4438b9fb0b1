"""A plugin whose binding never ends."""

from __future__ import annotations

import time
from typing import Any

import toy_backend as toy

from moe_core.hookspecs import hookimpl

NAME = "hangs"


def bind(parts: toy.Parts, weights: toy.Weights, plan: Any) -> Any:
    while True:
        time.sleep(1)


for _hook, _function in toy.hooks_of(NAME, toy.Parts(bind=bind)).items():
    globals()[_hook] = hookimpl(_function)
