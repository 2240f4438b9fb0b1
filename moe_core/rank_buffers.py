"""Communication buffers that layers share: one for each process group and geometry, made and freed by all its ranks.

For plugins whose library wants a buffer before it moves anything. What a geometry is, how a buffer is made of it, and
what frees one, is theirs.
"""

from __future__ import annotations

import platform
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

from moe_core.errors import PluginError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: What a buffer is made for: hashable, sortable by its fields, and equal on all ranks that make one together.
Geometry = TypeVar("Geometry", bound=attrs.AttrsInstance)


def every_rank(process_group: ProcessGroup, mine: Any) -> list[Any]:
    """What every rank of a group shows, by rank; a collective."""
    import torch.distributed as dist

    shown: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(shown, mine, group=process_group)
    return shown


def check_one_host(process_group: ProcessGroup, dispatcher: str) -> None:
    """Raise `PluginError` on every rank, which names `dispatcher` and hosts, unless all are on one; a collective."""
    hosts = sorted(set(every_rank(process_group, platform.node())))
    if len(hosts) > 1:
        raise PluginError(
            f"dispatcher {dispatcher} is for the ranks of one host, these ranks are on {', '.join(hosts)}; pin "
            "a2a_backend='torch_alltoall'"
        )


@attrs.define(eq=False)
class SharedBuffer:
    """A buffer in use: it stays as long as somebody holds this.

    Attributes:
        buffer: The library's.
    """

    buffer: Any


@attrs.define(eq=False)
class _Place:
    """Where one buffer is kept; it is unused when nobody holds its `SharedBuffer` any more."""

    buffer: Any
    user: weakref.ref[SharedBuffer]

    def shared(self) -> SharedBuffer:
        shared = self.user()
        if shared is None:
            shared = SharedBuffer(self.buffer)
            self.user = weakref.ref(shared)
        return shared


@attrs.define(eq=False)
class _Places(Generic[Geometry]):
    """The buffers of one process group, and what is being made for it."""

    lock: threading.Lock = attrs.field(factory=threading.Lock)
    kept: dict[Geometry, _Place] = attrs.field(factory=dict)
    making: Geometry | None = None


class BufferRegistry(Generic[Geometry]):
    """The buffers of this process.

    Groups do not wait for each other, so that threads with groups of their own may ask in any order.

    Warning:
        The ranks of one group must ask in the same order, and one thread after the other: whoever makes a buffer waits
        for the other ranks.
    """

    def __init__(self, make: Callable[[ProcessGroup, Geometry], Any], free: Callable[[Any], None]) -> None:
        """Start empty.

        Args:
            make: Makes a buffer, on all ranks of the group.
            free: Gives one back that no rank uses any more, on all ranks of its group.
        """
        self._make, self._free = make, free
        self._lock = threading.Lock()
        # A process group is compared by identity and kept alive, since a later one may get the same name.
        self._groups: dict[ProcessGroup, _Places[Geometry]] = {}

    def get(self, process_group: ProcessGroup, geometry: Geometry) -> SharedBuffer:
        """The buffer of a geometry, made by all ranks of the group at the first call; unused ones are freed before.

        Raises whatever `make` raises; nothing is kept then.
        """
        places = self._places(process_group)
        with places.lock:
            if geometry in places.kept:
                return places.kept[geometry].shared()
            self._free_unused(process_group, places)
            places.making = geometry
            try:
                shared = SharedBuffer(self._make(process_group, geometry))
            finally:
                places.making = None
            places.kept[geometry] = _Place(shared.buffer, weakref.ref(shared))
            return shared

    def free_unused(self, process_group: ProcessGroup) -> int:
        """Free the buffers of a group that no layer uses on any of its ranks; all ranks call this together.

        Layers go when Python collects them, which ranks do at different times, while a buffer goes on all ranks at
        once: so it happens here, and when a buffer of another geometry is made. A group without any buffer is
        forgotten: held until the process ends, it may abort it then.

        Returns:
            How many were freed.
        """
        places = self._places(process_group)
        with places.lock:
            num_freed = self._free_unused(process_group, places)
            if not places.kept:
                with self._lock:
                    self._groups.pop(process_group, None)
            return num_freed

    def geometries(self) -> list[tuple[ProcessGroup, Geometry]]:
        """Every buffer that exists or is being made, for a `make` that must know of the others."""
        with self._lock:
            groups = list(self._groups.items())
        return [
            (group, geometry)
            for group, places in groups
            for geometry in (*tuple(places.kept), *((places.making,) if places.making is not None else ()))
        ]

    def _places(self, process_group: ProcessGroup) -> _Places[Geometry]:
        with self._lock:
            return self._groups.setdefault(process_group, _Places())

    def _free_unused(self, process_group: ProcessGroup, places: _Places[Geometry]) -> int:
        if not places.kept:
            return 0
        unused = {geometry for geometry, place in places.kept.items() if place.user() is None}
        everywhere: set[Geometry] = set.intersection(*every_rank(process_group, unused))
        for geometry in sorted(everywhere, key=attrs.astuple):
            self._free(places.kept.pop(geometry).buffer)
        return len(everywhere)
