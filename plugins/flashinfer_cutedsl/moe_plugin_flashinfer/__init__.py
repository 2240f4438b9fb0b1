"""A moe-core backend for NVIDIA Blackwell: NVFP4 experts through FlashInfer's CuteDSL kernels; see `plugin`."""
