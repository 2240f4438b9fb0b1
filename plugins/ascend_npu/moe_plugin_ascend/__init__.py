"""The moe-core backend `ascend_npu`: experts on Ascend NPUs through torch_npu's operators."""
