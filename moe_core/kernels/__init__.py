"""Building blocks on plain tensors that plugins share, without plugins or plans; importing this imports nothing.

`ops` is what plugins import: each block there is in torch here, and in Triton in `triton`.
"""

from __future__ import annotations
