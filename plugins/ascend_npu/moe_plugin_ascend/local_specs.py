"""Declaration of dispatcher `none`: tokens stay on this rank and are grouped by expert."""

from __future__ import annotations

from moe_core.specs import DispatcherSpec, TokenDtype
from moe_plugin_ascend.machine import ARCHS, DEVICES

DISPATCHERS = (
    DispatcherSpec(
        name="none",
        mode="contiguous",
        binder="moe_plugin_ascend.local:bind_contiguous",
        format="contiguous",
        sends=(TokenDtype("int8", "token"), TokenDtype("bf16")),
        token_placements=("replicated",),
        dtypes=("bf16",),
        devices=DEVICES,
        archs=ARCHS,
        graph_safe=True,
    ),
)
