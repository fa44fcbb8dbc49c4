"""Modules that the server's tests serve, by importable name."""

from __future__ import annotations

import os
import sys
import threading
import time

import torch
from torch import Tensor, nn


class Affine(nn.Module):
    """`x * scale + shift`."""

    def __init__(self, scale: float = 2.0, shift: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class TwoOutputs(nn.Module):
    """Sum and difference of two inputs."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a - b


class Echo(nn.Module):
    """Gives back what it got: tensors of any dtype, and strings."""

    def forward(self, x: object) -> object:
        return x


class Sleepy(nn.Module):
    """Sleeps once per batch."""

    def __init__(self, seconds: float = 0.05) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x.clone()


class Gated(nn.Module):
    """Waits until the test opens the gate: a slow model on any machine."""

    entered = threading.Event()
    gate = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        if not self.gate.wait(300):
            raise RuntimeError("the gate stayed shut")
        return x.clone()


class Moody(nn.Module):
    """Raises for NaN, ends the process politely for infinity, and is slow otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise RuntimeError("secret words: /etc/model")
        if torch.isinf(x).any():
            sys.exit(3)
        time.sleep(0.02)
        return x * 2


class InPlace(nn.Module):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class BatchSize(nn.Module):
    """Tells each row how many rows its batch had, and sleeps."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return torch.full_like(x, float(x.shape[0]))


class ThreadCount(nn.Module):
    """Tells how many threads torch uses."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, float(torch.get_num_threads()))


class Affinity(nn.Module):
    """Tells each row which processors the thread may use: one bit each."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        mask = sum(1 << cpu for cpu in os.sched_getaffinity(0))
        return torch.full_like(x, float(mask))


class GraphSum(nn.Module):
    """One round of messages: each node its own features plus those of its in-neighbours."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x.index_add(0, edge_index[1], x[edge_index[0]])
