"""Tests of the building blocks on plain tensors."""
