"""Code compiled for one ISA is never merged with code compiled for another.

An inline function or template that two object files define is kept once by the linker. If one of
the two was compiled for AVX-512, the baseline kernels of an older processor would call it and die.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest

import edgeweave
from scripts.elf import ElfFile, Symbol

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "dev"
# CMake's object libraries, one for each tier.
_TIER = re.compile(r"kernels_(baseline|avx2|avx512|neon)\.dir")


def _is_shared_at_link_time(symbol: Symbol) -> bool:
    # References to a personality routine and the like are data words, the same for every ISA.
    return (
        symbol.defined
        and symbol.binding in ("global", "weak", "unique")
        and not symbol.name.startswith("DW.ref.")
    )


def _tier_of(path: Path) -> str | None:
    found = _TIER.search(str(path.relative_to(BUILD)))
    return found.group(1) if found else None


@pytest.fixture(scope="module")
def symbols_of_tier() -> dict[str, dict[str, str]]:
    """Return, for each tier, the symbols that its objects offer to the linker."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(BUILD.rglob("*.o")):
        tier = _tier_of(path)
        if tier is not None:
            for symbol in filter(_is_shared_at_link_time, ElfFile(path).symbols()):
                found[tier][symbol.name] = path.name
    return found


def test_each_tier_was_built(symbols_of_tier: dict[str, dict[str, str]]) -> None:
    assert {"baseline", "avx2", "avx512"} <= set(symbols_of_tier)
    assert all(symbols_of_tier.values())


def test_no_symbol_is_shared_between_two_tiers(
    symbols_of_tier: dict[str, dict[str, str]],
) -> None:
    shared = {
        (first, second): sorted(set(symbols_of_tier[first]) & set(symbols_of_tier[second]))
        for first, second in combinations(sorted(symbols_of_tier), 2)
    }
    assert not {pair: names for pair, names in shared.items() if names}


def test_no_symbol_of_a_kernel_object_is_shared_with_the_torch_side(
    symbols_of_tier: dict[str, dict[str, str]],
) -> None:
    """The ops are baseline code: an instance from a kernel object would be too new for them."""
    outside: dict[str, str] = {}
    for path in sorted(BUILD.rglob("*.o")):
        if _tier_of(path) is None:
            for symbol in filter(_is_shared_at_link_time, ElfFile(path).symbols()):
                outside[symbol.name] = path.name
    assert outside
    for tier, names in symbols_of_tier.items():
        assert not set(names) & set(outside), tier


def test_the_library_exports_nothing_of_its_kernels() -> None:
    library = ElfFile(Path(edgeweave.__file__).parent / "_C.so")
    exported = [s.name for s in library.dynamic_symbols() if s.defined]
    assert not [name for name in exported if "edgeweave" in name]
