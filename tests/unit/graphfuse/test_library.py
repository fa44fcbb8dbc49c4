"""Finding and refusing libdnnl, and what happens where there is none."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeweave import graphfuse
from edgeweave.graphfuse import _library

_FUSE = """
import torch
from edgeweave import graphfuse
model = torch.nn.Linear(4, 4).eval()
try:
    graphfuse.fuse(model, torch.randn(2, 4))
except graphfuse.OneDnnUnavailableError as error:
    print("refused:", error)
else:
    print("fused with", graphfuse.load_library().version)
"""


def test_the_version_is_one_that_is_supported() -> None:
    library = graphfuse.load_library()
    major, minor, _ = (int(part) for part in library.version.split("."))
    assert (major, minor) >= (3, 2)
    assert library.path.is_file()
    assert graphfuse.load_library() is library


def test_one_openmp_runtime_and_the_symbols_stay_local(run_python: Callable[..., Any]) -> None:
    code = """
import ctypes, torch
from edgeweave import graphfuse
model = torch.nn.Linear(64, 64).eval()
graphfuse.fuse(model, torch.randn(32, 64), keep="all")
maps = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(len({path for path in maps if "libgomp" in path or "libomp" in path or "iomp" in path}))
print(hasattr(ctypes.CDLL(None), "dnnl_graph_graph_create"))
"""
    assert run_python(code).stdout.split() == ["1", "False"]


def test_without_the_library_it_names_the_command(
    run_python: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; sys.prefix = " + repr(str(tmp_path)) + _FUSE
    found = run_python(code, env={"LD_LIBRARY_PATH": str(tmp_path)}).stdout
    assert "libdnnl.so.3 must be installed" in found
    assert 'pip install "edgeweave[onednn]"' in found


def test_an_explicit_path_must_exist(run_python: Callable[..., Any]) -> None:
    found = run_python(_FUSE, env={"EDGEWEAVE_DNNL": "/nowhere/libdnnl.so.3"}).stdout
    assert "EDGEWEAVE_DNNL must name a file, got '/nowhere/libdnnl.so.3'" in found


def test_an_explicit_path_that_is_no_library(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "libdnnl.so.3"
    path.write_text("text")
    found = run_python(_FUSE, env={"EDGEWEAVE_DNNL": str(path)}).stdout
    assert found.startswith("refused: graphfuse: oneDNN:")
    assert "does not load" in found


def test_a_library_without_the_graph_api(run_python: Callable[..., Any], tmp_path: Path) -> None:
    other = next(Path("/lib").rglob("libm.so.6"))
    path = tmp_path / "libdnnl.so.3"
    shutil.copy(other.resolve(), path)
    found = run_python(_FUSE, env={"EDGEWEAVE_DNNL": str(path)}).stdout
    assert "has no function dnnl_version" in found


@pytest.mark.parametrize("runtime", ["libiomp5.so", "libomp.so.5", "libtbb.so.12"])
def test_another_runtime_is_refused_by_name_before_it_is_loaded(
    run_python: Callable[..., Any], tmp_path: Path, runtime: str
) -> None:
    path = tmp_path / "libdnnl.so.3"
    # No library, but a file with the string in which an ELF file names what it needs.
    path.write_bytes(b"\x7fELF" + bytes(64) + b"\0" + runtime.encode() + b"\0")
    found = run_python(_FUSE, env={"EDGEWEAVE_DNNL": str(path)}).stdout
    assert f"which would bring a second runtime, {runtime}" in found
    assert "must use GNU OpenMP as torch does" in found


def test_the_wheels_own_library_is_not_foreign() -> None:
    assert _library.foreign_runtime(graphfuse.load_library().path) is None


def test_a_build_without_the_bridge_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ops:
        @staticmethod
        def onednn_built() -> bool:
            return False

    monkeypatch.setattr(_library, "ops", Ops)
    monkeypatch.setattr(_library, "_loaded", None)
    with pytest.raises(graphfuse.OneDnnUnavailableError, match="has no oneDNN bridge"):
        graphfuse.load_library()


def test_an_architecture_without_a_wheel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.delenv("EDGEWEAVE_DNNL", raising=False)
    monkeypatch.setattr(_library, "_SYSTEM_FOLDERS", ())
    with pytest.raises(graphfuse.OneDnnUnavailableError, match="no wheel of it for riscv64"):
        _library.find_library()


def test_no_compiler_is_needed(run_python: Callable[..., Any], tmp_path: Path) -> None:
    code = """
import os, shutil
assert shutil.which("g++") is shutil.which("gcc") is shutil.which("cc") is None
import torch
from edgeweave import graphfuse
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
x = torch.randn(2, 3, 8, 8)
made = graphfuse.fuse(model, x, keep="all")
torch.testing.assert_close(made(x), model(x))
compiled = torch.compile(model, backend=graphfuse.edgeweave_onednn)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), model(x))
print(len(made.report().partitions))
"""
    assert run_python(code, env={"PATH": str(tmp_path), "CXX": ""}).stdout.strip() == "1"
