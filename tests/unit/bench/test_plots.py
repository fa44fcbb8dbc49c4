"""What the picture of a report shows."""

import json
from pathlib import Path

from edgeweave.bench import plots

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"


def drawn(monkeypatch, name: str) -> list[str]:
    """Labels of the axes of the picture of a report."""
    kept = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: kept.append(figure))
    plots.plot_report(json.loads((RESULTS / name).read_text()), Path("unused.png"))
    return [axes.get_xlabel() for axes in kept[0].axes]


def test_kernels_show_their_distance_to_the_limit(monkeypatch):
    labels = drawn(monkeypatch, "ops-large-avx512-2026-12-01.json")
    assert [label.split(" (")[0] for label in labels] == [
        "times faster, geometric mean",
        "% of the memory's speed",
    ]


def test_models_do_not(monkeypatch):
    labels = drawn(monkeypatch, "models-sparsetensor-avx512-2026-12-01.json")
    assert labels == ["times faster (black: target)"]
