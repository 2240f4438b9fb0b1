"""Stand-ins for the driver libraries (CANN), so that the vendor's real torch_npu loads where none are.

They hold every symbol that the wheel's libraries leave open, and do nothing: no device is found. What is gained are the
real operator schemas and Meta kernels. Run `python -m moe_plugin_ascend.emulation FOLDER` after
`pip install --no-deps --target FOLDER torch_npu==VERSION`; it needs `nm` and `gcc`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

#: Libraries that the wheel names as needed; all symbols go into the first.
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
#: Folder of the stand-ins beside the package.
FOLDER = "cann_stubs"
_SYMBOL = re.compile(r"(acl|Msprof|rt[A-Z]|Hccl|hccl|ge[A-Z]|prof[A-Z])\w*")
#: Functions whose result is looked at: texts, pointers and the number of devices.
_BODIES = {
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B1"; }',
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return ""; }',
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { if (count) *count = 0; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int *device) { if (device) *device = 0; return 0; }",
    "aclrtGetCurrentContext": "int aclrtGetCurrentContext(void **context) { if (context) *context = 0; return 0; }",
}


def open_symbols(package: Path) -> list[str]:
    """Names that the libraries of `package` (the folder `torch_npu`) expect from elsewhere."""
    names: set[str] = set()
    for library in [*package.glob("_C*.so"), *package.glob("lib/*.so")]:
        listing = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        words = (line.split()[-1].partition("@")[0] for line in listing.stdout.splitlines() if line.strip())
        names.update(word for word in words if _SYMBOL.fullmatch(word))
    return sorted(names)


def make_stubs(folder: Path) -> Path:
    """Build the stand-ins for the torch_npu in `folder`; returns where they lie.

    Raises:
        FileNotFoundError: No torch_npu is there.
    """
    package = folder / "torch_npu"
    if not package.is_dir():
        raise FileNotFoundError(f"{folder} holds no torch_npu; pip install --no-deps --target {folder} torch_npu")
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    bodies = [_BODIES.get(name, f"long {name}(void) {{ return 0; }}") for name in open_symbols(package)]
    with tempfile.TemporaryDirectory() as scratch:
        for library in LIBRARIES:
            source = Path(scratch, f"{library}.c")
            lines = bodies if library == LIBRARIES[0] else [f"int stand_in_{library};"]
            source.write_text("\n".join([*lines, ""]), encoding="utf-8")
            flags = ["-shared", "-fPIC", "-w", f"-Wl,-soname,lib{library}.so"]
            subprocess.run(["gcc", *flags, "-o", target / f"lib{library}.so", source], check=True)
    return target
