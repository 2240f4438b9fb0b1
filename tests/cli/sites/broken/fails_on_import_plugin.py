"""A plugin whose own dependency is missing."""

from __future__ import annotations

import a_module_that_does_not_exist  # noqa: F401
