"""`explain`: what the pipeline makes of a model, and why."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import output_graph

from .._checks import describe
from ._drawing import draw_panels
from ._optimize import Decision, optimize
from ._options import Engine, Precision
from ._picture import panels_of
from ._record import GraphRecord, recording

__all__ = ["GraphBreak", "Report", "explain"]

_OP = "explain"
_MOST_REASONS = 8


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo could not go on, so that the model falls into several graphs.

    Attributes:
        reason: What it could not capture.
        source: `file:line: code` of the innermost line, empty if not known.
    """

    reason: str
    source: str


@dataclass(frozen=True)
class Report:
    """What became of a model; printed as a table.

    Attributes:
        model: Class of the model.
        graphs: Each graph that was compiled, in order, recompilations included.
        breaks: Where the model fell into several graphs.
        recompiled: Calls, by their number from 1 on, that compiled again.
        generated: Files that Inductor wrote, first those of the forward passes.
        first_call_s: Seconds of the first call, with all that was compiled for it.
        backward_s: Seconds of the first backward pass; None if there is none.
        stages: Seconds of each stage, all graphs together: `capture` by Dynamo, `passes`,
            `autograd` (AOTAutograd), `engine`; oneDNN's partitions and Inductor's backward
            passes, compiled at their first call, are in `engine` too.
        call_s: Seconds of the last call once more, when nothing is left to compile.
        decision: Whether the model itself is faster, as `optimize` asks for inference with
            `engine="auto"` and example inputs; None where it does not.
    """

    model: str
    graphs: tuple[GraphRecord, ...]
    breaks: tuple[GraphBreak, ...]
    recompiled: tuple[int, ...]
    generated: tuple[str, ...]
    first_call_s: float
    backward_s: float | None
    stages: dict[str, float]
    call_s: float
    decision: Decision | None = None

    def record(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return asdict(self)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw each graph as it was captured beside what its engine got.

        What passes took out and put in has a colour for each pass, the rest the colour of its
        engine; partitions of oneDNN have one each. Graphs of more than some 50 calls are folded by
        module.

        Args:
            path: A file ending in `.svg`, or `.png` (which needs matplotlib).

        Raises:
            ValueError: If the file ends in anything else.
        """
        pairs = [panels_of(number, graph) for number, graph in enumerate(self.graphs, 1)]
        draw_panels(pairs, next(_lines(self)), Path(path))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    precision: Precision = "fp32",
    training: bool | None = None,
    dynamic: bool | None = None,
    engine: Engine = "auto",
) -> Report:
    """Compile a model as `optimize` does, call it, and tell what happened.

    If the output records gradients, one backward pass runs too; the gradients are thrown away.

    Args:
        model: The model.
        inputs: Positional arguments of one call, as a tuple; or a list of such tuples, called one
            after the other, to see what compiles again.
        precision: As of `optimize`.
        training: As of `optimize`.
        dynamic: As of `optimize`.
        engine: As of `optimize`.

    Returns:
        The report.

    Raises:
        TypeError: If `model` is no module, or `inputs` neither a tuple nor a list of tuples.
        ValueError: As `optimize`, or if `inputs` is an empty list.

    Example:
        >>> import torch
        >>> from edgeweave.compile import explain
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> report = explain(model, (torch.randn(3, 4),), engine="eager")
        >>> len(report.graphs), report.breaks, report.graphs[0].engine
        (1, (), 'eager')
    """
    calls = _calls(inputs)
    compiled = optimize(
        model, precision=precision, training=training, dynamic=dynamic, engine=engine
    )
    reasons: list[Any] = vars(output_graph)["graph_break_reasons"]
    reasons_before, files_before = len(reasons), set(_generated_files())
    seconds_before = _compile_seconds()
    recompiled, first_call_s, backward_s = [], 0.0, None
    with recording() as records:
        for number, arguments in enumerate(calls, 1):
            known = len(records)
            start = time.perf_counter()
            out = compiled(*arguments)
            if number == 1:
                first_call_s = time.perf_counter() - start
                backward_s = _backward(out, model)
            elif len(records) > known:
                recompiled.append(number)
        start = time.perf_counter()
        compiled(*calls[-1])
        call_s = time.perf_counter() - start
        decision = compiled.decide(*calls[0]) if compiled.may_decide() else None
    for record in records:
        record.settle()
    return Report(
        model=type(compiled.original).__name__,
        graphs=tuple(records),
        breaks=tuple(_break(reason) for reason in reasons[reasons_before:]),
        recompiled=tuple(recompiled),
        generated=tuple(file for file in _generated_files() if file not in files_before),
        first_call_s=first_call_s,
        backward_s=backward_s,
        stages=_stages(records, seconds_before),
        call_s=call_s,
        decision=decision,
    )


def _calls(inputs: object) -> list[tuple[Any, ...]]:
    if isinstance(inputs, tuple):
        return [inputs]
    if not isinstance(inputs, list) or not all(isinstance(each, tuple) for each in inputs):
        raise TypeError(
            f"{_OP}: inputs must be a tuple of arguments or a list of such tuples, got "
            f"{describe(inputs)}"
        )
    if not inputs:
        raise ValueError(f"{_OP}: inputs must hold at least one call, got an empty list")
    return inputs


def _backward(out: Any, model: nn.Module) -> float | None:
    """Run the backward pass once, without leaving gradients behind."""
    outputs = [t for t in _tensors(out) if t.requires_grad]
    wanted = [p for p in model.parameters() if p.requires_grad]
    if not outputs or not wanted:
        return None
    start = time.perf_counter()
    torch.autograd.grad([t.float().sum() for t in outputs], wanted, allow_unused=True)
    return time.perf_counter() - start


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _compile_seconds() -> Counter[str]:
    """Seconds that torch has spent so far on each of its own phases."""
    metrics = torch._dynamo.utils.compilation_time_metrics
    return Counter({name: sum(times) for name, times in metrics.items()})


def _stages(records: Sequence[GraphRecord], before: Counter[str]) -> dict[str, float]:
    spent = _compile_seconds()
    spent.subtract(before)
    passes = sum(record.passes_s for record in records)
    inductor = spent["compile_fx.<locals>.fw_compiler_base"] + spent["backward._backward_impl"]
    capture = spent["_compile.compile_inner"] - spent["OutputGraph.call_user_compiler"]
    autograd = spent["create_aot_dispatcher_function"]
    autograd -= spent["compile_fx.<locals>.fw_compiler_base"]
    onednn = sum(record.cut_s for record in records)
    found = {"capture": capture, "passes": passes, "autograd": autograd}
    return {**{k: max(v, 0.0) for k, v in found.items()}, "engine": inductor + onednn}


def _generated_files() -> list[str]:
    from torch._inductor.codecache import PyCodeCache

    return [str(module.__file__) for module in PyCodeCache.modules]


def _break(reason: Any) -> GraphBreak:
    source = ""
    if reason.user_stack:
        frame = reason.user_stack[-1]
        source = f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"
    text = str(reason.reason).strip()
    return GraphBreak(text.splitlines()[0] if text else "not said", source)


def _lines(report: Report) -> Iterator[str]:
    breaks = len(report.breaks)
    yield (
        f"{report.model}: {_count(len(report.graphs), 'graph')} compiled, "
        f"{_count(breaks, 'graph break')}, {_count(len(report.recompiled), 'call')} recompiled"
    )
    backward = "" if report.backward_s is None else f", backward {report.backward_s:.2f} s"
    yield (
        f"  first call {report.first_call_s:.2f} s{backward}, "
        f"then {report.call_s * 1e3:.2f} ms a call"
    )
    yield "  stages  " + ", ".join(f"{name} {s:.2f} s" for name, s in report.stages.items())
    if report.decision is not None:
        run = "what was compiled" if report.decision.compiled else "the model itself"
        yield (
            f"  optimize runs {run}: {report.decision.compiled_ms:.2f} ms compiled, "
            f"{report.decision.model_ms:.2f} ms not"
        )
    for each in report.breaks:
        yield f"  break: {each.reason}"
        yield f"         {each.source}"
    for number, graph in enumerate(report.graphs, 1):
        mode = "training" if graph.records_gradients else "inference"
        yield f"graph {number} ({mode}): {graph.calls_before} calls -> {graph.calls_after}"
        yield f"  engine  {graph.engine}: {graph.reason}"
        yield from _measured(graph)
        yield f"  time    passes {graph.passes_s:.3f} s, engine {graph.engine_s:.2f} s"
        ops = ", ".join(f"{count} {name}" for name, count in sorted(graph.ops.items()))
        yield f"  ops     {ops or 'none of edgeweave'}"
        got = ", ".join(f"{who} {count}" for who, count in graph.got.items())
        yield f"  got     {got or 'nothing'}"
        if graph.left:
            yield f"  left    {graph.left}"
        reasons = Counter(graph.refused).most_common(_MOST_REASONS)
        yield from (f"  ATen    {count} x {reason}" for reason, count in reasons)
        width = max((len(rewrite.name) for rewrite in graph.rewrites), default=0)
        for rewrite in graph.rewrites:
            layer = f"  [{rewrite.layer}]" if rewrite.layer else ""
            yield f"  {rewrite.name:<{width}}  {rewrite.what}{layer}"
            yield f"  {'':<{width}}  {rewrite.source}"
    for file in report.generated:
        yield f"generated {file}"


def _measured(graph: GraphRecord) -> Iterator[str]:
    if graph.times_ms:
        said = ", ".join(f"{name} {ms:.3f} ms" for name, ms in graph.times_ms.items())
        yield f"  timed   {said}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
