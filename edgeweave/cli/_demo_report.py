"""What `edgeweave demo` ends with: a table, a chart and a JSON record."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from edgeweave.bench.plots import OURS_COLOUR, PEER_COLOUR, new_figure, save_figure
from edgeweave.bench.training import MAX_LOSS_DIFFERENCE
from edgeweave.cli._demo_serving import ServingResult
from edgeweave.cli._demo_stages import CoraResult, LargeResult


@dataclass(frozen=True)
class DemoReport:
    """Everything the demo found out.

    Attributes:
        cora: Accuracies and times on Cora.
        large: Epochs on the large graph.
        fused: Calls that ran on edgeweave's kernels, by call site.
        fell_back: Calls that ran PyG's own code, by call site.
        environment: Machine and versions.
        elapsed_s: Duration of the demo.
        serving: What the served model answered; None where nothing was served.
    """

    cora: Sequence[CoraResult]
    large: Sequence[LargeResult]
    fused: dict[str, int]
    fell_back: dict[str, int]
    environment: dict[str, Any]
    elapsed_s: float
    serving: ServingResult | None = None

    @property
    def problems(self) -> list[str]:
        """What the two sides disagree about; empty if all is well."""
        found = [
            f"{result.model} on Cora: accuracies must agree within {result.noise:.3f}, got "
            f"{statistics.mean(result.stock_accuracies):.3f} and "
            f"{statistics.mean(result.accuracies):.3f}"
            for result in self.cora
            if not result.agrees
        ]
        found += [
            f"{result.model} on half-arxiv: losses must agree within {MAX_LOSS_DIFFERENCE:.0e}, "
            f"got a relative difference of {result.loss_difference:.1e}"
            for result in self.large
            if not result.loss_difference <= MAX_LOSS_DIFFERENCE
        ]
        return found + (self.serving.problems if self.serving is not None else [])

    def record(self) -> dict[str, Any]:
        """The report as JSON-ready data.

        Returns:
            Times in seconds, accuracies as fractions of 1.
        """
        return {
            "schema": "edgeweave-demo/1",
            "environment": self.environment,
            "elapsed_s": self.elapsed_s,
            "cora": [asdict(r) | {"noise": r.noise, "agrees": r.agrees} for r in self.cora],
            "half_arxiv": [
                asdict(r) | {"speedup": r.speedup, "loss_difference": r.loss_difference}
                for r in self.large
            ],
            "fused": self.fused,
            "fell_back": self.fell_back,
            "serving": self.serving.record() if self.serving is not None else None,
            "problems": self.problems,
        }


def print_report(report: DemoReport, console: Console) -> None:
    """Prints the table and what was fused.

    Args:
        report: The report.
        console: Where to.
    """
    table = Table(
        title="Cora: training time, test accuracy; half-arxiv: time of an epoch, last loss"
    )
    table.add_column("data, model")
    for heading in ("stock time", "edgeweave", "speed-up", "stock result", "edgeweave", "agree"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cora in report.cora:
        table.add_row(
            f"Cora, {cora.model}",
            f"{cora.stock_s:.2f} s",
            f"{cora.ours_s:.2f} s",
            f"{cora.stock_s / cora.ours_s:.2f}x",
            _mean_and_spread(cora.stock_accuracies),
            _mean_and_spread(cora.accuracies),
            "yes" if cora.agrees else "[red]NO[/red]",
        )
    for large in report.large:
        table.add_row(
            f"half-arxiv, {large.model}",
            f"{large.stock_epoch_s:.3f} s",
            f"{large.ours_epoch_s:.3f} s",
            f"{large.speedup:.2f}x",
            f"loss {large.stock_losses[-1]:.4f}",
            f"loss {large.losses[-1]:.4f}",
            _agreement(large.loss_difference),
        )
    console.print(table)
    console.print(f"fused calls: {_counts(report.fused)}; left to PyG: {_counts(report.fell_back)}")
    if report.serving is not None:
        _print_serving(report.serving, console)


def _print_serving(serving: ServingResult, console: Console) -> None:
    papers = ", ".join(f"{node}: {got} ({true})" for node, got, true in serving.shown)
    console.print(
        f"served over gRPC, asked with {serving.client}: {serving.nodes} test papers, accuracy "
        f"{serving.accuracy:.3f}; one paper: p50 {serving.p50_ms:.2f} ms, "
        f"p99 {serving.p99_ms:.2f} ms"
    )
    console.print(f"paper: predicted subject (true one): {papers}")


def draw_report(report: DemoReport, path: Path) -> None:
    """Draws epoch times, accuracies and loss curves.

    Args:
        report: The report.
        path: The PNG file.
    """
    figure = new_figure(13.0, 4.2)
    times, accuracies, losses = figure.subplots(1, 3)
    models = [result.model for result in report.large]
    stock_s = [result.stock_epoch_s for result in report.large]
    ours_s = [result.ours_epoch_s for result in report.large]
    _paired_bars(times, models, stock_s, ours_s)
    for i, result in enumerate(report.large):
        times.text(i + 0.2, result.ours_epoch_s, f"{result.speedup:.1f}x", ha="center", va="bottom")
    times.legend()
    times.margins(y=0.1)
    times.set_ylabel("seconds per full-batch epoch")
    times.set_title("half-arxiv: time")

    _paired_bars(
        accuracies,
        [result.model for result in report.cora],
        [statistics.mean(result.stock_accuracies) for result in report.cora],
        [statistics.mean(result.accuracies) for result in report.cora],
        errors=[
            [statistics.pstdev(result.stock_accuracies) for result in report.cora],
            [statistics.pstdev(result.accuracies) for result in report.cora],
        ],
    )
    accuracies.set_ylim(0.0, 1.0)
    accuracies.set_ylabel("test accuracy")
    accuracies.set_title("Cora: accuracy, 20 labels per class")
    for i, cora in enumerate(report.cora):
        for shift, values in ((-0.2, cora.stock_accuracies), (0.2, cora.accuracies)):
            accuracies.text(i + shift, 0.05, f"{statistics.mean(values):.3f}", ha="center")

    for i, result in enumerate(report.large):
        colour = f"C{i}"
        losses.plot(result.stock_losses, color=colour, lw=4, alpha=0.35)
        losses.plot(result.losses, color=colour, lw=1.2, ls="--", label=result.model)
    losses.set_yscale("log")
    losses.xaxis.get_major_locator().set_params(integer=True)
    losses.set_xlabel("epoch")
    losses.set_ylabel("training loss")
    losses.set_title("half-arxiv: stock (wide), edgeweave (dashed)")
    losses.legend()
    environment = report.environment
    figure.suptitle(
        f"edgeweave demo: {environment['cpu']}, {environment['isa']}, "
        f"{environment['threads']} threads, torch {environment['versions']['torch']}, "
        f"PyG {environment['versions']['torch_geometric']}",
        fontsize=9,
    )
    save_figure(figure, path)


def _paired_bars(
    axes: Any,
    names: Sequence[str],
    stock: Sequence[float],
    ours: Sequence[float],
    errors: Sequence[Sequence[float]] = ((), ()),
) -> None:
    for values, error, shift, colour, label in (
        (stock, errors[0], -0.2, PEER_COLOUR, "stock PyG"),
        (ours, errors[1], 0.2, OURS_COLOUR, "edgeweave"),
    ):
        places = [i + shift for i in range(len(names))]
        axes.bar(places, values, 0.38, color=colour, label=label, yerr=error or None, capsize=3)
    axes.set_xticks(range(len(names)), names)


def _mean_and_spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.pstdev(values):.3f}"


def _agreement(difference: float) -> str:
    if not difference <= MAX_LOSS_DIFFERENCE:
        return f"[red]NO[/red], differ by {difference:.0e}"
    return f"yes, within {difference:.0e}" if difference else "yes, equal"


def _counts(calls: dict[str, int]) -> str:
    return ", ".join(f"{site} {count}" for site, count in calls.items()) or "none"
