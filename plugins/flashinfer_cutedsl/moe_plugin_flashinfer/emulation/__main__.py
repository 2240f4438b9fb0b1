"""`python -m moe_plugin_flashinfer.emulation FOLDER`: list the signatures of the library that was installed there."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_plugin_flashinfer.emulation.signatures import installed_release, read_sources

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where flashinfer-python was installed or unpacked")
    folder = parser.parse_args().folder
    print(f"## {installed_release(folder)}")
    for name, signature in sorted(read_sources(folder).items()):
        print(f"{name}{signature}")
