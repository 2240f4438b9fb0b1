"""Memory of a run, counted allocation by allocation: what an accelerator would have to hold."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every storage that an operation makes is counted; workspace inside of an operation is not.

    Attributes:
        live: Bytes of those that exist.
        peak: The most of them at once, less what had been given back by then.
        given_back: Bytes of older memory that was released meanwhile; whoever releases it counts it here.
    """

    def __init__(self) -> None:
        """Nothing is counted yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.given_back = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count what the call returns and was not given."""
        result = function(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given | self._known:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live - self.given_back)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
