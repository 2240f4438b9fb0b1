"""What every declaration of this plugin says about machines and installations."""

from __future__ import annotations

from moe_core.specs import DeviceGeneration, Requirement

#: Torch's name of the device type.
DEVICES = ("npu",)
#: Atlas A2 (Ascend 910B) and Atlas A3 (Ascend 910C). Nothing here was written for other generations.
ARCHS = ("a2", "a3")
#: How torch_npu calls their devices. Later ones are named apart, so that they are not taken for these.
GENERATIONS = (
    DeviceGeneration("npu", "Ascend910B", "a2"),
    DeviceGeneration("npu", "Ascend910_93", "a3"),
    DeviceGeneration("npu", "Ascend950", "a5"),
)

#: Of everything in this plugin.
TORCH_NPU = Requirement(
    module="torch_npu",
    minimum="2.11",
    install="pip install torch-npu==VERSION with the version of your torch, on a machine with CANN",
)
