"""The moe-core backend `cuda_deepgemm`: experts on NVIDIA GPUs through DeepGEMM and DeepEP."""
