"""ModelStats as the protocol's ModelStatistics."""

from __future__ import annotations

from typing import Any

from ._stats import Duration, ModelStats

__all__ = ["model_statistics"]


def model_statistics(target: Any, name: str, version: str, stats: ModelStats) -> None:
    """Fill an `inference.ModelStatistics` message.

    Args:
        target: The message.
        name: The model.
        version: Its version.
        stats: What was counted.
    """
    target.name, target.version = name, version
    target.last_inference = stats.last_inference_ms
    target.inference_count = stats.inference_count
    target.execution_count = stats.execution_count
    totals = target.inference_stats
    _fill(totals.success, stats.success)
    _fill(totals.fail, stats.fail)
    _fill(totals.queue, stats.stages["queue"])
    _fill(totals.compute_input, stats.stages["collate"])
    _fill(totals.compute_infer, stats.stages["infer"])
    _fill(totals.compute_output, stats.stages["split"])
    for size, durations in sorted(stats.batches.items()):
        batch = target.batch_stats.add(batch_size=size)
        parts = (batch.compute_input, batch.compute_infer, batch.compute_output)
        for part, duration in zip(parts, durations, strict=True):
            _fill(part, duration)


def _fill(target: Any, duration: Duration) -> None:
    target.count, target.ns = duration.count, duration.ns
