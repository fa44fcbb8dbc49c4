"""Charts of a benchmark report and of the demo, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from edgeweave.bench.targets import GROUP_TITLES

OURS_COLOUR = "#1b6e8c"
PEER_COLOUR = "#c9c9c9"
_RUN_COLOURS = {"default": OURS_COLOUR, "tuned": "#7fb7c9"}


def new_figure(width: float, height: float) -> Any:
    """Makes a figure that draws without a display and leaves pyplot's state alone.

    Args:
        width: Inches.
        height: Inches.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure.

    Args:
        figure: From `new_figure`.
        path: The file; folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plot_report(record: Mapping[str, Any], path: Path) -> None:
    """Draws the speed-ups of a report: bars, one per group or model, with the targets as marks.

    Beside those of kernels stands how far they are from the machine's limit: the time that the
    memory needs if every byte moves once, over the time taken.

    Args:
        record: The report.
        path: The PNG file.
    """
    by_model = record["suite"] == "models"
    bars = _model_bars(record) if by_model else _group_bars(record)
    names = list(dict.fromkeys(name for run in bars.values() for name, _, _ in run))
    limits = {} if by_model else _limit_bars(record)
    height = 1.2 + 0.42 * max(len(names), len(limits), 1)
    figure = new_figure(15.0 if limits else 9.0, height)
    if limits:
        axes, right = figure.subplots(1, 2)
        _draw_limits(right, limits)
    else:
        axes = figure.subplots()
    thickness = 0.8 / max(len(bars), 1)
    for i, (allocator, rows) in enumerate(bars.items()):
        for name, ratio, target in rows:
            y = names.index(name) + (i - (len(bars) - 1) / 2) * thickness
            axes.barh(y, ratio, 0.9 * thickness, color=_RUN_COLOURS[allocator])
            axes.text(ratio, y, f" {ratio:.1f}x", va="center", fontsize=8)
            if target is not None:
                axes.plot([target] * 2, [y - thickness / 2, y + thickness / 2], "k-", lw=1.5)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="grey", lw=0.8)
    axes.set_xlabel("times faster" + ("" if by_model else ", geometric mean") + " (black: target)")
    axes.set_title(_title(record), fontsize=9)
    axes.margins(x=0.12)
    handles = [axes.barh([0], [0], color=_RUN_COLOURS[a], label=f"allocator: {a}") for a in bars]
    axes.legend(handles=handles, loc="lower right", fontsize=8)
    save_figure(figure, path)


def _limit_bars(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Compulsory fractions of each group and graph, of all allocators."""
    limits: dict[str, list[float]] = {}
    for run in record["runs"]:
        for case in run["cases"]:
            fraction = case["compulsory_fraction"]
            if fraction is not None:
                name = f"{case['group']}, {case['params'].get('graph', '')}"
                limits.setdefault(name, []).append(fraction)
    return limits


def _draw_limits(axes: Any, limits: Mapping[str, Sequence[float]]) -> None:
    for y, fractions in enumerate(limits.values()):
        axes.plot([100 * min(fractions), 100 * max(fractions)], [y, y], color="grey", lw=1.5)
        middle = 100 * median(fractions)
        axes.plot([middle], [y], "o", color=_RUN_COLOURS["default"], ms=5)
        axes.text(100 * max(fractions), y, f"  {middle:.0f} %", va="center", fontsize=8)
    axes.set_yticks(range(len(limits)), list(limits), fontsize=8)
    axes.invert_yaxis()
    axes.axvline(100.0, color="black", lw=0.8)
    axes.set_xlim(left=0)
    axes.margins(x=0.12)
    axes.set_xlabel("% of the memory's speed (median and range of cases)")
    axes.set_title("distance to the limit; past 100 % the data fits a cache", fontsize=9)


_Bars = dict[str, Sequence[tuple[str, float, float | None]]]


def _group_bars(record: Mapping[str, Any]) -> _Bars:
    return {
        run["allocator"]: [
            (
                f"{GROUP_TITLES.get(group['group'], group['group'])}\nagainst {group['peer']}",
                group["geomean"],
                group["target_geomean"],
            )
            for group in run["groups"]
        ]
        for run in record["runs"]
    }


def _model_bars(record: Mapping[str, Any]) -> _Bars:
    bars: _Bars = {}
    for run in record["runs"]:
        targets = {(g["group"], g["peer"]): g["target_geomean"] for g in run["groups"]}
        bars[run["allocator"]] = [
            (
                f"{case['params']['model']}, {case['params']['graph']}\nagainst {speedup['peer']}",
                speedup["ratio"],
                targets.get((case["group"], speedup["peer"])),
            )
            for case in run["cases"]
            for speedup in case["speedups"]
        ]
    return bars


def _title(record: Mapping[str, Any]) -> str:
    if not record["runs"]:
        return "edgeweave bench"
    environment = record["runs"][0]["environment"]
    versions = environment["versions"]
    return (
        f"edgeweave bench {record['suite']}: {environment['cpu']}, {environment['isa']}, "
        f"{environment['threads']} threads, torch {versions['torch']}, "
        f"PyG {versions.get('torch_geometric') or 'none'}"
    )
