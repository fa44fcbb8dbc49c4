"""Everything the documentation tells people to run runs: examples and Python blocks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import check_docs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
Run = Callable[..., "subprocess.CompletedProcess[str]"]

# What an example prints is its claim.
_CLAIMS = {
    "sparse_mm": ["edge_index: (1000, 64)", "Graph:      True", "scipy:      True"],
    "scatter": [
        "sum  [[4.0, 15.0], [0.0, 0.0], [12.0, 11.0]]",
        "amax [[3.0, 8.0], [0.0, 0.0], [6.0, 5.0]] rows [[2, 0], [5, 5], [4, 1]]",
        "error: scatter_reduce: index must",
    ],
    "pyg_dropin": ["GCNConv", "SAGEConv"],
    "hetero_imdb": ["4,661 movies, 2,270 directors, 5,841 actors", "agree: ", "SAGEConv"],
    "hetero_lastfm": ["92,834 listens", "agree: ", "GraphConv", "SAGEConv"],
    "molecules": ["2,000 of the NCI", "agree: ", "GINEConv"],
    "compile": ["largest difference", "fuse_mm"],
    "serving_client": ["a new paper: (1, 3)", "graph version: 2 2", "answers at once: 20"],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example(run_python: Run, path: Path) -> None:
    out = run_python(script=str(path)).stdout
    assert out.strip()
    for claim in _CLAIMS.get(path.stem, []):
        assert claim in out


def test_the_dropin_example_trains_alike(run_python: Run) -> None:
    out = run_python(script=str(ROOT / "examples" / "pyg_dropin.py")).stdout
    found = re.search(r"largest difference (\S+)", out)
    assert found is not None
    # Ten steps of Adam on fp32 sums in another order: each loss has 24 bits and value about 1.6.
    assert float(found.group(1)) < 1e-4


def _runnable() -> list[tuple[str, str]]:
    """Return, per document, its Python blocks in order; `python no-run` marks the exceptions."""
    documents = []
    for path in check_docs.documents():
        code = [
            block.text
            for block in check_docs.blocks(path.read_text())
            if block.info == "python" and ">>>" not in block.text
        ]
        if code:
            documents.append((str(path.relative_to(ROOT)), "\n".join(code)))
    return documents


@pytest.mark.parametrize(("name", "code"), _runnable(), ids=[name for name, _ in _runnable()])
def test_python_blocks_of(run_python: Run, name: str, code: str) -> None:
    run_python(code)


def test_the_readme_has_an_example_for_each_job() -> None:
    code = dict(_runnable())["README.md"]
    for name in ("edgeweave.accelerated()", "sparse.mm(", "scatter_reduce(", "gather("):
        assert name in code
