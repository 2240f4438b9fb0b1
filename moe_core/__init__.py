"""moe-core: one Mixture-of-Experts layer on whatever hardware and quantization its user has."""
