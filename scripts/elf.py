"""Read the symbol tables of 64-bit little-endian ELF files, so that no binutils are needed."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_SHT_GNU_VERNEED, _SHT_GNU_VERSYM = 0x6FFFFFFE, 0x6FFFFFFF
_SHT_DYNAMIC = 6
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29
_BINDINGS = {0: "local", 1: "global", 2: "weak", 10: "unique"}
_TYPES = {0: "none", 1: "object", 2: "func", 3: "section", 4: "file", 6: "tls", 10: "ifunc"}
_VISIBILITIES = ("default", "internal", "hidden", "protected")


@dataclass(frozen=True)
class Symbol:
    """One entry of a symbol table; `version` is such as `GLIBC_2.14`, or empty."""

    name: str
    binding: str
    type: str
    visibility: str
    defined: bool
    version: str


@dataclass(frozen=True)
class _Section:
    type: int
    offset: int
    size: int
    link: int
    info: int
    entry_size: int


class ElfFile:
    """The symbol tables of one ELF file.

    Args:
        path: An object file or a shared library.

    Raises:
        ValueError: The file is not 64-bit little-endian ELF.
    """

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("rb") as file:
            start = file.read(6)
            if start != b"\x7fELF\x02\x01":
                raise ValueError(f"ElfFile: path must be 64-bit little-endian ELF, got {path}")
            # Mapped, not read: torch's library has hundreds of megabytes.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        table_offset = struct.unpack_from("<Q", self._data, 0x28)[0]
        entry_size, count = struct.unpack_from("<HH", self._data, 0x3A)
        if count == 0:  # too many sections for 16 bits: the first one holds the number
            count = struct.unpack_from("<Q", self._data, table_offset + 0x20)[0]
        self._sections = [self._read_section(table_offset + i * entry_size) for i in range(count)]

    def _read_section(self, at: int) -> _Section:
        _, kind, _, _, offset, size, link, info, _, entry_size = struct.unpack_from(
            "<IIQQQQIIQQ", self._data, at
        )
        return _Section(kind, offset, size, link, info, entry_size)

    def _sections_of(self, kind: int) -> Iterator[_Section]:
        return (section for section in self._sections if section.type == kind)

    def _text(self, table: _Section, at: int) -> str:
        start = table.offset + at
        return self._data[start : self._data.find(b"\0", start)].decode()

    def _version_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for section in self._sections_of(_SHT_GNU_VERNEED):
            strings = self._sections[section.link]
            need = section.offset
            for _ in range(section.info):
                _, count, _, aux_step, need_step = struct.unpack_from("<HHIII", self._data, need)
                aux = need + aux_step
                for _ in range(count):
                    _, _, index, name, step = struct.unpack_from("<IHHII", self._data, aux)
                    names[index] = self._text(strings, name)
                    aux += step
                need += need_step
        return names

    def _symbols(self, kind: int) -> Iterator[Symbol]:
        versions = self._version_names()
        indices = next(self._sections_of(_SHT_GNU_VERSYM), None)
        for section in self._sections_of(kind):
            strings = self._sections[section.link]
            for i in range(1, section.size // section.entry_size):
                name, info, other, home = struct.unpack_from(
                    "<IBBH", self._data, section.offset + i * section.entry_size
                )
                version = ""
                if kind == _SHT_DYNSYM and indices is not None:
                    index = struct.unpack_from("<H", self._data, indices.offset + 2 * i)[0]
                    version = versions.get(index & 0x7FFF, "")
                yield Symbol(
                    name=self._text(strings, name),
                    binding=_BINDINGS.get(info >> 4, str(info >> 4)),
                    type=_TYPES.get(info & 15, str(info & 15)),
                    visibility=_VISIBILITIES[other & 3],
                    defined=home != 0,
                    version=version,
                )

    def dynamic_symbols(self) -> list[Symbol]:
        """Return what a shared library exports and what it wants from others."""
        return list(self._symbols(_SHT_DYNSYM))

    def symbols(self) -> list[Symbol]:
        """Return the full symbol table; empty for a stripped file."""
        return list(self._symbols(_SHT_SYMTAB))

    def needed(self) -> list[str]:
        """Return the shared libraries that the loader must find for this one."""
        return list(self._dynamic_strings(_DT_NEEDED))

    def search_paths(self) -> list[str]:
        """Return where the loader looks for them first."""
        entries = (*self._dynamic_strings(_DT_RPATH), *self._dynamic_strings(_DT_RUNPATH))
        return [path for entry in entries for path in entry.split(":")]

    def _dynamic_strings(self, wanted: int) -> Iterator[str]:
        for section in self._sections_of(_SHT_DYNAMIC):
            strings = self._sections[section.link]
            for at in range(section.offset, section.offset + section.size, 16):
                tag, value = struct.unpack_from("<qQ", self._data, at)
                if tag == wanted:
                    yield self._text(strings, value)
