"""One training, by stock PyG and accelerated, with the same seeds: what each reaches and takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

import edgeweave

__all__ = ["BothSides", "train_both"]

Training = Generator[None, None, float]
"""Trains one epoch per step, and returns the measure it is judged by."""


@dataclass(frozen=True)
class BothSides:
    """What stock PyG and edgeweave reached, and what an epoch took.

    Attributes:
        measure: Name of what is compared, such as `accuracy`.
        stock: One value per seed.
        ours: The same, accelerated.
        stock_epoch_s: Median seconds of an epoch, the first of each training left out.
        ours_epoch_s: The same, accelerated.
        noise: Difference of the means that means nothing.
    """

    measure: str
    stock: tuple[float, ...]
    ours: tuple[float, ...]
    stock_epoch_s: float
    ours_epoch_s: float
    noise: float

    @property
    def difference(self) -> float:
        """Mean of our values less that of stock's."""
        return statistics.mean(self.ours) - statistics.mean(self.stock)

    @property
    def agrees(self) -> bool:
        """Whether the means agree within the noise; NaN does not."""
        return abs(self.difference) <= self.noise

    def __str__(self) -> str:
        lines = [
            f"{side:<12} {self.measure} {statistics.mean(values):.3f}, {1e3 * seconds:.1f} ms/epoch"
            for side, values, seconds in (
                ("stock PyG", self.stock, self.stock_epoch_s),
                ("edgeweave", self.ours, self.ours_epoch_s),
            )
        ]
        verdict = "agree" if self.agrees else "DISAGREE"
        lines.append(
            f"{verdict}: difference {self.difference:+.4f}, noise {self.noise:g}; "
            f"{self.stock_epoch_s / self.ours_epoch_s:.2f}x"
        )
        return "\n".join(lines)


def train_both(
    train: Callable[[int], Training],
    seeds: Sequence[int],
    *,
    measure: str,
    noise: float,
    title: str,
    epochs: int,
) -> BothSides:
    """Trains with each seed, once with stock PyG and once accelerated, and shows the progress.

    On one thread: on small graphs more gain little, and lose a lot on a busy machine.

    Args:
        train: Makes the training of a seed; it must do the same each time for the same seed.
        seeds: Seeds, at least one.
        measure: Name of what `train` returns.
        noise: Difference of that which means nothing: what the size of the test set allows.
        title: Shown beside the bar.
        epochs: Epochs of one training, for the bar.

    Returns:
        Values and times of both sides.

    Raises:
        ValueError: If there is no seed.

    Example:
        >>> from edgeweave.bench.both_sides import train_both
        >>> def train(seed):
        ...     for _ in range(3):
        ...         yield
        ...     return 0.5
        >>> both = train_both(train, [0], measure="accuracy", noise=0.01, title="nothing", epochs=3)
        >>> both.agrees, both.stock, both.ours
        (True, (0.5,), (0.5,))
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not seeds:
        raise ValueError("train_both: seeds must be at least one, got none")
    sides = ("stock PyG", "edgeweave")
    values: dict[str, list[float]] = {side: [] for side in sides}
    times: dict[str, list[float]] = {side: [] for side in sides}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress, _one_thread():
        for side in sides:
            task = progress.add_task(f"{title}, {side}", total=len(seeds) * epochs)
            # Once for all: it takes longer to patch PyG than to train an epoch on a small graph.
            with edgeweave.accelerated() if side == "edgeweave" else nullcontext():
                for seed in seeds:
                    value, seconds = _run(train(seed), partial(progress.advance, task))
                    values[side].append(value)
                    times[side] += seconds[1:] or seconds
    medians = {side: statistics.median(found) for side, found in times.items()}
    return BothSides(
        measure,
        tuple(values["stock PyG"]),
        tuple(values["edgeweave"]),
        medians["stock PyG"],
        medians["edgeweave"],
        noise,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(training: Training, on_epoch: Callable[[], None]) -> tuple[float, list[float]]:
    """Value and seconds of every epoch."""
    seconds: list[float] = []
    while True:
        start = time.perf_counter()
        try:
            next(training)
        except StopIteration as stop:
            return float(stop.value), seconds
        seconds.append(time.perf_counter() - start)
        on_epoch()
