"""The checks: plain functions that raise `ConformanceError`, grouped by what they are about."""
