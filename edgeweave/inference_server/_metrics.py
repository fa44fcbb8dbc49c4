"""What was counted, for Prometheus: read when it is asked for, never copied in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector, CollectorRegistry

from ._core import InferenceCore
from ._stats import STAGES, Histogram

__all__ = ["build_metrics_registry"]

_LABELS = ("model", "version")


class _CoreCollector(Collector):
    def __init__(self, core: InferenceCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Any]:
        """Every metric of every model."""
        requests = CounterMetricFamily(
            "edgeweave_requests", "Requests by what became of them.", labels=(*_LABELS, "outcome")
        )
        inferences = CounterMetricFamily(
            "edgeweave_inferences", "Rows or graphs inferred.", labels=_LABELS
        )
        executions = CounterMetricFamily(
            "edgeweave_executions", "Batches executed.", labels=_LABELS
        )
        latency = HistogramMetricFamily(
            "edgeweave_stage_seconds",
            "Time of a request in each stage.",
            labels=(*_LABELS, "stage"),
        )
        sizes = HistogramMetricFamily(
            "edgeweave_batch_size", "Rows or graphs of a batch.", labels=_LABELS
        )
        depth = GaugeMetricFamily("edgeweave_queue_requests", "Requests waiting.", labels=_LABELS)
        held = GaugeMetricFamily("edgeweave_queue_bytes", "Bytes waiting.", labels=_LABELS)
        busy = GaugeMetricFamily("edgeweave_busy_instances", "Instances at work.", labels=_LABELS)
        ready = GaugeMetricFamily(
            "edgeweave_model_ready", "1 if it takes requests.", labels=_LABELS
        )
        for name, version, entry in list(self._core.registry.entries()):
            labels, stats = (name, version), entry.stats
            requests.add_metric((*labels, "success"), stats.success.count)
            for reason, count in list(stats.rejects.items()):
                requests.add_metric((*labels, reason), count)
            inferences.add_metric(labels, stats.inference_count)
            executions.add_metric(labels, stats.execution_count)
            for stage in STAGES:
                _add(latency, (*labels, stage), stats.histograms[stage])
            _add(sizes, labels, stats.batch_sizes)
            ready.add_metric(labels, float(entry.served is not None))
            if entry.served is not None:
                scheduler = entry.served.scheduler
                depth.add_metric(labels, scheduler.queued)
                held.add_metric(labels, scheduler.queued_bytes)
                busy.add_metric(labels, scheduler.running)
        yield from (requests, inferences, executions, latency, sizes, depth, held, busy, ready)
        yield from self._server_metrics()

    def _server_metrics(self) -> Iterator[Any]:
        rejects = CounterMetricFamily(
            "edgeweave_server_rejects", "Requests refused before a model.", labels=("reason",)
        )
        for reason, count in list(self._core.rejects.items()):
            rejects.add_metric((reason,), count)
        yield rejects
        yield GaugeMetricFamily(
            "edgeweave_requests_in_flight", "Requests inside the server.", self._core.in_flight
        )
        yield GaugeMetricFamily("edgeweave_ready", "1 if it serves.", float(self._core.is_ready))


def _add(family: HistogramMetricFamily, labels: tuple[str, ...], histogram: Histogram) -> None:
    running, buckets = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), running))
    family.add_metric(labels, buckets, histogram.total)


def build_metrics_registry(core: InferenceCore) -> CollectorRegistry:
    """A registry of this server alone; the process-wide one stays untouched.

    Args:
        core: The data plane.

    Returns:
        For `prometheus_client.start_http_server`.
    """
    registry = CollectorRegistry()
    registry.register(_CoreCollector(core))
    return registry
