"""Decides what runs for one shape: the most that is right, in the faster layout, if it pays."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from edgeweave.jitfuser._capture import Capture, Spec
from edgeweave.jitfuser._oracle import Oracle
from edgeweave.jitfuser._report import GroupReport, ShapeReport
from edgeweave.jitfuser._trace import (
    LEVELS,
    Candidate,
    CaptureError,
    autocast_recipe,
    last_line,
    make_candidate,
    trace,
)

__all__ = ["Bucket", "Settings", "build"]

# A candidate must win by this much to be taken over what is simpler.
_MARGIN = 1.02
_MOST_SAMPLES = 7
_MEASURE_S = 1.5


@dataclass(frozen=True)
class Settings:
    """What `optimize` was asked for.

    Attributes:
        dtype: Of autocast, or None.
        keep_nan: `nan="propagate"`.
        verify: Whether candidates are compared with eager.
    """

    dtype: torch.dtype | None
    keep_nan: bool
    verify: bool


@dataclass
class Bucket:
    """What runs for one shape.

    Attributes:
        report: Fixed part of the report.
        function: Takes flat tensors, or None to run in eager.
        outputs: Structure of the result.
        strides: That the function was compiled for, one tuple per input.
        lock: A compiled partition must not run in two threads at once.
        calls: Calls so far.
        inputs: The inputs it was built with, for profiles.
    """

    report: ShapeReport
    function: Callable[..., tuple[Tensor, ...]] | None
    outputs: Spec | None = None
    strides: tuple[tuple[int, ...], ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: int = 0
    inputs: tuple[Tensor, ...] = ()

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the function.

        Args:
            tensors: Flat inputs of this bucket's shapes and dtypes, of any strides.

        Returns:
            Flat results.
        """
        assert self.function is not None
        laid_out = [
            # The guards inside compare strides exactly, also of dimensions of size 1.
            x if x.stride() == stride and not x.requires_grad else _restride(x, stride)
            for x, stride in zip(tensors, self.strides)  # noqa: B905  (the key fixes the number)
        ]
        with self.lock:
            return self.function(*laid_out)


def _restride(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    x = x.detach()
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype).copy_(x)


@dataclass
class _Search:
    """The candidates of one shape so far."""

    eager: Callable[..., tuple[Tensor, ...]]
    oracle: Oracle | None
    settings: Settings
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    found: list[tuple[str, Candidate, tuple[Tensor, ...]]] = field(default_factory=list)


def build(model: nn.Module, spec: Spec, inputs: Sequence[Tensor], settings: Settings) -> Bucket:
    """Finds what to run for one shape.

    Args:
        model: In eval mode.
        spec: Structure of the inputs.
        inputs: Flat inputs, contiguous.
        settings: What was asked for.

    Returns:
        The bucket; one that runs in eager if nothing else is right and faster.
    """
    start = time.perf_counter()
    capture = Capture(model, spec).eval()

    def eager(*tensors: Tensor) -> tuple[Tensor, ...]:
        with autocast_recipe(settings.dtype):
            result: tuple[Tensor, ...] = capture(*tensors)
            return result

    # Also the model's own error for inputs that it does not take.
    versions = [x._version for x in inputs]
    try:
        eager(*inputs)
    except TypeError as error:
        if not str(error).startswith("optimize: the model's result"):
            raise
        return _in_eager(inputs, [str(error)], start)
    if versions != [x._version for x in inputs]:
        return _in_eager(inputs, ["the model writes into its inputs"], start)
    outputs = capture.outputs
    oracle = Oracle(capture, inputs, eager, keep_nan=settings.keep_nan) if settings.verify else None
    search = _Search(eager, oracle, settings)
    if oracle is not None and not oracle.repeatable:
        return _in_eager(inputs, ["the model gives another result each time (random?)"], start)
    for layout in _layouts(inputs):
        _try_layout(search, capture, inputs, layout)
    if not search.found:
        return _in_eager(inputs, search.reasons, start, search.notes)
    return _choose(search, inputs, outputs, start)


def _layouts(inputs: Sequence[Tensor]) -> tuple[str, ...]:
    has_images = any(x.dim() == 4 and x.is_floating_point() and x.shape[1] > 1 for x in inputs)
    return ("contiguous", "channels_last") if has_images else ("contiguous",)


def _lay_out(inputs: Sequence[Tensor], layout: str) -> tuple[Tensor, ...]:
    if layout == "contiguous":
        return tuple(inputs)
    last = torch.channels_last
    return tuple(x.contiguous(memory_format=last) if x.dim() == 4 else x for x in inputs)


def _try_layout(search: _Search, capture: Capture, inputs: Sequence[Tensor], layout: str) -> None:
    """Adds the most fused candidate that is right in this layout."""
    tensors = _lay_out(inputs, layout)
    try:
        traced = trace(capture, tensors, search.settings.dtype)
    except CaptureError as error:
        search.reasons.append(f"{layout}: {error}")
        return
    search.notes += [text for text in traced.warnings if text not in search.notes]
    for level in LEVELS:
        try:
            candidate = make_candidate(traced, tensors, level, keep_nan=search.settings.keep_nan)
        except RuntimeError as error:
            search.reasons.append(f"{layout}, {level}: torch raised: {last_line(error)}")
            continue
        if level != "frozen" and not candidate.groups:
            search.reasons.append(f"{layout}, {level}: there is nothing that the bridge fuses")
            continue
        why = None
        if search.oracle is not None:
            why = search.oracle.complaint(_at_strides(candidate, tensors))
        if why is None:
            search.found.append((layout, candidate, tensors))
            return
        search.reasons.append(f"{layout}, {level}: {why}")


def _at_strides(
    candidate: Candidate, tensors: Sequence[Tensor]
) -> Callable[..., tuple[Tensor, ...]]:
    strides = [x.stride() for x in tensors]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        laid_out = [_restride(x, stride) for x, stride in zip(given, strides, strict=True)]
        with autocast_recipe(None):
            return candidate.function(*laid_out)

    return run


def _choose(
    search: _Search, inputs: Sequence[Tensor], outputs: Spec | None, start: float
) -> Bucket:
    """Takes the fastest of what is right; eager if that is."""
    sides: list[Callable[[], object]] = [lambda: search.eager(*inputs)]
    for _, candidate, tensors in search.found:
        sides.append(_closed(candidate, tensors))
    times = _medians(sides)
    best = 0
    for side, seconds in enumerate(times):
        if seconds * _MARGIN < times[best]:
            best = side
    if best == 0:
        reason = f"measured: eager {1e3 * times[0]:.3g} ms, others {1e3 * min(times[1:]):.3g} ms"
        return _in_eager(inputs, [*search.reasons, reason], start, search.notes, times[0])
    layout, candidate, tensors = search.found[best - 1]
    findings = Counter(
        f"{f.op.removeprefix('aten::')}: {f.fault} ({f.action})" for f in candidate.findings
    )
    report = ShapeReport(
        shapes=tuple(tuple(x.shape) for x in inputs),
        state="fused" if candidate.groups else "frozen",
        layout=layout,
        groups=tuple(GroupReport(name, ops) for name, ops in candidate.groups.items()),
        left_out=candidate.left_out,
        findings=dict(findings),
        reasons=tuple(search.reasons),
        notes=tuple(search.notes),
        warm_ups=candidate.warm_ups,
        build_s=time.perf_counter() - start,
        eager_s=times[0],
        chosen_s=times[best],
    )
    strides = tuple(tuple(x.stride()) for x in tensors)
    return Bucket(report, candidate.function, outputs, strides, inputs=tuple(tensors))


def _closed(candidate: Candidate, tensors: Sequence[Tensor]) -> Callable[[], Any]:
    def call() -> Any:
        with autocast_recipe(None):
            return candidate.function(*tensors)

    return call


def _medians(sides: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each, called in turn."""
    samples: list[list[float]] = [[] for _ in sides]
    begin = time.perf_counter()
    for number in range(_MOST_SAMPLES):
        for side, times in zip(sides, samples, strict=True):
            start = time.perf_counter()
            side()
            times.append(time.perf_counter() - start)
        if number >= 2 and time.perf_counter() - begin > _MEASURE_S:
            break
    return [statistics.median(times) for times in samples]


def _in_eager(
    inputs: Sequence[Tensor],
    reasons: Sequence[str],
    start: float,
    notes: Sequence[str] = (),
    eager_s: float | None = None,
) -> Bucket:
    report = ShapeReport(
        shapes=tuple(tuple(x.shape) for x in inputs),
        state="eager",
        reasons=tuple(reasons),
        notes=tuple(notes),
        build_s=time.perf_counter() - start,
        eager_s=eager_s,
        chosen_s=eager_s,
    )
    return Bucket(report, None)
