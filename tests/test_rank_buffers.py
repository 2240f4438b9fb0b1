"""Buffers that ranks make together: who shares one, who gets another, and when one goes."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import attrs
import pytest
from ranks import RankError, run_on_ranks

from moe_core import ExpertGroup, rank_buffers
from moe_core.errors import PluginError
from moe_core.rank_buffers import BufferRegistry, every_rank


@attrs.frozen
class Geometry:
    mode: str
    width: int = 0


@attrs.define(eq=False)
class Buffer:
    geometry: Geometry
    freed: bool = False


SMALL, LARGE = Geometry("decode", 64), Geometry("decode", 128)


def free(buffer: Buffer) -> None:
    buffer.freed = True


@pytest.mark.error_path
def test_ranks_on_two_hosts_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = None
    monkeypatch.setattr(rank_buffers, "every_rank", lambda group, mine: [mine, mine])
    rank_buffers.check_one_host(group, "fabric")
    monkeypatch.setattr(rank_buffers, "every_rank", lambda group, mine: ["south", "north", "south"])
    with pytest.raises(PluginError, match=r"dispatcher fabric .* these ranks are on north, south; pin a2a_backend="):
        rank_buffers.check_one_host(group, "fabric")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> BufferRegistry[Any]:
    """The other rank of every group says what this one says."""
    monkeypatch.setattr(rank_buffers, "every_rank", lambda group, mine: [mine, mine])
    return BufferRegistry(lambda group, geometry: Buffer(geometry), free)


class Group:
    """Compared by identity, as process groups are."""


def test_equal_geometries_share_and_others_do_not(registry: BufferRegistry[Any]) -> None:
    ranks: Any = Group()
    first = registry.get(ranks, SMALL)
    assert registry.get(ranks, Geometry("decode", 64)) is first
    others = [registry.get(ranks, LARGE), registry.get(ranks, Geometry("prefill", 64)), registry.get(Group(), SMALL)]
    assert len({id(shared.buffer) for shared in [first, *others]}) == 4
    assert [geometry for group, geometry in registry.geometries() if group is ranks] == [
        SMALL,
        LARGE,
        Geometry("prefill", 64),
    ]


def test_an_unused_buffer_goes_when_the_ranks_meet(registry: BufferRegistry[Any]) -> None:
    ranks: Any = Group()
    kept, dropped = registry.get(ranks, SMALL), registry.get(ranks, LARGE)
    buffer = dropped.buffer
    del dropped
    assert not buffer.freed, "other ranks may not have dropped theirs yet"
    assert registry.get(ranks, LARGE).buffer is buffer, "who comes before that gets it again"
    assert registry.free_unused(ranks) == 1
    assert (buffer.freed, kept.buffer.freed) == (True, False)
    assert registry.get(ranks, LARGE).buffer is not buffer


def test_making_one_frees_those_that_are_unused(registry: BufferRegistry[Any]) -> None:
    ranks: Any = Group()
    buffer = registry.get(ranks, SMALL).buffer
    registry.get(ranks, LARGE)
    assert buffer.freed


def test_a_buffer_that_another_rank_uses_stays(registry: BufferRegistry[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = Group()
    buffer = registry.get(ranks, SMALL).buffer
    monkeypatch.setattr(rank_buffers, "every_rank", lambda group, mine: [mine, set()])
    assert registry.free_unused(ranks) == 0
    assert not buffer.freed


def test_a_group_without_buffers_is_let_go(registry: BufferRegistry[Any]) -> None:
    ranks: Any = Group()
    known, kept = weakref.ref(ranks), registry.get(ranks, SMALL)
    registry.free_unused(ranks)
    assert registry.get(ranks, SMALL) is kept
    del kept
    assert registry.free_unused(ranks) == 1
    assert registry.free_unused(ranks) == 0
    del ranks
    gc.collect()
    assert known() is None


@pytest.mark.error_path
def test_what_cannot_be_made_is_not_kept() -> None:
    ranks: Any = Group()
    answers = iter([MemoryError("no memory"), Buffer(SMALL)])

    def make(group: Any, geometry: Geometry) -> Buffer:
        answer = next(answers)
        if [known for _, known in registry.geometries()] != [geometry]:
            raise AssertionError("what is being made is known")
        if isinstance(answer, MemoryError):
            raise answer
        return answer

    registry: BufferRegistry[Any] = BufferRegistry(make, free)
    with pytest.raises(MemoryError):
        registry.get(ranks, SMALL)
    if registry.geometries():
        raise AssertionError("it was kept")
    if registry.get(ranks, SMALL).buffer.geometry != SMALL:
        raise AssertionError("nothing is left behind")


def test_groups_do_not_wait_for_each_other() -> None:
    # Two threads of this rank, whose counterparts on another rank come in the other order.
    together = threading.Barrier(2, timeout=30)

    def make(group: Any, geometry: Geometry) -> Buffer:
        together.wait()
        return Buffer(geometry)

    registry: BufferRegistry[Any] = BufferRegistry(make, free)
    made: list[Any] = []
    threads = [threading.Thread(target=lambda: made.append(registry.get(Group(), SMALL))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2


def _dropped_at_other_times(group: ExpertGroup) -> list[list[bool]]:
    """A rank's job: the ranks drop their buffers one after the other; which are freed meanwhile."""
    ranks: Any = group.process_group
    registry: BufferRegistry[Any] = BufferRegistry(lambda group, geometry: Buffer(geometry), free)
    held = {geometry: registry.get(ranks, geometry) for geometry in (SMALL, LARGE)}
    buffers = [shared.buffer for shared in held.values()]
    seen = []
    for geometry in (SMALL, LARGE) if group.rank == 0 else (LARGE, SMALL):
        del held[geometry]
        gc.collect()
        registry.free_unused(ranks)
        seen.append([buffer.freed for buffer in buffers])
    return [*seen, [shown == group.size for shown in every_rank(ranks, group.size)]]


def test_ranks_that_drop_theirs_at_other_times_free_them_together() -> None:
    for found in run_on_ranks(_dropped_at_other_times, [()] * 2):
        assert not isinstance(found, RankError), found
        assert found == [[False, False], [True, True], [True, True]]
