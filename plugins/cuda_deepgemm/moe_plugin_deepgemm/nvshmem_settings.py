"""What NVSHMEM is told through the environment while a low-latency buffer is made, and at no other time.

NVSHMEM reads its variables when it is initialised, with the first such buffer of the process. DeepEP writes several of
them itself; a host program, and other libraries in it, find all of them as they were.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moe_core.errors import PluginError

_PREFIX = "NVSHMEM_"
#: Places in a queue; the largest capacity that is declared needs two per token.
_DEPTH_VARIABLE, _DEPTH = "NVSHMEM_QP_DEPTH", 2048
_SETTINGS = {
    _DEPTH_VARIABLE: str(_DEPTH),
    # The ranks are on one host, which may have no network card for GPUs.
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    # NVLink's multicast is not used, and not every machine allows it.
    "NVSHMEM_DISABLE_NVLS": "1",
}
_LOCK = threading.Lock()


@contextmanager
def nvshmem_settings(capacity: int) -> Iterator[None]:
    """Run the body under the settings; what the user set stays, and everything is restored afterwards.

    Args:
        capacity: Most tokens of a rank in one forward.

    Raises:
        PluginError: The user's queues are too short for them.
    """
    with _LOCK:
        before = _variables()
        depth = before.get(_DEPTH_VARIABLE, str(_DEPTH))
        if not depth.isdecimal() or int(depth) < 2 * (capacity + 1):
            raise PluginError(
                f"{_DEPTH_VARIABLE}={depth}: {capacity} tokens per rank need at least {2 * (capacity + 1)}; "
                "unset it, or declare Workload(max_tokens=...)"
            )
        os.environ.update(_SETTINGS | before)
        try:
            yield
        finally:
            for name in _variables().keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
