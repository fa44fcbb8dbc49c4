"""Install a wheel into a new virtual environment and use it with no compiler on the path."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

# Runs inside the new environment.
_TRIAL = """
import shutil, sys

compilers = [name for name in ("cc", "c++", "gcc", "g++", "clang", "clang++") if shutil.which(name)]
assert not compilers, compilers

import torch
import edgeweave
import edgeweave.scatter
import edgeweave.sparse

assert edgeweave.__file__.startswith(sys.prefix), edgeweave.__file__
edges = torch.randint(0, 50, (2, 400), generator=torch.Generator().manual_seed(0))
x = torch.arange(50 * 16, dtype=torch.float32).reshape(50, 16).requires_grad_()
out = edgeweave.sparse.mm(edges, x)
expected = torch.zeros(50, 16).index_add(0, edges[1], x.detach()[edges[0]])
assert torch.equal(out, expected)  # sums of small integers are exact
out.sum().backward()
assert torch.equal(x.grad[:, 0], torch.bincount(edges[0], minlength=50).float())
same = edgeweave.scatter.scatter_reduce(x.detach()[edges[0]], edges[1], dim_size=50)
assert torch.equal(same, expected)
print(f"edgeweave {edgeweave.__version__} ({edgeweave.active_isa()}), torch {torch.__version__}")
"""


def main() -> int:
    """Make the environment, install, try; any failure raises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="torch>=2.10", help="requirement to install beside it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgeweave-wheel-") as folder:
        venv.create(folder, with_pip=True)
        binaries = Path(folder) / "bin"
        pip = (binaries / "python", "-m", "pip", "--disable-pip-version-check")
        wanted = (args.torch, args.wheel.resolve())
        subprocess.run([*pip, "install", "-q", "--no-compile", *wanted], check=True)
        # The environment's own programs and nothing else; no variable of ours leaks in.
        environment = {"PATH": str(binaries), "HOME": folder, "LANG": "C.UTF-8"}
        trial = {"cwd": folder, "env": environment, "check": True}
        subprocess.run([binaries / "python", "-W", "error", "-c", _TRIAL], **trial)
        report = subprocess.run(
            [binaries / "edgeweave", "doctor", "--json"], stdout=subprocess.PIPE, **trial
        )
        assert json.loads(report.stdout)["ok"], report.stdout
    print(f"{args.wheel.name}: works in a clean environment")
    return 0


if __name__ == "__main__":
    sys.exit(main())
