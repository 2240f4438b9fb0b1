"""How far the loading of a model is, in bytes of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from moe_core.integrations.transformers.stored_experts import StoredExperts
from moe_core.weights.checkpoint import Checkpoint
from moe_core.weights.names import names_below


class LoadingProgress:
    """Counts tensors outside the quantized experts one by one, and each experts module by the share of it that is read.

    Bytes are those that tensors take in the checkpoint, each once: some are read twice, and some not at all.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dense: Iterable[str],
        modules: Collection[StoredExperts],
        told: Callable[[int, int], None] | None,
    ) -> None:
        """Count.

        Args:
            checkpoint: What is read.
            dense: Names outside the quantized experts.
            modules: The quantized experts.
            told: Called with (bytes dealt with, bytes in all).
        """
        self._told = told
        self._sizes = dict.fromkeys((module.stored_as for module in modules), 0)
        for stored_as in self._sizes:
            self._sizes[stored_as] = sum(map(checkpoint.nbytes, names_below(checkpoint, stored_as)))
        self._dense = sum(map(checkpoint.nbytes, dense))
        self._done = 0
        self._total = self._dense + sum(self._sizes.values())

    def advance(self, num_bytes: int) -> None:
        """So many more bytes outside the quantized experts are dealt with."""
        self._done += num_bytes
        self._tell(0)

    def finish_dense(self) -> None:
        """Everything outside the quantized experts is, whatever of it was passed over."""
        self._done = self._dense
        self._tell(0)

    def advance_experts(self, module: StoredExperts, done: int, total: int) -> None:
        """Of the reads of one module, `done` of `total` bytes are done; modules come one after the other."""
        self._tell(self._sizes[module.stored_as] * done // total)

    def finish_experts(self, module: StoredExperts) -> None:
        """One module is loaded."""
        self._done += self._sizes[module.stored_as]

    def _tell(self, more: int) -> None:
        if self._told is not None:
            self._told(self._done + more, self._total)
