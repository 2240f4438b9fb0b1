"""`python -m moe_plugin_ascend.emulation FOLDER`: make the torch_npu that was installed there loadable without CANN."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_plugin_ascend.emulation.stubs import make_stubs

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where torch_npu was installed")
    print(make_stubs(parser.parse_args().folder))
