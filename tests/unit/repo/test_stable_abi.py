"""The native library asks torch for nothing but functions of the stable ABI of torch 2.10.

That is what lets one binary load on each torch from 2.10 on. `scripts/stable_abi_2_10.txt` lists
those functions, made from the headers and the exports of torch 2.10.0 itself.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import edgeweave
from scripts.check_wheel import check_dependencies
from scripts.elf import ElfFile, Symbol

ROOT = Path(__file__).resolve().parents[3]
_TORCH_NAMESPACE = re.compile(r"_Z\w*?(?:2at|3c10|5torch|6caffe2)\w*")


@pytest.fixture(scope="module")
def library() -> ElfFile:
    return ElfFile(Path(edgeweave.__file__).parent / "_C.so")


@pytest.fixture(scope="module")
def wanted(library: ElfFile) -> list[Symbol]:
    # What the system's libraries provide carries a version; torch's symbols have none.
    return [s for s in library.dynamic_symbols() if not s.defined and not s.version]


@pytest.fixture(scope="module")
def stable() -> set[str]:
    return set((ROOT / "scripts" / "stable_abi_2_10.txt").read_text().split())


def test_every_undefined_torch_symbol_is_a_shim_of_2_10(
    wanted: list[Symbol], stable: set[str]
) -> None:
    # Weak ones are optional hooks of the C runtime (such as __gmon_start__), never torch's.
    names = {s.name for s in wanted if s.binding != "weak"}
    assert names, "the library must call torch somehow"
    assert names <= stable, f"not in the stable ABI of torch 2.10: {sorted(names - stable)}"


def test_no_cxx_symbol_of_torch_is_wanted(library: ElfFile) -> None:
    names = {s.name for s in library.dynamic_symbols() if not s.defined}
    assert not {name for name in names if _TORCH_NAMESPACE.fullmatch(name)}


def test_only_torch_and_the_system_are_needed(library: ElfFile) -> None:
    assert [text for text in check_dependencies(library) if text.startswith("needs")] == []


def test_no_second_openmp_runtime_is_needed(library: ElfFile) -> None:
    assert not [name for name in library.needed() if "omp" in name]


def test_the_list_is_of_2_10_and_no_later(stable: set[str]) -> None:
    assert "torch_parallel_for" in stable  # new in 2.10
    assert "aoti_torch_get_sizes" in stable
    later = {"torch_from_blob", "torch_library_def_with_tags", "torch_exception_get_what"}
    assert not stable & later


def test_this_torch_still_exports_the_whole_list(stable: set[str]) -> None:
    exported: set[str] = set()
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.so"):
        exported |= {s.name for s in ElfFile(path).dynamic_symbols() if s.defined}
    assert stable <= exported
