"""The moe-core backend `toy_accelerator`."""
