"""`edgeweave doctor`: what it finds here, and what it says about machines that lack something."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import edgeweave
from edgeweave import _native, cli
from edgeweave.cli import _doctor, _probes
from edgeweave.cli._probes import Finding

Run = Callable[..., "subprocess.CompletedProcess[str]"]
_DOCTOR = "import sys; from edgeweave.cli import main; sys.exit(main(['doctor', '--json']))"


def _report(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(done.stdout)["findings"]


@pytest.fixture
def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away the variables that the doctor remarks on."""
    for name in ("EDGEWEAVE_ISA", "EDGEWEAVE_DNNL", "CXX"):
        monkeypatch.delenv(name, raising=False)


def test_the_core_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    findings = report["findings"]
    assert findings["versions"]["torch"]["value"] == torch.__version__
    assert findings["core"]["active ISA"]["value"] == edgeweave.active_isa()
    assert edgeweave.active_isa() in findings["core"]["supported ISAs"]["value"]
    assert findings["core"]["self-test"]["status"] == "ok"
    assert findings["threads"]["torch threads"]["value"] == torch.get_num_threads()
    assert set(findings) == {
        "versions",
        "core",
        "processor",
        "threads",
        "memory",
        "oneDNN",
        "tools",
    }


def test_plain_text_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "The core works."
    assert "versions" in lines
    assert any(line.split()[:2] == ["torch", torch.__version__] for line in lines)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "nonsense"])
def test_a_forced_isa(run_python: Run, isa: str) -> None:
    done = run_python(_DOCTOR, env={"EDGEWEAVE_ISA": isa}, check=False)
    report = _report(done)
    if isa in _native.supported_isas():
        assert done.returncode == 0
        assert report["core"]["active ISA"]["value"] == isa
        assert report["processor"]["EDGEWEAVE_ISA"]["remedy"] == "unset EDGEWEAVE_ISA"
    else:
        assert done.returncode == 1
        assert report["core"]["native library"]["status"] == "broken"
        assert isa in report["core"]["native library"]["value"]
        assert report["core"]["native library"]["remedy"] == "unset EDGEWEAVE_ISA"


def test_the_doctor_runs_without_any_extra(run_python: Run) -> None:
    hide = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rich", "torch_geometric", "matplotlib", "pandas"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
sys.stdout.isatty = lambda: True
from edgeweave.cli import main
sys.exit(main(["doctor"]))
"""
    assert run_python(hide).stdout.endswith("The core works.\n")


def test_a_terminal_gets_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "what mends it" in out
    assert torch.__version__ in out


def test_a_core_that_computes_wrong_sums_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edgeweave.sparse, "mm", lambda edges, x: torch.ones(3, 1))
    findings = {finding.name: finding for finding in _probes.find_core()}
    assert findings["self-test"].status == "broken"
    assert "got [1.0, 1.0, 1.0]" in str(findings["self-test"].value)


def test_a_core_that_raises_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(edges: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise OSError("no such kernel")

    monkeypatch.setattr(edgeweave.sparse, "mm", fail)
    findings = {finding.name: finding for finding in _probes.find_core()}
    assert findings["self-test"].status == "broken"
    assert "OSError: no such kernel" in str(findings["self-test"].value)


@pytest.mark.parametrize(
    ("versions", "status", "remedy"),
    [
        ({"torch": "2.9.1"}, "broken", 'pip install "torch>=2.10"'),
        ({"torch": "2.10.0+cpu"}, "ok", ""),
        ({"torch": "3.0.0"}, "ok", ""),
        ({"scipy": None}, "broken", "pip install scipy"),
        ({"torch-geometric": None}, "missing", 'pip install "edgeweave[pyg]"'),
        ({"edgeweave": None}, "ok", ""),
    ],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], status: str, remedy: str
) -> None:
    real = importlib.metadata.version

    def version(package: str) -> str:
        found = versions.get(package, "")
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found or real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (package,) = versions
    (finding,) = [f for f in _probes.find_versions() if f.name == package]
    assert (finding.status, finding.remedy) == (status, remedy)


def test_processor_features(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = "processor : 0\nmodel name\t: Some CPU\nflags\t\t: sse2 fma avx2 amx_tile\n\n"
    monkeypatch.setattr(Path, "read_text", lambda self, encoding=None: cpuinfo)
    findings = {finding.name: finding.value for finding in _probes.find_processor()}
    assert findings["model"] == "Some CPU"
    assert findings["features"] == ["avx2", "fma", "amx_tile"]


def test_unified_cgroup_limits_nest(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert _probes.cgroup_cpu_limit("0::/outer/inner\n", tmp_path) == 1.5
    assert _probes.cgroup_cpu_limit("0::/elsewhere/in/a/container\n", tmp_path) is None


def test_legacy_cgroup_limit(tmp_path: Path) -> None:
    group = tmp_path / "cpu" / "job"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("50000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert _probes.cgroup_cpu_limit("4:memory:/job\n3:cpu,cpuacct:/job\n", tmp_path) == 0.5
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert _probes.cgroup_cpu_limit("3:cpu,cpuacct:/job\n", tmp_path) is None


def test_more_threads_than_processors_is_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(_probes, "cgroup_cpu_limit", lambda text: 1.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    findings = {finding.name: finding for finding in _probes.find_threads()}
    assert findings["control group limit"].value == 1.5
    assert findings["torch threads"].status == "advice"
    assert findings["torch threads"].remedy == "export OMP_NUM_THREADS=1"


_FAKE_DNNL = """
struct version { int major, minor, patch; const char *hash; };
static const struct version value = {3, 99, 7, "test"};
const struct version *dnnl_version(void) { return &value; }
"""


def test_an_explicit_onednn_is_the_one_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = tmp_path / "dnnl.c", tmp_path / "libdnnl.so.3"
    source.write_text(_FAKE_DNNL)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("EDGEWEAVE_DNNL", str(library))
    (finding,) = _probes.find_onednn()
    assert (finding.value, finding.status) == (f"3.99.7 ({library})", "ok")


def test_the_onednn_of_the_pip_wheel_comes_before_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_advice: None
) -> None:
    bundled = tmp_path / "lib" / "libdnnl.so.3"
    bundled.parent.mkdir()
    bundled.touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    asked = []
    monkeypatch.setattr(_probes, "_dnnl_version", lambda library: asked.append(library) or "3.2.0")
    (finding,) = _probes.find_onednn()
    assert asked == [str(bundled)]
    assert finding.value == f"3.2.0 ({bundled})"


@pytest.mark.parametrize(
    ("explicit", "remedy"),
    [(None, 'pip install "edgeweave[onednn]"'), ("/nowhere.so", "unset EDGEWEAVE_DNNL")],
)
def test_no_onednn(
    monkeypatch: pytest.MonkeyPatch, no_advice: None, explicit: str | None, remedy: str
) -> None:
    def fail(library: str) -> str:
        raise OSError(f"{library}: cannot open shared object file")

    monkeypatch.setattr(_probes, "_dnnl_version", fail)
    if explicit is not None:
        monkeypatch.setenv("EDGEWEAVE_DNNL", explicit)
    (finding,) = _probes.find_onednn()
    assert (finding.status, finding.remedy) == ("missing", remedy)
    assert "cannot open shared object file" in str(finding.value)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, no_advice: None) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    (finding,) = _probes.find_tools()
    assert (finding.status, finding.remedy) == ("missing", "apt-get install g++")


def test_huge_pages_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeweave.runtime.transparent_huge_pages", lambda: "never")
    findings = {finding.name: finding for finding in _probes.find_memory()}
    assert findings["huge pages"].status == "advice"
    assert findings["huge pages"].remedy.startswith("echo madvise | sudo tee /sys/kernel/mm/")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ("ok", 0, "The core works."),
        ("advice", 0, "The core works."),
        ("missing", 0, "The core works."),
        ("broken", 1, "The core does not work"),
    ],
)
def test_exit_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: _probes.Status,
    code: int,
    words: str,
) -> None:
    finding = Finding("part", "thing", None, status, "mend it")
    monkeypatch.setattr(_doctor, "PROBES", (lambda: [finding],))
    assert cli.main(["doctor"]) == code
    out = capsys.readouterr().out
    assert words in out
    assert "thing  not installed" in out
    assert "-> mend it" in out
