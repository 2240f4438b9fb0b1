"""Everything that is on its way out, with its message; nothing else in the project knows about it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

BF16_DISPATCH_VARIABLE = "SGLANG_DEEPEP_BF16_DISPATCH"


def bf16_dispatch_requested(environ: Mapping[str, str], pinned: str | None = None) -> bool:
    """Whether the deprecated variable asks for bf16 dispatch; warns if it does.

    Read once, when a request is built from the command line; the value then travels as
    `LayerRequest.bf16_dispatch_variable`.

    Args:
        environ: Usually `os.environ`.
        pinned: The `dispatch_dtype` pin, which wins over the variable.
    """
    if environ.get(BF16_DISPATCH_VARIABLE, "").lower() not in ("1", "true", "yes", "on"):
        return False
    ignored = f"; it is ignored here, because dispatch_dtype={pinned!r} is pinned" if pinned else ""
    warnings.warn(
        f"environment variable {BF16_DISPATCH_VARIABLE} is deprecated: use dispatch_dtype='bf16' "
        f"(command line: --dispatch-dtype bf16) instead{ignored}",
        DeprecationWarning,
        stacklevel=2,
    )
    return True
