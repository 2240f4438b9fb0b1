"""The built-in `triton` backend: grouped GEMMs for every GPU that Triton compiles for, without host synchronisation."""
