"""What every declaration of this plugin says about machines and installations."""

from __future__ import annotations

from moe_core.specs import Program, Requirement

#: Torch's name of the device type.
DEVICES = ("cuda",)
#: Hopper, where `benchmarks/gpu_deepgemm.py` runs everything that is declared for it.
VERIFIED_ARCHS = ("sm90",)
#: Blackwell, B200 and B300: written after the libraries' rules for it, never run there. DeepGEMM compiles
#: one code for both, and what DeepEP's wheels hold for 10.0 loads on 10.3.
UNVERIFIED_ARCHS = ("sm100", "sm103")

#: What compiles the library's kernels when they are first called, found as the library finds it.
NVCC = Program(
    name="nvcc",
    folders=("CUDA_HOME", "CUDA_PATH"),
    default="/usr/local/cuda",
    unless=("DG_JIT_USE_NVRTC",),
    install="install a CUDA toolkit and set CUDA_HOME to it, or set DG_JIT_USE_NVRTC=1",
)

#: Of the runners: builds with bf16 grouped GEMMs. sgl-deep-gemm counts from 0.1, all others as DeepGEMM itself does.
DEEP_GEMM = Requirement(
    module="deep_gemm",
    minimum="0.1.3",
    excluded=">=1,<2.1",
    install="pip install sgl-deep-gemm or tokenspeed-deepgemm, the build for your release of torch",
    programs=(NVCC,),
)
