"""Counts and times of one model version, and histograms of the stages.

Plain numbers, changed by the event loop alone: a request costs a few additions, and whoever exports
them (statistics rpc, Prometheus) reads them as they are.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

__all__ = ["BATCH_BOUNDS", "LATENCY_BOUNDS_S", "STAGES", "Duration", "Histogram", "ModelStats"]

LATENCY_BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01,
    0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
BATCH_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STAGES: Final = ("queue", "collate", "infer", "split", "total")
_NS: Final = 1e-9


@dataclass(slots=True)
class Duration:
    """How often, and how long in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Add `count` events that took `ns` each."""
        self.count += count
        self.ns += ns * count


@dataclass(slots=True)
class Histogram:
    """Counts per bucket; the last bucket takes what is above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass(slots=True)
class ModelStats:
    """Everything counted about one model version.

    Attributes:
        success: Answered requests and their whole time.
        fail: Requests that the model failed.
        stages: Time of each stage, per request.
        histograms: The same as histograms, in seconds.
        batch_sizes: Histogram of rows (or graphs, or requests) per execution.
        batches: Per batch size: collate, infer and split.
        rejects: Requests refused or dropped, by reason.
        inference_count: Rows inferred.
        execution_count: Executions of the model.
        last_inference_ms: Unix time of the last one, 0 if there was none.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    stages: dict[str, Duration] = field(default_factory=lambda: {s: Duration() for s in STAGES})
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {s: Histogram(LATENCY_BOUNDS_S) for s in STAGES}
    )
    batch_sizes: Histogram = field(default_factory=lambda: Histogram(BATCH_BOUNDS))
    batches: dict[int, tuple[Duration, Duration, Duration]] = field(default_factory=dict)
    rejects: Counter[str] = field(default_factory=Counter)
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0

    def record_execution(self, size: int, requests: int, times_ns: tuple[int, int, int]) -> None:
        """Record one successful execution.

        Args:
            size: Rows, graphs or requests in it.
            requests: Requests in it; each spent the whole time.
            times_ns: Collate, infer, split.
        """
        self.execution_count += 1
        self.inference_count += size
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.batch_sizes.observe(size)
        if size not in self.batches:
            self.batches[size] = (Duration(), Duration(), Duration())
        for total, name, ns in zip(
            self.batches[size], ("collate", "infer", "split"), times_ns, strict=True
        ):
            total.add(ns)
            self.stages[name].add(ns, requests)
            self.histograms[name].observe(ns * _NS, requests)

    def record_request(self, queue_ns: int, total_ns: int) -> None:
        """Record one answered request: its time in the queue, and in all."""
        self.success.add(total_ns)
        self.stages["queue"].add(queue_ns)
        self.stages["total"].add(total_ns)
        self.histograms["queue"].observe(queue_ns * _NS)
        self.histograms["total"].observe(total_ns * _NS)

    def record_failure(self, reason: str, total_ns: int = 0) -> None:
        """Record one request that was refused, dropped or failed."""
        self.rejects[reason] += 1
        self.fail.add(total_ns)
