"""Memory of one rank that the others open: of a file on CPU, of the CUDA driver on a GPU.

The driver's own calls are used since a handle of torch's allocator is counted by both processes until they end, and
is not to be had of its expandable segments. Source: CUDA driver API, "Memory Management".
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch

#: `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag there is: this device may reach the other's memory from then on.
_LAZY_PEER_ACCESS = 1


class SharedMemory(Protocol):
    """Memory of this rank, and what it has opened of others.

    All calls raise `OSError` with the reason where the system refuses.

    Attributes:
        storage: Of this rank.
        handle: What others open it by; can be pickled.
    """

    storage: torch.UntypedStorage
    handle: Any

    def open(self, handle: Any) -> int:
        """The address of another rank's memory in this process."""

    def keep_to_those(self) -> None:
        """All who will ever open it have done so."""

    def close_others(self) -> None:
        """Give back what was opened; every rank does so before any frees its own."""

    def free(self) -> None:
        """Give back this rank's own."""


def shared_memory(num_bytes: int, device: torch.device) -> SharedMemory:
    """New memory on a CPU or on an NVIDIA GPU that is the current device; its content is undefined.

    Raises:
        OSError: The system has none, or no handle of it; nothing is kept.
    """
    return _File(num_bytes) if device.type == "cpu" else _DriverMemory(num_bytes, device)


class _File(SharedMemory):
    """A temporary file that all ranks map."""

    def __init__(self, num_bytes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="moe_core_"))
        self.handle = str(self._folder / "memory"), num_bytes
        self._opened: list[torch.UntypedStorage] = []
        try:
            self.storage = self._map(self.handle)
        except OSError:
            self.free()
            raise

    def open(self, handle: tuple[str, int]) -> int:
        self._opened.append(self._map(handle))
        return self._opened[-1].data_ptr()

    def keep_to_those(self) -> None:
        # What is mapped lives on without a name, however a process ends.
        shutil.rmtree(self._folder, ignore_errors=True)

    def close_others(self) -> None:
        self._opened.clear()

    def free(self) -> None:
        self.keep_to_those()

    @staticmethod
    def _map(handle: tuple[str, int]) -> torch.UntypedStorage:
        name, num_bytes = handle
        try:
            return torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8).untyped_storage()
        except RuntimeError as error:
            raise OSError(str(error)) from error


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class _DriverMemory(SharedMemory):
    """Memory of the driver, outside of torch's allocator."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # Makes the current device's context this thread's, which the driver allocates in.
        torch.cuda.synchronize(device)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._address, handle = ctypes.c_uint64(), _Handle()
        self._opened: list[int] = []
        self._call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(num_bytes))
        try:
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
        except OSError:
            self.free()
            raise
        self.handle = bytes(handle)
        made: Any = torch._C._construct_storage_from_data_pointer(self._address.value, device, num_bytes)
        self.storage = made

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        named = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), named, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._opened.append(address.value)
        return address.value

    def keep_to_those(self) -> None:
        """It has no name that would have to go."""

    def close_others(self) -> None:
        while self._opened:
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(self._opened.pop()))

    def free(self) -> None:
        self._call("cuMemFree_v2", self._address)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'').decode() or f'error {code}'}")
