"""Write the list of functions that torch's stable ABI has had since a given release.

The list beside this file, stable_abi_2_10.txt, is what tests/unit/repo/test_stable_abi.py holds
the native library to. It is made from an unpacked torch wheel of that release (an aarch64 wheel is
small, and its headers are the same):

    pip download --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 torch==2.10.0
    unzip -q torch-2.10.0-*.whl -d torch-2.10
    python scripts/list_stable_abi.py torch-2.10 > scripts/stable_abi_2_10.txt
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.elf import ElfFile

# The three headers that torch/csrc/stable stands on. c_shim_cpu.h is left out on purpose: it is
# generated for compiled models and changes with Inductor.
HEADERS = (
    "torch/csrc/inductor/aoti_torch/c/shim.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h",
    "torch/csrc/stable/c/shim.h",
)
_DECLARATION = re.compile(r"\b((?:aoti_)?torch_\w+)\s*\(")
_LIBRARY = "torch/lib/libtorch_cpu.so"


def main() -> int:
    """Print the sorted names, those both declared by a header and exported by the library."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="folder into which the wheel was unpacked")
    root = parser.parse_args().root
    declared = {
        name
        for header in HEADERS
        for name in _DECLARATION.findall((root / "torch/include" / header).read_text())
    }
    exported = {s.name for s in ElfFile(root / _LIBRARY).dynamic_symbols() if s.defined}
    print("\n".join(sorted(declared & exported)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
