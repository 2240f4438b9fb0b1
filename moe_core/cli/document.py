"""A stdout that holds one document and nothing else, whatever plugins, their libraries and their processes print."""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import sys
from types import TracebackType

import typer

#: File descriptors of every process.
_OUT, _ERR = 1, 2


class DocumentAlone:
    """Inside, stdout belongs to what `write` writes: everything else that is printed goes to stderr.

    That is done below Python, to the descriptor, which C libraries and child processes print to as well. Who never
    leaves, since its process ends, keeps what prints at the very end from stdout, too.
    """

    _current: DocumentAlone | None = None

    def __enter__(self) -> DocumentAlone:
        """Begin."""
        self._stdout, self._saved = sys.stdout, -1
        if sys.stdout is not None:
            sys.stdout.flush()
        if self._is_ours():
            # Above those of every process, of which one may be closed.
            self._saved = fcntl.fcntl(_OUT, fcntl.F_DUPFD_CLOEXEC, _ERR + 1)
            _point_to_stderr(_OUT)
        else:
            # Replaced by who runs this inside of a program.
            sys.stdout = sys.stderr
        DocumentAlone._current = self
        return self

    def _is_ours(self) -> bool:
        """Whether what Python prints goes to the descriptor."""
        try:
            return self._stdout is not None and self._stdout.fileno() == _OUT
        except (io.UnsupportedOperation, AttributeError):
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give stdout back; what C libraries hold of their prints still goes to stderr."""
        DocumentAlone._current = None
        if self._saved < 0:
            sys.stdout = self._stdout
            return
        self._stdout.flush()
        ctypes.CDLL(None).fflush(None)
        os.dup2(self._saved, _OUT)
        os.close(self._saved)

    @classmethod
    def write(cls, text: str) -> None:
        """Write text to the stdout of whoever is inside, or to that of the process; a program may have none."""
        alone = cls._current
        if alone is None or alone._saved < 0:
            target = sys.stdout if alone is None else alone._stdout
            if target is not None:
                print(text, file=target)
            return
        # Without a buffer, which would be written again where the reader has gone.
        left = memoryview(f"{text}\n".encode(alone._stdout.encoding, alone._stdout.errors or "strict"))
        while left:
            left = left[os.write(alone._saved, left) :]


def alone_if(context: typer.Context, wanted: bool) -> bool:
    """A callback of an eager option: if wanted, stdout is the document's until the command ends."""
    if wanted:
        context.obj.enter_context(DocumentAlone())
    return wanted


def _point_to_stderr(descriptor: int) -> None:
    try:
        os.dup2(_ERR, descriptor)
    except OSError:
        # The program was started without one.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), descriptor)
