"""The two halves of `edgeweave demo`: Cora for accuracy, a large graph for time."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import edgeweave
from edgeweave.bench.cora import Cora, Split, load_cora, split_cora
from edgeweave.bench.generators import GraphData, half_arxiv
from edgeweave.bench.model_runs import OURS, STOCK, full_batch_trainers
from edgeweave.bench.models import MODELS, build_model
from edgeweave.bench.training import Trainer, TrainingBatch, loss_difference

CORA_MODELS = ("GCN", "GraphSAGE")
LARGE_MODELS = ("GCN", "GraphSAGE", "GIN")
_HIDDEN = 64
_DROPOUT = 0.5


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does.

    Attributes:
        seeds: Number of splits and initialisations on Cora.
        cora_epochs: Epochs of each training on Cora, if it goes as fast as expected.
        cora_budget_s: Time for one model on Cora; where it would not do, there are fewer epochs.
        shrink: Divides the large graph.
        budget_s: Time of the whole demo, as far as it can be kept: the number of epochs on the
            large graph follows from what is left of it.
        max_epochs: Most epochs of one model on the large graph, besides the first.
    """

    seeds: int
    cora_epochs: int
    cora_budget_s: float
    shrink: int
    budget_s: float
    max_epochs: int


# Stock PyG takes 2 to 4 s for an epoch of the full graph on two cores. What is left of the promised
# four minutes is for loading the libraries and for slower epochs than the first.
FULL_SIZE = DemoSize(
    seeds=5, cora_epochs=100, cora_budget_s=40.0, shrink=1, budget_s=200.0, max_epochs=10
)
QUICK_SIZE = DemoSize(
    seeds=2, cora_epochs=40, cora_budget_s=30.0, shrink=16, budget_s=60.0, max_epochs=3
)
_MIN_CORA_EPOCHS = 40
# Beside each training step on Cora, the accuracies take a forward pass.
_STEPS_PER_CORA_EPOCH = 1.4
_PACE_STEPS = 5
_MIN_EPOCHS = 2


@dataclass(frozen=True)
class CoraResult:
    """Both sides' accuracies of one model on Cora.

    Attributes:
        model: The model.
        stock_accuracies: Test accuracy of each seed, at the epoch with the best validation.
        accuracies: The same with edgeweave.
        stock_s: Training time of all seeds.
        ours_s: The same with edgeweave.
    """

    model: str
    stock_accuracies: list[float]
    accuracies: list[float]
    stock_s: float
    ours_s: float

    @property
    def noise(self) -> float:
        """Difference of the two means that chance explains: two standard errors, or 0.02."""
        spread = statistics.pvariance(self.stock_accuracies) + statistics.pvariance(self.accuracies)
        return max(0.02, 2.0 * math.sqrt(spread / len(self.accuracies)))

    @property
    def agrees(self) -> bool:
        """Whether the mean accuracies agree within the noise."""
        difference = statistics.mean(self.accuracies) - statistics.mean(self.stock_accuracies)
        return abs(difference) <= self.noise


@dataclass(frozen=True)
class LargeResult:
    """Both sides' full-batch epochs of one model on the large graph.

    Attributes:
        model: The model.
        stock_epoch_s: Median epoch of stock PyG, without the first.
        ours_epoch_s: The same with edgeweave.
        stock_first_epoch_s: First epoch of stock PyG.
        ours_first_epoch_s: First epoch with edgeweave, which plans the graph.
        stock_losses: Loss of every epoch, the first included.
        losses: The same with edgeweave.
    """

    model: str
    stock_epoch_s: float
    ours_epoch_s: float
    stock_first_epoch_s: float
    ours_first_epoch_s: float
    stock_losses: list[float]
    losses: list[float]

    @property
    def speedup(self) -> float:
        """Stock epoch over our epoch."""
        return self.stock_epoch_s / self.ours_epoch_s

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of the loss curves."""
        return loss_difference(self.losses, self.stock_losses)


def run_cora(size: DemoSize, console: Console) -> list[CoraResult]:
    """Trains GCN and GraphSAGE on Cora by both sides, with the same seeds and splits.

    On one thread: the graph is so small that more gain little, and lose a lot on a busy machine.

    Args:
        size: How much to do.
        console: Shows progress.

    Returns:
        One result per model.

    Raises:
        CoraUnavailableError: If Cora can neither be found nor downloaded.
    """
    cora = load_cora()
    console.print(
        f"Cora: {cora.x.size(0):,} papers, {cora.x.size(1):,} features, "
        f"{cora.edge_index.size(1):,} directed edges; 20 labels per class, {size.seeds} seeds, "
        "1 thread"
    )
    results = []
    with _progress(console) as progress, _threads(1):
        for model in CORA_MODELS:
            epochs = _affordable_epochs(model, cora, size)
            total = 2 * size.seeds * epochs
            _announce(console, f"Cora {model}: {total} epochs, both sides")
            task = progress.add_task(f"Cora {model}", total=total)
            accuracies: dict[str, list[float]] = {STOCK: [], OURS: []}
            seconds = {STOCK: 0.0, OURS: 0.0}
            for seed in range(size.seeds):
                split = split_cora(cora.y, seed)
                for trainer in _cora_trainers(model, cora, split, seed):
                    # Once for the whole training: it takes longer than a step to patch PyG.
                    with edgeweave.accelerated() if trainer.name == OURS else nullcontext():
                        accuracy = _train_on_cora(
                            trainer, cora, split, epochs, partial(progress.advance, task)
                        )
                    accuracies[trainer.name].append(accuracy)
                    seconds[trainer.name] += sum(trainer.times_s)
            results.append(
                CoraResult(
                    model, accuracies[STOCK], accuracies[OURS], seconds[STOCK], seconds[OURS]
                )
            )
    return results


def run_large(size: DemoSize, console: Console, left_s: float) -> list[LargeResult]:
    """Trains GCN, GraphSAGE and GIN on the half-arxiv graph, epoch by epoch in turn.

    The first epoch of each side is measured, and the number of further ones follows from it.

    Args:
        size: How much to do.
        console: Shows progress.
        left_s: Time for it.

    Returns:
        One result per model.
    """
    start = time.perf_counter()
    graph = half_arxiv(shrink=size.shrink)
    console.print(
        f"half-arxiv: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges, full batch, 3 layers "
        f"(made in {time.perf_counter() - start:.1f} s)"
    )
    results: list[LargeResult] = []
    with _progress(console) as progress:
        for model in LARGE_MODELS:
            _announce(
                console, f"half-arxiv {model}: {_MIN_EPOCHS} to {size.max_epochs} epochs a side"
            )
            models_left = len(LARGE_MODELS) - len(results)
            budget_s = (left_s - (time.perf_counter() - start)) / models_left
            results.append(_train_large(model, graph, size.max_epochs, budget_s, progress))
    return results


def _cora_trainers(model: str, cora: Cora, split: Split, seed: int) -> list[Trainer]:
    graph = GraphData("cora", cora.edge_index, cora.x.size(0), community=cora.y)
    num_classes = int(cora.y.max()) + 1
    network = build_model(
        MODELS[model], graph, num_classes, seed, (cora.x.size(1), _HIDDEN), _DROPOUT
    )
    batch = TrainingBatch(cora.x, cora.edge_index, cora.y[split.train], rows=split.train)
    common: dict[str, Any] = {"weight_decay": 5e-4, "dropout_seed": 10_000 * seed}
    return [
        Trainer(STOCK, copy.deepcopy(network), lambda _: batch, **common),
        Trainer(OURS, network, lambda _: batch, **common),
    ]


def _affordable_epochs(model: str, cora: Cora, size: DemoSize) -> int:
    """Epochs of one training on Cora, by the pace of a few steps of stock PyG."""
    stock, _ = _cora_trainers(model, cora, split_cora(cora.y, 0), 0)
    pace_s = statistics.median(stock.step() for _ in range(_PACE_STEPS))
    trainings = 2 * size.seeds
    affordable = int(size.cora_budget_s / (trainings * _STEPS_PER_CORA_EPOCH * pace_s))
    return min(size.cora_epochs, max(_MIN_CORA_EPOCHS, affordable))


def _train_on_cora(
    trainer: Trainer, cora: Cora, split: Split, epochs: int, on_epoch: Callable[[], None]
) -> float:
    """Trains and returns the test accuracy at the epoch with the best validation accuracy."""
    batch = trainer.batch(0)
    best_val, test_at_best = -1.0, 0.0
    for _ in range(epochs):
        trainer.step()
        right = trainer.predict(batch).argmax(dim=1) == cora.y
        val = float(right[split.val].float().mean())
        if val > best_val:
            best_val, test_at_best = val, float(right[split.test].float().mean())
        on_epoch()
    return test_at_best


def _train_large(
    model: str, graph: GraphData, max_epochs: int, budget_s: float, progress: Progress
) -> LargeResult:
    ours, stock = full_batch_trainers(MODELS[model], graph)
    tasks = {
        trainer.name: progress.add_task(f"{model} {trainer.name}", total=1)
        for trainer in (stock, ours)
    }

    def epoch(trainer: Trainer) -> None:
        seconds = trainer.step()
        text = f"{model} {trainer.name}: {seconds:.2f} s, loss {trainer.losses[-1]:.3f}"
        progress.update(tasks[trainer.name], advance=1, description=text)

    epoch(stock)
    epoch(ours)
    # The first epoch plans the graph and touches fresh memory: the next ones are no slower.
    first_s = stock.times_s[0] + ours.times_s[0]
    epochs = min(max_epochs, max(_MIN_EPOCHS, int(budget_s / first_s) - 1))
    for task in tasks.values():
        progress.update(task, total=1 + epochs)
    for _ in range(epochs):
        epoch(stock)
        epoch(ours)
    return LargeResult(
        model,
        statistics.median(stock.times_s[1:]),
        statistics.median(ours.times_s[1:]),
        stock.times_s[0],
        ours.times_s[0],
        stock.losses,
        ours.losses,
    )


def _announce(console: Console, text: str) -> None:
    """Says what starts, where no bar can be drawn: in a log, bars appear when they are done."""
    if not console.is_terminal:
        console.print(f"{text} ...")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
