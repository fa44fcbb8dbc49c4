"""Check that a wheel is what its name says, so that pip never installs it where it cannot run.

The shared library must ask for no newer glibc, libstdc++ or compiler runtime than the manylinux
tag allows, need only torch's own libraries beside the system's, and carry no path of the machine
that built it; the wheel must hold the package and nothing else.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.elf import ElfFile

# The newest symbol versions of manylinux_2_28 (PEP 600, and AlmaLinux 8's own libraries).
_NEWEST = {
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 25),
    "CXXABI": (1, 3, 11),
    "GCC": (8, 0, 0),
}
_SYSTEM_LIBRARY = re.compile(r"(?:lib(?:c|m|dl|rt|pthread|gcc_s|stdc\+\+)|ld-linux-[\w-]+)\.so\.\d")
_TORCH_LIBRARY = re.compile(r"lib(?:torch|torch_cpu|c10)\.so")
_TAG = re.compile(r"py3-none-manylinux_2_28_\w+")


def check_versions(library: ElfFile) -> Iterator[str]:
    """Yield a complaint for each symbol that is too new for manylinux_2_28."""
    for symbol in library.dynamic_symbols():
        family, _, number = symbol.version.partition("_")
        if symbol.defined or family not in _NEWEST:
            continue
        if tuple(int(n) for n in re.findall(r"\d+", number)) > _NEWEST[family]:
            yield f"{symbol.name} needs {symbol.version}, too new for manylinux_2_28"


def check_dependencies(library: ElfFile) -> Iterator[str]:
    """Yield a complaint for each foreign library, and for any built-in search path."""
    for name in library.needed():
        if not _SYSTEM_LIBRARY.fullmatch(name) and not _TORCH_LIBRARY.fullmatch(name):
            yield f"needs {name}, which neither torch nor the system brings"
    for path in library.search_paths():
        if not path.startswith("$ORIGIN"):
            yield f"searches {path}, a path of the machine that built it"


def check_contents(names: list[str]) -> Iterator[str]:
    """Yield a complaint for what is missing from the wheel, or has no business in it."""
    for wanted in ("edgeweave/__init__.py", "edgeweave/_C.so", "edgeweave/py.typed"):
        if names.count(wanted) != 1:
            yield f"must hold {wanted} once, holds it {names.count(wanted)} times"
    for suffix in ("/entry_points.txt", "/licenses/LICENSE"):
        if not any(name.endswith(suffix) for name in names):
            yield f"must hold *.dist-info{suffix}"
    for name in names:
        if not name.startswith("edgeweave/") and ".dist-info/" not in name:
            yield f"holds {name}, which would land beside other people's packages"


def complaints(path: Path) -> list[str]:
    """Return everything that is wrong with one wheel."""
    found = []
    if not _TAG.fullmatch("-".join(path.stem.split("-")[2:])):
        found.append("tag must be py3-none-manylinux_2_28_<machine>")
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        names = wheel.namelist()
        found += check_contents(names)
        for name in names:
            if name.endswith(".so"):
                library = ElfFile(wheel.extract(name, folder))
                found += [f"{name} {text}" for text in check_versions(library)]
                found += [f"{name} {text}" for text in check_dependencies(library)]
    return found


def main() -> int:
    """Check the wheels of the command line; return 1 if any has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, nargs="+")
    faults = 0
    for path in parser.parse_args().wheels:
        found = complaints(path)
        for text in found:
            print(f"{path.name}: {text}", file=sys.stderr)
        faults += len(found)
        size_mib = path.stat().st_size / 2**20
        print(f"{path.name}: {size_mib:.1f} MiB, {len(found)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
