"""Trains the same model by several sides in turn, and compares times and loss curves."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Two correct fp32 runs of the same training: Adam divides by the gradient's size, so that rounding
# noise in near-zero gradients moves weights by whole steps; the loss follows by about 1e-4.
MAX_LOSS_DIFFERENCE = 1e-2


@dataclass(frozen=True)
class TrainingBatch:
    """Inputs of one training step.

    Attributes:
        x: fp32 `[N, channels]`.
        edge_index: What the model takes for its edges.
        target: int64 class of each row of the output.
        extra: Further arguments of the model.
        rows: Rows of the output that count, or None for all.
    """

    x: Tensor
    edge_index: Any
    target: Tensor
    extra: tuple[Tensor, ...] = ()
    rows: Tensor | slice | None = None


@dataclass
class Trainer:
    """One side of a training comparison.

    Attributes:
        name: Name in the tables.
        model: The model, its own copy.
        batch: Makes the inputs of step i; not timed.
        context: What the steps run in, such as `edgeweave.accelerated`; not timed.
        lr: Learning rate of Adam.
        weight_decay: Of Adam.
        dropout_seed: Torch's generator is seeded with this plus the step's number before each step,
            so that two sides drop the same values; None leaves the generator alone.
        losses: Loss of every step so far.
        times_s: Seconds of every step so far.
    """

    name: str
    model: nn.Module
    batch: Callable[[int], TrainingBatch]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    lr: float = 0.01
    weight_decay: float = 0.0
    dropout_seed: int | None = None
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), lr=self.lr, weight_decay=self.weight_decay
        )

    def step(self) -> float:
        """Runs one training step.

        Returns:
            Its seconds: forward, loss, backward and the optimiser.
        """
        batch = self.batch(len(self.losses))
        self.model.train()
        if self.dropout_seed is not None:
            torch.manual_seed(self.dropout_seed + len(self.losses))
        with self.context():
            start = time.perf_counter()
            self._optimizer.zero_grad()
            out = self.model(batch.x, batch.edge_index, *batch.extra)
            if batch.rows is not None:
                out = out[batch.rows]
            loss = nn.functional.cross_entropy(out, batch.target)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            # Reading the loss and freeing the graph belong to a step.
            self.losses.append(loss.item())
            del out, loss
            self.times_s.append(time.perf_counter() - start)
        return self.times_s[-1]

    def predict(self, batch: TrainingBatch) -> Tensor:
        """Runs the model in evaluation mode.

        Args:
            batch: The inputs.

        Returns:
            `[N, classes]` scores.
        """
        self.model.eval()
        with self.context(), torch.no_grad():
            out: Tensor = self.model(batch.x, batch.edge_index, *batch.extra)
        return out

    def time_prediction(self, batch: TrainingBatch) -> float:
        """Runs the model in evaluation mode for its time alone.

        Args:
            batch: The inputs.

        Returns:
            Seconds of the forward pass, and of freeing its result.
        """
        self.model.eval()
        with self.context(), torch.no_grad():
            start = time.perf_counter()
            # Nobody holds the result: it is freed before the clock is read.
            self.model(batch.x, batch.edge_index, *batch.extra)
            return time.perf_counter() - start


def outputs_with_reference(trainers: Sequence[Trainer]) -> tuple[list[Tensor], Tensor]:
    """Runs every side's model once, and the first one's in float64 without acceleration.

    Args:
        trainers: The sides; the reference is a float64 copy of the last one's model, which must
            be a stock side.

    Returns:
        Each side's output, and the float64 output.
    """
    outputs = []
    for trainer in trainers:
        batch = trainer.batch(0)
        trainer.model.train()
        # With gradients, since that is the path which is timed.
        with trainer.context():
            outputs.append(trainer.model(batch.x, batch.edge_index, *batch.extra).detach())
    return outputs, _exact_output(trainers[-1])


def predictions_with_reference(trainers: Sequence[Trainer]) -> tuple[list[Tensor], Tensor]:
    """Does the same in evaluation mode without gradients.

    Args:
        trainers: The sides, a stock one last.

    Returns:
        Each side's output, and the float64 output.
    """
    outputs = [trainer.predict(trainer.batch(0)) for trainer in trainers]
    return outputs, _exact_output(trainers[-1])


def _exact_output(stock: Trainer) -> Tensor:
    """The float64 output of a stock side's model, in the mode that the model is in."""
    batch = stock.batch(0)
    extra = tuple(t.double() if t.is_floating_point() else t for t in batch.extra)
    with torch.no_grad():
        model = copy.deepcopy(stock.model).double()
        exact: Tensor = model(batch.x.double(), batch.edge_index, *extra)
    return exact


def train_interleaved(
    trainers: Sequence[Trainer],
    steps: int,
    on_step: Callable[[Trainer, float], None] | None = None,
) -> None:
    """Runs `steps` steps of every side, A B A B.

    Args:
        trainers: The sides.
        steps: Steps of each.
        on_step: Called after every step with the side and its seconds.
    """
    for _ in range(steps):
        for trainer in trainers:
            seconds = trainer.step()
            if on_step is not None:
                on_step(trainer, seconds)


def loss_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest relative difference of two loss curves.

    Args:
        ours: Loss of each step.
        theirs: The other side's, of the same length.

    Returns:
        `max |a - b| / max(|b|, 1e-3)`; infinity if either curve leaves the finite numbers or
        nothing was trained.

    Example:
        >>> from edgeweave.bench.training import loss_difference
        >>> loss_difference([2.0, 1.5], [2.0, 1.0])
        0.5
    """
    worst = 0.0 if ours else float("inf")
    for a, b in zip(ours, theirs, strict=True):
        difference = abs(a - b) / max(abs(b), 1e-3)
        # A NaN compares false with everything: turn it into a failure.
        worst = max(worst, difference) if difference == difference else float("inf")
    return worst
