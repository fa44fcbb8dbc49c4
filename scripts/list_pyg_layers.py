"""Write which PyG layers run on edgeweave's kernels: the page of the documentation, and the marks.

    python scripts/list_pyg_layers.py           # the page, on stdout
    python scripts/list_pyg_layers.py --write   # docs/pyg-layers.md and tests/_layer_marks.py

Both are what `edgeweave.pyg.report()` says after each layer of `tests/_every_layer.py` ran once.
The tests compare them with the code, so run this with `--write` when a layer was fused, and look at
the difference: a mark that became worse is a fault.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "pyg-layers.md"
MARKS = ROOT / "tests" / "_layer_marks.py"

_HEAD = """\
# Every PyG layer

<!-- Written by scripts/list_pyg_layers.py --write; a test compares it with the code. -->

What happens to each layer that `torch_geometric.nn.conv` exports, on `[2, E]` edges in float32 on
the CPU. All of them compute what stock PyG computes: `tests/unit/pyg/test_every_layer.py` compares
outputs and all gradients, in both flows where a layer has them. A layer is

- **fused** if messages and their reduction are one, and nothing falls back,
- **partly** if PyG makes the messages, and edgeweave's kernels reduce or normalise them,
- **passed** if all of it is PyG's own code.

"""
_TAIL = """
Compared with simple stand-ins for the functions of `pyg_lib`, which is not on the package index:
`DynamicEdgeConv`, `GravNetConv`, `XConv` (nearest neighbours) and `SplineConv` (its basis).

Not compared, since they need packages that cannot be had here:

"""


def measure() -> dict[str, Any]:
    """Run every case accelerated, once.

    Returns:
        The report of each, by the name of the case.
    """
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what stock PyG and torch say about each other
        from _every_layer import CASES
        from _layer_runs import FLOWS, run_case, stand_ins

        import edgeweave.pyg

        found = {}
        with stand_ins(), edgeweave.pyg.accelerated():
            for case in CASES:
                edgeweave.pyg.reset_report()
                run_case(case, FLOWS[0] if case.flows else None, torch.float32)
                found[case.name] = edgeweave.pyg.report()
    return found


def page(reports: dict[str, Any]) -> str:
    """Return the page of the documentation.

    Args:
        reports: What `measure()` returned.

    Returns:
        Markdown.
    """
    from _every_layer import CASES, UNAVAILABLE
    from _layer_runs import mark_of

    lines = ["| layer | | on edgeweave's kernels | PyG's own code, and why |", "|---|---|---|---|"]
    marks = []
    for case in CASES:
        report = reports[case.name]
        if not case.option:
            marks.append(mark_of(report))
        name = f"`{case.layer}`" + (f", {case.option}" if case.option else "")
        ours = ", ".join(f"`{_short(e.site)}`" for e in report.sites if e.fused)
        whys = [
            f"`{_short(e.site)}`: {why}" for e in report.sites for why in sorted(e.reasons) if why
        ]
        lines.append(f"| {name} | {mark_of(report)} | {ours} | {'; '.join(whys)} |")
    counts = ", ".join(f"{marks.count(mark)} {mark}" for mark in ("fused", "partly", "passed"))
    head = f"Of {len(marks) + len(UNAVAILABLE)} layers with their usual arguments: {counts}, "
    head += f"{len(UNAVAILABLE)} not compared.\n\n"
    missing = [f"- `{layer}`: {reason}" for layer, reason in UNAVAILABLE.items()]
    return _HEAD + head + "\n".join(lines) + "\n" + _TAIL + "\n".join(missing) + "\n"


def marks_file(reports: dict[str, Any]) -> str:
    """Return the text of `tests/_layer_marks.py`.

    Args:
        reports: What `measure()` returned.

    Returns:
        Python source.
    """
    from _layer_runs import mark_of

    lines = [f'    "{name}": "{mark_of(report)}",' for name, report in reports.items()]
    return (
        '"""How much of each case of `_every_layer.py` runs on edgeweave\'s kernels.\n\n'
        "Written by `python scripts/list_pyg_layers.py --write`.\n"
        '"""\n\nMARKS: dict[str, str] = {\n' + "\n".join(lines) + "\n}\n"
    )


def _short(site: str) -> str:
    return site.rpartition(".")[2] if not site.startswith("utils.") else site


def main() -> int:
    """Print the page, or write it and the marks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the page and the marks")
    args = parser.parse_args()
    reports = measure()
    if args.write:
        PAGE.write_text(page(reports))
        MARKS.write_text(marks_file(reports))
        print(f"{PAGE.relative_to(ROOT)}, {MARKS.relative_to(ROOT)}: {len(reports)} cases")
    else:
        print(page(reports), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
