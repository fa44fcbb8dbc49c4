"""The ELF reader behind the checks of the native library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.elf import ElfFile

TORCH_LIBRARIES = Path(torch.__file__).parent / "lib"


@pytest.fixture(scope="module")
def c10() -> ElfFile:
    return ElfFile(TORCH_LIBRARIES / "libc10.so")


def test_needed_libraries(c10: ElfFile) -> None:
    assert {"libstdc++.so.6", "libc.so.6"} <= set(c10.needed())


def test_defined_and_undefined_symbols() -> None:
    library = ElfFile(TORCH_LIBRARIES / "libtorch_cpu.so")
    by_name = {symbol.name: symbol for symbol in library.dynamic_symbols()}
    exported = by_name["aoti_torch_get_sizes"]
    assert exported.defined
    assert exported.type == "func"
    assert exported.version == ""
    wanted = by_name["__cxa_throw"]
    assert not wanted.defined
    assert wanted.version.startswith("CXXABI_")


def test_a_stripped_file_has_dynamic_symbols_only(c10: ElfFile) -> None:
    assert c10.symbols() == [] or len(c10.symbols()) >= len(c10.dynamic_symbols())


def test_search_paths_are_split(c10: ElfFile) -> None:
    assert all(":" not in path for path in c10.search_paths())


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(60)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "not-elf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"path must be 64-bit little-endian ELF, got .*not-elf"):
        ElfFile(path)
