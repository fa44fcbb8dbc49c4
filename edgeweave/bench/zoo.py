"""The zoo: one model through `edgeweave.optimize`: is it right, who ran it, and how fast.

`edgeweave bench zoo` runs all of them, each in a process of its own, which is this module:
`python -m edgeweave.bench.zoo NAME --json FILE`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import output_graph

import edgeweave
from edgeweave.bench.zoo_models import Entry, zoo
from edgeweave.compile._record import GraphRecord, recording

__all__ = ["Result", "Settings", "main", "measure"]

# Distances from float64 are relative to a result's largest magnitude. A compiled model may be a few
# times as far away as eager, since other orders of additions round in other ways, and by this much
# in any case: 256 roundings of float32, 4 of bfloat16.
_TIMES_EAGER = 4.0
_FLOOR = {"fp32": 256 * 2.0**-23, "bf16": 4 * 2.0**-8}
# Calls shorter than this are repeated within a sample.
_SAMPLE_S = 2e-3


@dataclass(frozen=True)
class Settings:
    """How each model is run.

    Attributes:
        precision: "fp32" or "bf16", as of `optimize`; eager runs in the same.
        engine: As of `optimize`.
        train: Forward and backward instead of inference.
        quick: Small inputs.
        rounds: How often each side is timed; 0 leaves timing out.
        threads: Of torch, for both sides; None leaves them.
    """

    precision: Any = "fp32"
    engine: Any = "auto"
    train: bool = False
    quick: bool = False
    rounds: int = 15
    threads: int | None = None


@dataclass(frozen=True)
class Result:
    """What became of one model.

    Attributes:
        name: The model.
        family: Its family.
        precision: "fp32" or "bf16".
        status: `ok`, `wrong`, `error`, `timeout`, `crash`, or `no eager` where the model itself
            does not run in this precision, which is no failure.
        engines: Of its graphs, in order, without repetitions.
        graphs: How many were compiled.
        breaks: Graph breaks.
        ops: Calls of edgeweave's ops.
        calls: Calls in the graphs, after the passes.
        share: Share of the calls that an engine or an op of edgeweave ran, and not eager; 0 if
            nothing was compiled, None if the model failed.
        left: Why graphs, or parts of them, were left to eager.
        error: Largest distance of a result from float64, relative to the largest magnitude.
        eager_error: The same of eager.
        ours_ms: Median of a compiled call; None if it was not timed.
        eager_ms: Median of a call in eager; None if it was not timed.
        speedup: Ratio of the medians of calls timed in turn; None if they were not.
        compile_s: Seconds of the first call.
        message: What was wrong.
    """

    name: str
    family: str
    precision: str
    status: str
    engines: tuple[str, ...] = ()
    graphs: int = 0
    breaks: int = 0
    ops: int = 0
    calls: int = 0
    share: float | None = None
    left: tuple[str, ...] = ()
    error: float | None = None
    eager_error: float | None = None
    ours_ms: float | None = None
    eager_ms: float | None = None
    speedup: float | None = None
    compile_s: float = 0.0
    message: str = ""


def measure(entry: Entry, settings: Settings) -> Result:
    """Run one model compiled and in eager, compare both with float64, time them in turn.

    Args:
        entry: The model.
        settings: How.

    Returns:
        The result; what a model raises is in it. A wrong model is not timed.

    Example:
        >>> from edgeweave.bench.zoo import Settings, measure
        >>> from edgeweave.bench.zoo_models import zoo
        >>> measure(zoo()["SAGEConv"], Settings(engine="eager", quick=True, rounds=0)).status
        'ok'
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        model, (args, kwargs) = entry.make(settings.quick)
        model.train(False).requires_grad_(settings.train)
        with recording() as records:
            return _measure(entry, settings, _Call(model, args, kwargs, settings.train), records)
    except Exception as error:  # whatever a model does, the others are measured
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Result(entry.name, entry.family, settings.precision, "error", message=text[:300])


@dataclass(frozen=True)
class _Call:
    """A model with the arguments of a call."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    train: bool

    def run(self, function: Callable[..., Any]) -> list[Tensor]:
        """The floating-point results; in training also the gradients of the parameters."""
        # Some models draw numbers in their first call.
        torch.manual_seed(1)
        with nullcontext() if self.train else torch.no_grad():
            found = _tensors(function(*self.args, **self.kwargs))
            out = [tensor for tensor in found if tensor.is_floating_point()]
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        losses = [tensor for tensor in out if tensor.requires_grad]
        if not self.train or not wanted or not losses:
            return [tensor.detach() for tensor in out]
        double = losses[0].dtype == torch.float64
        loss = sum((t if double else t.float()).square().mean() for t in losses)
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)  # type: ignore[arg-type]
        return [*[t.detach() for t in out], *[g for g in grads if g is not None]]

    def exact(self) -> list[Tensor] | None:
        """The results in float64; None for a model that insists on a narrower type."""
        model = copy.deepcopy(self.model).double()
        call = _Call(model, _double(self.args), _double(self.kwargs), self.train)
        try:
            return call.run(model)
        except (RuntimeError, TypeError, ValueError):
            return None


def _measure(entry: Entry, settings: Settings, call: _Call, records: list[GraphRecord]) -> Result:
    compiled = edgeweave.optimize(
        call.model,
        engine=settings.engine,
        precision=settings.precision,
        training=settings.train,
    )
    bf16 = settings.precision == "bf16"

    def eager(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            return call.model(*args, **kwargs)

    try:
        theirs = call.run(eager)
    except Exception as raised:  # the library's own fault: nothing to be compared with
        text = " ".join(f"eager raises {type(raised).__name__}: {raised}".split())
        return Result(entry.name, entry.family, settings.precision, "no eager", message=text[:300])
    # Not Dynamo's counters, which leave out breaks at sizes that it cannot guard on.
    reasons: list[Any] = vars(output_graph)["graph_break_reasons"]
    known_reasons = len(reasons)
    start = time.perf_counter()
    if settings.rounds and compiled.may_decide():
        torch.manual_seed(1)
        compiled.decide(*call.args, **call.kwargs)
    ours = call.run(compiled)
    compile_s = time.perf_counter() - start
    # Without a float64 reference eager is the reference, in float32.
    exact = call.exact() or call.run(call.model)
    message = _mismatch(ours, theirs, exact)
    error, eager_error = _distance(ours, exact), _distance(theirs, exact)
    right = not message and error <= _TIMES_EAGER * eager_error + _FLOOR[settings.precision]
    times: dict[str, float] = {}
    if right and settings.rounds:
        times = _time({"ours": compiled, "eager": eager}, call, settings.rounds)
    for record in records:
        record.settle()
    calls = sum(record.calls_after for record in records)
    share = sum(record.share * record.calls_after for record in records) / max(calls, 1)
    left = tuple(dict.fromkeys(record.left for record in records if record.left))
    decision = compiled.decision
    if decision is not None and not decision.compiled:
        share = 0.0
        left = (
            f"the model itself is faster: {decision.model_ms:.3g} ms, "
            f"{decision.compiled_ms:.3g} ms compiled",
        )
    return Result(
        entry.name,
        entry.family,
        settings.precision,
        "ok" if right else "wrong",
        engines=tuple(dict.fromkeys(record.engine for record in records)),
        graphs=len(records),
        breaks=len(reasons) - known_reasons,
        ops=sum(sum(record.ops.values()) for record in records),
        calls=calls,
        share=share,
        left=left,
        error=_finite(error),
        eager_error=_finite(eager_error),
        ours_ms=times.get("ours"),
        eager_ms=times.get("eager"),
        speedup=times["eager"] / times["ours"] if times else None,
        compile_s=compile_s,
        message=message,
    )


def _time(sides: Mapping[str, Callable[..., Any]], call: _Call, rounds: int) -> dict[str, float]:
    """Median milliseconds of a call of each side, timed in turn."""
    repeats = {}
    for name, side in sides.items():
        call.run(side)
        start = time.perf_counter()
        call.run(side)
        repeats[name] = max(1, math.ceil(_SAMPLE_S / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call.run(side)
            times[name].append(1e3 * (time.perf_counter() - start) / repeats[name])
    return {name: statistics.median(found) for name, found in times.items()}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _double(each) for key, each in value.items()}
    return tuple(_double(each) for each in value) if isinstance(value, tuple) else value


def _mismatch(ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]) -> str:
    """What no distance tells: another number of results, other shapes, another dtype than eager."""
    if not len(ours) == len(theirs) == len(exact):
        return f"{len(ours)} results, {len(theirs)} in eager, {len(exact)} in float64"
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine.shape != other.shape or mine.dtype is not other.dtype:
            return (
                f"result {position} is {mine.dtype} {list(mine.shape)}, "
                f"in eager {other.dtype} {list(other.shape)}"
            )
    return ""


def _distance(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Largest error; infinite where a result is no number and the exact one is."""
    worst = 0.0
    for result, true in zip(results, exact, strict=False):
        known = true.isfinite()
        if result.shape != true.shape or not known.any():
            continue
        off = (result.double() - true.double())[known].abs()
        scale = max(float(true[known].abs().max()), 1e-6)
        worst = max(worst, float(off.nan_to_num(math.inf, math.inf).max()) / scale)
    return worst


def _finite(value: float) -> float | None:
    # JSON has no infinities.
    return value if math.isfinite(value) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one model and write its result: the process that `edgeweave bench zoo` starts.

    Args:
        argv: The command line's words, `sys.argv[1:]` if None.

    Returns:
        0; whatever became of the model is in the file.
    """
    parser = argparse.ArgumentParser(prog="python -m edgeweave.bench.zoo")
    parser.add_argument("name")
    parser.add_argument("--settings", default="{}", metavar="JSON")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    settings = Settings(**json.loads(args.settings))
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    result = measure(zoo()[args.name], settings)
    args.json.write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
