"""Run tests against a library that was built with AddressSanitizer (`make sanitize`).

The sanitizer's runtime must come first in the process, so it is preloaded into a second one. There
every tensor has red zones: torch's memory comes from the sanitizer's malloc too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Those that give tensors of every kind to every op; the rest of the tests never reaches a kernel.
_TESTS = (
    "tests/unit/scatter",
    "tests/unit/sparse",
    "tests/unit/plan",
    "tests/unit/graphfuse/test_vectors.py",
    "tests/unit/graphfuse/test_tiles.py",
    "tests/unit/graphfuse/test_interactions.py",
)
# It wants freed memory to come back at the same address, which the sanitizer prevents.
_LEFT_OUT = "tests/unit/plan/test_cache_hits.py::test_addresses_are_never_trusted"
_CXX = "libstdc++.so"
_FUZZ = ("tests/fuzz/op_surface.py", "--examples", "100")
# Before anything imports edgeweave: it loads its library once, by path.
_LOAD_THIS_ONE = """
import runpy, sys, torch
library = sys.argv.pop(1)
load = torch.ops.load_library
torch.ops.load_library = lambda path: load(library)
sys.path.insert(0, {root!r})
sys.argv.pop(0)
if sys.argv[0] == "pytest":
    import pytest
    sys.exit(pytest.main(sys.argv[1:]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def linked_as(library: Path, start: str) -> str:
    """Return the path of the library, of a name that starts so, that this one was linked with."""
    linked = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    for line in linked.splitlines():
        name, _, target = line.strip().partition(" => ")
        if name.startswith(start):
            return target.split(" (")[0]
    sys.exit(f"run_sanitized: library must be linked with {start}, as by make sanitize: {library}")


def main() -> int:
    """Run the tests and the fuzz; return the first exit status that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("tests", nargs="*", default=_TESTS)
    args = parser.parse_args()
    library = args.library.resolve()
    environment = dict(os.environ)
    # And the C++ library: the sanitizer looks for the function that throws when the process starts.
    environment["LD_PRELOAD"] = f"{linked_as(library, 'libasan.so')} {linked_as(library, _CXX)}"
    # The interpreter frees nothing at exit; and an allocation too large is an error to raise.
    environment["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
    environment["UBSAN_OPTIONS"] = "print_stacktrace=1"
    start = [sys.executable, "-c", _LOAD_THIS_ONE.format(root=str(ROOT)), str(library)]
    for command in (
        [
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--capture=sys",
            "--deselect",
            _LEFT_OUT,
            *args.tests,
        ],
        [*_FUZZ],
    ):
        status = subprocess.run([*start, *command], env=environment, cwd=ROOT).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
