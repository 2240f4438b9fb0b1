"""What every declaration of this plugin says about machines and installations."""

from __future__ import annotations

from moe_core.specs import Requirement

#: Torch's name of the device type.
DEVICES = ("cuda",)
#: Blackwell of data centres: B200 and GB200, B300 and GB300. A generation is added when a release has kernels for it:
#: sm110 lies between and has none.
ARCHS = ("sm100", "sm103")
#: The generation that a later release has kernels for, of their own.
RUBIN_ARCHS = ("sm107",)

_INSTALL = "pip install 'flashinfer-python>={}'"
#: Of every runner: from here on the masked GEMM and the wrapper have these names.
FLASHINFER = Requirement(module="flashinfer", minimum="0.6.11", install=_INSTALL.format("0.6.11"))
#: Of what the releases before do not have, or take an argument for and do not do.
LATER_FLASHINFER = Requirement(module="flashinfer", minimum="0.7.2", install=_INSTALL.format("0.7.2"))
#: The compiler of its kernels; no list of files says which distribution has this module, so that it has no version.
CUTLASS_DSL = Requirement(module="cutlass", install="pip install 'nvidia-cutlass-dsl>=4.5'")
