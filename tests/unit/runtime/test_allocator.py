"""The allocator settings, each in a process of its own: mallopt cannot be undone."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeweave import runtime

# The module alone, without the package: it needs no torch, so a process starts in no time.
_LOAD = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("runtime", {runtime.__file__!r})
runtime = importlib.util.module_from_spec(spec)
sys.modules["runtime"] = runtime
spec.loader.exec_module(runtime)
"""


def run_alone(code: str, *args: str, **env: str) -> str:
    """Run code in a process that has `runtime` loaded, and return what it prints."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD + code, *args],
        env=inherited | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Prints how many pages the process touched for the first time while it filled blocks of 64 MiB.
_COUNT_FAULTS = """
import ctypes, json, resource, threading

if "tune" in sys.argv:
    runtime.tune_allocator()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def fill(rounds):
    for _ in range(rounds):
        block = libc.malloc(64 << 20)
        libc.memset(block, 1, 64 << 20)
        libc.free(block)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def measure():
    fill(2)
    before = faults()
    fill(4)
    counts.append(faults() - before)

counts = []
measure()
thread = threading.Thread(target=measure)
thread.start()
thread.join()
print(json.dumps(counts))
"""

_PAGES = (64 << 20) // 4096


def test_freed_memory_is_kept_in_every_thread() -> None:
    main, other = json.loads(run_alone(_COUNT_FAULTS, "tune"))
    assert main < _PAGES / 10
    assert other < _PAGES / 10


def test_without_tuning_every_block_faults_again() -> None:
    """The control: if this fails, the test above proves nothing."""
    # Huge pages, where the system gives them to all, would divide the count by 512.
    pages = _PAGES / 512 if runtime.transparent_huge_pages() == "always" else _PAGES
    main, other = json.loads(run_alone(_COUNT_FAULTS))
    assert main > 3 * pages
    assert other > 3 * pages


def test_tuning_reports_itself_and_twice_is_once() -> None:
    code = """
before = runtime.allocator_info()
first = runtime.tune_allocator()
assert first == runtime.tune_allocator() == runtime.allocator_info()
assert (before.name, before.tuned) == ("glibc", False)
assert (first.name, first.version, first.tuned) == ("glibc", before.version, True)
print(first.huge_pages, runtime.transparent_huge_pages())
"""
    huge_pages, mode = run_alone(code).split()
    assert huge_pages == str(mode in ("always", "madvise"))


def test_tuning_works_under_a_limit_on_the_address_space() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
info = runtime.tune_allocator()
assert info.tuned
"""
    run_alone(code)


@pytest.mark.parametrize(
    "env", [{"MALLOC_MMAP_MAX_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}]
)
def test_settings_of_the_environment_count_as_tuned(env: dict[str, str]) -> None:
    code = "print(runtime.allocator_info().tuned)"
    assert run_alone(code, **env) == "True"
    assert run_alone(code) == "False"


def test_a_child_of_fork_inherits_the_tuning() -> None:
    code = """
import os
runtime.tune_allocator()
if (child := os.fork()) == 0:
    os._exit(0 if runtime.allocator_info().tuned else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run_alone(code)


_FAKE_JEMALLOC = r"""
#include <stddef.h>
void *__libc_malloc(size_t);
void *malloc(size_t n) { return __libc_malloc(n); }
int mallctl(const char *name, const char **old, size_t *size, void *next, size_t next_size) {
  *old = "5.9-test";
  return 0;
}
"""


@pytest.fixture(scope="module")
def other_allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that answers to `malloc` and looks like jemalloc."""
    folder = tmp_path_factory.mktemp("allocator")
    source, library = folder / "fake.c", folder / "libjemalloc.so.2"
    source.write_text(_FAKE_JEMALLOC)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_another_allocator_is_named_and_refused(other_allocator: Path) -> None:
    code = """
info = runtime.allocator_info()
assert (info.name, info.version, info.tuned) == ("jemalloc", "5.9-test", False), info
try:
    runtime.tune_allocator()
except RuntimeError as error:
    print(error)
"""
    assert run_alone(code, LD_PRELOAD=str(other_allocator)).startswith(
        f"tune_allocator: allocator must be glibc's malloc, got jemalloc 5.9-test from "
        f"{other_allocator}; set jemalloc through its own options"
    )


def test_a_library_that_is_only_loaded_is_not_the_allocator(other_allocator: Path) -> None:
    code = f"""
import ctypes
ctypes.CDLL({str(other_allocator)!r})
assert runtime.allocator_info().name == "glibc"
"""
    run_alone(code)


def test_an_executable_that_jumps_to_the_c_library_is_not_the_allocator() -> None:
    # What the loader says of `malloc` where python3 is not position-independent, as Ubuntu's.
    for said in (os.path.realpath("/proc/self/exe"), "python3"):
        found = runtime._behind_executable(said)
        assert Path(found).name.startswith(("libc.so", "libc-"))
        assert runtime._identify(found)[0] == "glibc"
        assert runtime._behind_executable(found) == found
    assert runtime._behind_executable("/no/such/file") == "/no/such/file"


def test_the_module_needs_no_torch() -> None:
    """So that a program can tune before torch makes its first blocks."""
    run_alone("""
assert runtime.tune_allocator().tuned
assert not {"torch", "numpy", "edgeweave"} & set(sys.modules)
""")


def test_info_is_frozen() -> None:
    info = runtime.allocator_info()
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.tuned = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("always [madvise] never\n", "madvise"),
        ("[always] madvise never\n", "always"),
        ("always madvise [never]\n", "never"),
        ("", "unavailable"),
    ],
)
def test_huge_page_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, mode: str
) -> None:
    path = tmp_path / "enabled"
    path.write_text(text)
    monkeypatch.setattr(runtime, "_THP_MODE_FILE", path)
    assert runtime.transparent_huge_pages() == mode


def test_a_kernel_without_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_THP_MODE_FILE", tmp_path / "absent")
    assert runtime.transparent_huge_pages() == "unavailable"
    assert not runtime.allocator_info().huge_pages


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="operating system must be Linux"):
        runtime.allocator_info()


def test_a_refused_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Callable[..., int]:
            assert name == "mallopt"
            return lambda option, value: 0

    real = runtime.allocator_info()
    monkeypatch.setattr(runtime, "allocator_info", lambda: real)
    monkeypatch.setattr(runtime, "_tuned", False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Refusing())
    with pytest.raises(RuntimeError, match=r"mallopt\(-4, 0\) must be accepted, got a refusal"):
        runtime.tune_allocator()
