"""Specs with the plugin that declares them, the pairs they make, and what names mean them."""

from __future__ import annotations

import functools
from typing import TypeAlias

import attrs

from moe_core.specs import DispatcherSpec, RunnerSpec


@attrs.frozen
class DeclaredDispatcher:
    """A dispatcher spec and the plugin that declares it."""

    plugin: str
    spec: DispatcherSpec

    @functools.cached_property
    def full_name(self) -> str:
        """`plugin:name.mode`."""
        return f"{self.plugin}:{self.spec.short_name}"


@attrs.frozen
class DeclaredRunner:
    """A runner spec and the plugin that declares it."""

    plugin: str
    spec: RunnerSpec

    @functools.cached_property
    def full_name(self) -> str:
        """`plugin:name.kernel`."""
        return f"{self.plugin}:{self.spec.short_name}"


DeclaredSpec: TypeAlias = DeclaredDispatcher | DeclaredRunner


@attrs.frozen
class Candidate:
    """A dispatcher and a runner that fit each other; a fused runner stands alone (`dispatcher` is None)."""

    dispatcher: DeclaredDispatcher | None
    runner: DeclaredRunner

    @functools.cached_property
    def full_name(self) -> str:
        """`plugin:a2a.mode + plugin:runner.kernel`, or the fused runner's name."""
        return f"{self.dispatcher.full_name} + {self.runner.full_name}" if self.dispatcher else self.runner.full_name

    @property
    def has_one_format(self) -> bool:
        """Whether the runner reads the format that the dispatcher writes."""
        return self.dispatcher is None or self.dispatcher.spec.format == self.runner.spec.format

    @property
    def a2a_backend(self) -> str:
        """The a2a backend name of this candidate."""
        return self.dispatcher.spec.name if self.dispatcher else str(self.runner.spec.a2a)

    @functools.cached_property
    def declared_max_tokens(self) -> int | None:
        """Most tokens per rank that both declare, None if neither says."""
        parts = (self.dispatcher, self.runner) if self.dispatcher else (self.runner,)
        bounds = [part.spec.most_tokens for part in parts]
        return min((bound for bound in bounds if bound is not None), default=None)


def answers_to(name: str, declared: DeclaredSpec) -> bool:
    """Whether `name` (bare, `name.mode`, `plugin:name` or full) means this spec: what a pin may say."""
    spec = declared.spec
    plugin, colon, rest = name.rpartition(":")
    return rest in (spec.name, spec.short_name) and (not colon or plugin == declared.plugin)


def belongs_to(name: str, declared: DeclaredSpec) -> bool:
    """Whether `name` means this spec, its plugin or a fused runner's a2a backend: what prefer and exclude may say."""
    a2a = declared.spec.a2a if isinstance(declared, DeclaredRunner) else None
    return name in (declared.plugin, a2a) or answers_to(name, declared)
