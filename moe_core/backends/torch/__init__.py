"""The built-in `torch` backend: every device, every activation, any transport that torch.distributed has."""
