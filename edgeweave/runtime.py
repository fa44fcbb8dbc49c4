"""Settings of the whole process that decide how fast large tensors come and go.

An output of tens of megabytes costs as much in page faults as in arithmetic: by default glibc
hands each large block back to the kernel when it is freed, and the next tensor of that size pays
for every page again. `tune_allocator` makes glibc keep what was freed. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["AllocatorInfo", "allocator_info", "transparent_huge_pages", "tune_allocator"]

# Parameters of mallopt(3); the numbers are glibc's ABI, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2 << 20

_THP_MODE_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# A function that only the named allocator exports.
_MARKERS = {"mallctl": "jemalloc", "tc_version": "tcmalloc", "mi_version": "mimalloc"}

_lock = threading.Lock()
_tuned = False
_heap_advised = False


@dataclass(frozen=True)
class AllocatorInfo:
    """What serves `malloc` in this process, and how it is set.

    Attributes:
        name: `glibc`, `musl`, `jemalloc`, `tcmalloc`, `mimalloc`, or another library's file name.
        version: Its version, or `unknown`.
        tuned: Freed memory stays with the process, set by `tune_allocator` or by the environment.
        huge_pages: Large blocks are backed by huge pages where the kernel has them to give.
    """

    name: str
    version: str
    tuned: bool
    huge_pages: bool


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("fname", ctypes.c_char_p),
        ("fbase", ctypes.c_void_p),
        ("sname", ctypes.c_char_p),
        ("saddr", ctypes.c_void_p),
    )


def transparent_huge_pages() -> str:
    """Return how the kernel gives out huge pages.

    Returns:
        `always`, `madvise` (to memory that asks, as edgeweave's large outputs do), `never`, or
        `unavailable` where the kernel has none.

    Example:
        >>> from edgeweave.runtime import transparent_huge_pages
        >>> transparent_huge_pages() in {"always", "madvise", "never", "unavailable"}
        True
    """
    try:
        modes = _THP_MODE_FILE.read_text(encoding="ascii")
    except OSError:
        return "unavailable"
    return modes.partition("[")[2].partition("]")[0] or "unavailable"


def _malloc_library() -> str:
    """Return the file that `malloc` resolves to, an LD_PRELOAD considered."""
    # A library that is merely loaded proves nothing (pyarrow carries a private jemalloc), so ask
    # the loader which one answers to the name.
    loader = ctypes.CDLL(None)
    info = _DlInfo()
    address = ctypes.cast(loader.malloc, ctypes.c_void_p)
    if not loader.dladdr(address, ctypes.byref(info)) or info.fname is None:
        return "unknown"
    return _behind_executable(os.fsdecode(info.fname))


def _behind_executable(library: str) -> str:
    """Return what answers to `malloc` where the loader names the executable itself.

    One that is not position-independent (the python3 of Ubuntu) has an address of its own for each
    function that it takes the address of, which only jumps to the real one.
    """
    try:
        # Libraries are named by their paths, the executable as it was called: maybe `python3`.
        if "/" in library and not os.path.samefile(library, "/proc/self/exe"):
            return library
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # a file replaced since it was loaded, or another C library
        return library
    everything = ctypes.CDLL(None)
    if any(hasattr(everything, symbol) for symbol in _MARKERS):
        return library  # an allocator inside the executable, or before the C library
    info = _DlInfo()
    address = ctypes.cast(libc.malloc, ctypes.c_void_p)
    if not everything.dladdr(address, ctypes.byref(info)) or info.fname is None:
        return library
    return os.fsdecode(info.fname)


def _exports(library: str, symbol: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(library), symbol)
    except OSError:  # the executable itself, or a file replaced since it was loaded
        return hasattr(ctypes.CDLL(None), symbol)


def _jemalloc_version(library: ctypes.CDLL) -> str:
    text = ctypes.c_char_p()
    size = ctypes.c_size_t(ctypes.sizeof(text))
    failed = library.mallctl(b"version", ctypes.byref(text), ctypes.byref(size), None, 0)
    return "unknown" if failed or text.value is None else text.value.decode()


def _identify(library: str) -> tuple[str, str]:
    """Return the name and version of the allocator that lives in a shared library."""
    file_name = Path(library).name
    everything = ctypes.CDLL(None)
    for symbol, name in _MARKERS.items():
        if not _exports(library, symbol):
            continue
        if name == "jemalloc":
            return name, _jemalloc_version(everything)
        if name == "tcmalloc":
            everything.tc_version.restype = ctypes.c_char_p
            return name, everything.tc_version(None, None, None).decode()
        return name, str(everything.mi_version())
    if "musl" in file_name:
        return "musl", "unknown"
    if file_name.startswith("libc.so") or file_name.startswith("libc-"):
        everything.gnu_get_libc_version.restype = ctypes.c_char_p
        return "glibc", everything.gnu_get_libc_version().decode()
    return file_name, "unknown"


def _glibc_tunable(name: str) -> str | None:
    """Return the value of a malloc tunable that the process was started with."""
    for item in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        key, _, value = item.partition("=")
        if key == f"glibc.malloc.{name}":
            return value
    return None


def _tuned_by_environment() -> bool:
    """Return whether the process was started with glibc told to keep large blocks."""
    return "0" in (_glibc_tunable("mmap_max"), os.environ.get("MALLOC_MMAP_MAX_"))


def _huge_pages(name: str) -> bool:
    mode = transparent_huge_pages()
    if mode in ("never", "unavailable"):
        return False
    if mode == "always":
        return True
    if name == "glibc":
        return _heap_advised or _glibc_tunable("hugetlb") in ("1", "2")
    return name == "jemalloc" and "thp:always" in os.environ.get("MALLOC_CONF", "")


def allocator_info() -> AllocatorInfo:
    """Return which allocator this process uses and whether it keeps freed memory.

    Returns:
        Name, version and state; computed anew at each call.

    Raises:
        RuntimeError: The operating system is not Linux.

    Example:
        >>> from edgeweave.runtime import allocator_info
        >>> allocator_info().name in {"glibc", "musl", "jemalloc", "tcmalloc", "mimalloc"}
        True
    """
    if not sys.platform.startswith("linux"):
        raise RuntimeError(
            f"allocator_info: operating system must be Linux, got {platform.system()}; "
            "use the system's own tools"
        )
    name, version = _identify(_malloc_library())
    tuned = name == "glibc" and (_tuned or _tuned_by_environment())
    return AllocatorInfo(name=name, version=version, tuned=tuned, huge_pages=_huge_pages(name))


@functools.cache
def _serves_glibc() -> bool:
    # A process cannot change its malloc, and to ask the loader costs more than a small product.
    return _identify(_malloc_library())[0] == "glibc"


def _returns_freed_blocks() -> bool:
    """Return whether large blocks go back to the kernel once freed, as far as is known.

    Cheap, unlike `allocator_info`, and no error off Linux: for code that asks at each call.
    """
    if not sys.platform.startswith("linux"):
        return False
    return _serves_glibc() and not (_tuned or _tuned_by_environment())


def _advise_heap() -> bool:
    """Ask for huge pages under the part of the heap that is still to come.

    A block of half the machine's memory is taken from the top of the heap, marked and given back
    untouched: it costs addresses, not memory, and the heap later grows into the marked range.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    reserve_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    block = libc.malloc(reserve_bytes)
    if not block:  # a limit on the address space, or strict overcommit: keep small pages
        return False
    start = -(-block // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = (block + reserve_bytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    refused = libc.madvise(start, end - start, _MADV_HUGEPAGE)
    libc.free(block)
    return not refused


def tune_allocator() -> AllocatorInfo:
    """Make glibc's malloc keep freed memory, so that large tensors stop paying for page faults.

    What LD_PRELOAD of another allocator does for a process, done from inside it: large blocks come
    from the heap rather than from `mmap`, the heap is never trimmed, all threads share one arena
    (a second arena cannot hold a block above 64 MiB), and the heap asks for huge pages. Blocks in
    use stay where they are, so call it early, at best before the first large tensor. A second call
    does nothing. The price: the process keeps its peak memory until it ends.

    Returns:
        The allocator as it is set now.

    Raises:
        RuntimeError: The process uses another allocator than glibc's, which has its own settings,
            or glibc refuses one of them.

    Example:
        At the top of a training script (no doctest: it would tune the test run itself)::

            import edgeweave.runtime

            edgeweave.runtime.tune_allocator()
    """
    global _tuned, _heap_advised
    with _lock:
        info = allocator_info()
        if info.name != "glibc":
            raise RuntimeError(
                f"tune_allocator: allocator must be glibc's malloc, got {info.name} "
                f"{info.version} from {_malloc_library()}; set {info.name} through its own "
                "options, or start the process without LD_PRELOAD"
            )
        if _tuned:
            return info
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1)):
            if not mallopt(option, value):
                raise RuntimeError(
                    f"tune_allocator: mallopt({option}, {value}) must be accepted, got a refusal "
                    f"from glibc {info.version}; use LD_PRELOAD with another allocator"
                )
        if transparent_huge_pages() in ("always", "madvise"):
            _heap_advised = _advise_heap()
        _tuned = True
        return replace(info, tuned=True, huge_pages=_huge_pages(info.name))
