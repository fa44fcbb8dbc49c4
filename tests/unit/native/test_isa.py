"""Each instruction set's kernels, in a process of their own which first asserts the choice."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

import edgeweave

# What /proc/cpuinfo must list before a tier may run. Best last.
TIERS = {
    "baseline": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
}


def cpu_flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def supported(tier: str) -> bool:
    names = list(TIERS)
    needed = set().union(*(TIERS[name] for name in names[: names.index(tier) + 1]))
    return needed <= cpu_flags()


x86_only = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="these tiers exist on x86-64 only"
)


@x86_only
@pytest.mark.parametrize("tier", TIERS)
def test_kernels(tier, run_python):
    if not supported(tier):
        pytest.skip(f"this processor lacks {tier}; its refusal is tested instead")
    done = run_python(script="unit/native/isa_checks.py", args=(tier,), env={"EDGEWEAVE_ISA": tier})
    lines = done.stdout.split("\n")
    assert [line.split(":")[0] for line in lines if line] == [
        f"{tier} {name}"
        for name in ("check_mm", "check_heads", "check_scatter_and_gather", "check_misalignment",
                     "check_bits", "check_family")
    ]  # fmt: skip
    assert all(int(re.search(r": (\d+) cases", line).group(1)) > 0 for line in lines if line)


@x86_only
def test_best_supported_tier_is_chosen(run_python):
    best = [tier for tier in TIERS if supported(tier)][-1]
    done = run_python("import edgeweave; print(edgeweave.active_isa())")
    assert done.stdout.strip() == best


@x86_only
@pytest.mark.parametrize("tier", TIERS)
def test_unsupported_tier_is_refused(tier, run_python):
    if supported(tier):
        pytest.skip("this processor has it; its kernels are tested instead")
    done = run_python("import edgeweave.sparse", env={"EDGEWEAVE_ISA": tier}, check=False)
    assert done.returncode != 0
    assert re.search(rf"EDGEWEAVE_ISA.*{tier}", done.stderr)


@pytest.mark.parametrize("name", ["avx1024", "AVX2x", "native", "avx2,avx512"])
def test_unknown_tier_is_an_error_naming_the_valid_ones(name, run_python):
    done = run_python("import edgeweave.sparse", env={"EDGEWEAVE_ISA": name}, check=False)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"^(\w+\.)*\w+Error: ", last), done.stderr
    assert "EDGEWEAVE_ISA must" in last
    assert name in last
    if platform.machine() in ("x86_64", "AMD64"):
        for tier in filter(supported, TIERS):
            assert tier in last


def test_active_isa_of_this_process():
    assert isinstance(edgeweave.active_isa(), str)
    assert edgeweave.active_isa() in {*TIERS, "neon"}


OPENMP = """
import torch, edgeweave
from edgeweave import sparse
torch.set_num_threads(2)
sparse.mm(torch.randint(0, 200, (2, 30_000)), torch.randn(200, 8))
with open("/proc/self/maps") as maps:
    libraries = {line.split()[-1].rsplit("/", 1)[-1] for line in maps if ".so" in line}
print(sorted(n for n in libraries if n.startswith(("libgomp", "libiomp", "libomp"))))
"""


def test_no_second_openmp_runtime(run_python):
    """Kernels run on torch's pool: loading them adds no OpenMP library of their own."""
    ours = run_python(OPENMP).stdout
    torch_alone = run_python(
        re.sub(r"import torch, edgeweave\n.*\n", "import torch\n", OPENMP).replace(
            "sparse.mm(torch.randint(0, 200, (2, 30_000)), torch.randn(200, 8))",
            "torch.randn(500, 500) @ torch.randn(500, 500)",
        )
    ).stdout
    assert ours == torch_alone
