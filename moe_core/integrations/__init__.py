"""Bridges from model libraries to moe-core."""
