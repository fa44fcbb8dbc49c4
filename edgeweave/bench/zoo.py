"""The zoo: every model through `edgeweave.optimize`, is it right, who ran it, and how fast.

`python -m edgeweave.bench.zoo [--quick] [--filter REGEX] [--engine NAME] [--precision fp32|bf16]
[--train] [--json FILE]`. Exit status 1 if a model raised or was further from float64 than eager.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import edgeweave
from edgeweave.bench.environment import describe_environment
from edgeweave.bench.zoo_models import Entry, zoo
from edgeweave.compile._record import recording

__all__ = ["Result", "main", "measure"]


@dataclass(frozen=True)
class Result:
    """What became of one model.

    Attributes:
        name: The model.
        family: Its family.
        status: `ok`, `wrong` or `error`.
        engines: Of its graphs, in order, separated by commas.
        ops: Calls of edgeweave's ops.
        breaks: Graph breaks.
        error: Largest distance of a result from float64, relative to the largest magnitude.
        eager_error: The same of eager.
        speedup: Eager over compiled, of the fastest of the rounds; None if it failed.
        compile_s: Seconds of the first call.
        message: Of the exception, if there was one.
    """

    name: str
    family: str
    status: str
    engines: str = ""
    ops: int = 0
    breaks: int = 0
    error: float = math.nan
    eager_error: float = math.nan
    speedup: float | None = None
    compile_s: float = 0.0
    message: str = ""


def measure(
    entry: Entry,
    *,
    quick: bool = False,
    engine: Any = "auto",
    precision: Any = "fp32",
    train: bool = False,
    rounds: int = 5,
) -> Result:
    """Run one model compiled and in eager, in turn.

    Args:
        entry: The model.
        quick: Small inputs.
        engine: As of `optimize`.
        precision: As of `optimize`; eager runs in the same.
        train: Forward and backward instead of inference.
        rounds: How often each side is timed.

    Returns:
        The result; what a model raises is in it.

    Example:
        >>> from edgeweave.bench.zoo import measure
        >>> from edgeweave.bench.zoo_models import zoo
        >>> measure(zoo()["SAGEConv"], quick=True, engine="eager", rounds=1).status
        'ok'
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    try:
        model, (args, kwargs) = entry.make(quick)
        model.train(False).requires_grad_(train)
        with recording() as records:
            return _measure(entry, model, args, kwargs, engine, precision, train, rounds, records)
    except Exception as error:  # whatever a model does, the others are measured
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Result(entry.name, entry.family, "error", message=text[:200])


def _measure(
    entry: Entry,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    engine: Any,
    precision: Any,
    train: bool,
    rounds: int,
    records: list[Any],
) -> Result:
    compiled = edgeweave.optimize(model, engine=engine, precision=precision)
    cast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()

    def eager(*a: Any, **k: Any) -> Any:
        with cast:
            return model(*a, **k)

    start = time.perf_counter()
    ours = _once(compiled, model, args, kwargs, train)
    compile_s = time.perf_counter() - start
    theirs = _once(eager, model, args, kwargs, train)
    exact_model = copy.deepcopy(model).double()
    exact = _once(exact_model, exact_model, _double(args), _double(kwargs), train)
    error, eager_error = _distance(ours, exact), _distance(theirs, exact)
    unit = 2.0**-8 if precision == "bf16" else 2.0**-23
    times: dict[str, list[float]] = {"ours": [], "eager": []}
    for _ in range(rounds):
        for side, function in (("ours", compiled), ("eager", eager)):
            start = time.perf_counter()
            _once(function, model, args, kwargs, train)
            times[side].append(time.perf_counter() - start)
    return Result(
        entry.name,
        entry.family,
        "ok" if error <= 4 * eager_error + 256 * unit else "wrong",
        ",".join(dict.fromkeys(record.engine for record in records)),
        sum(sum(record.ops.values()) for record in records),
        sum(torch._dynamo.utils.counters["graph_break"].values()),
        error,
        eager_error,
        min(times["eager"]) / min(times["ours"]),
        compile_s,
    )


def _once(
    function: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any, train: bool
) -> list[Tensor]:
    """The floating-point results of a call; in training also the gradients of the parameters."""
    with nullcontext() if train else torch.no_grad():
        out = [t for t in _tensors(function(*args, **kwargs)) if t.is_floating_point()]
    wanted = [p for p in model.parameters() if p.requires_grad]
    if not train or not wanted:
        return out
    loss = sum(t.float().square().mean() if t.dtype != torch.float64 else t.square().mean()
               for t in out)  # fmt: skip
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)  # type: ignore[arg-type]
    return [*[t.detach() for t in out], *[g for g in grads if g is not None]]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
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


def _distance(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    worst = 0.0
    for result, true in zip(results, exact, strict=True):
        scale = float(true.abs().max()) if true.numel() else 0.0
        if scale > 0 and math.isfinite(scale):
            worst = max(worst, float((result.double() - true).abs().max()) / max(scale, 1e-6))
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    """Run the zoo and print a line for each model.

    Args:
        argv: The command line's words, `sys.argv[1:]` if None.

    Returns:
        0, or 1 if a model raised or was wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m edgeweave.bench.zoo")
    parser.add_argument("--quick", action="store_true", help="small inputs")
    parser.add_argument("--filter", default="", metavar="REGEX", help="only models that match")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--train", action="store_true", help="forward and backward")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    args = parser.parse_args(argv)
    results = []
    for entry in zoo().values():
        if re.search(args.filter, f"{entry.family}/{entry.name}"):
            results.append(
                measure(
                    entry,
                    quick=args.quick,
                    engine=args.engine,
                    precision=args.precision,
                    train=args.train,
                    rounds=args.rounds,
                )
            )
            print(_line(results[-1]), flush=True)
    print(_summary(results))
    if args.json is not None:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        record = {
            "environment": describe_environment(),
            "settings": settings,
            "results": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any(result.status != "ok" for result in results))


def _line(result: Result) -> str:
    if result.status == "error":
        return f"{result.name:<28} error  {result.message}"
    return (
        f"{result.name:<28} {result.status:<6} {result.speedup:6.2f}x  {result.engines:<16} "
        f"ops {result.ops:>2}  breaks {result.breaks}  error {result.error:.1e} "
        f"(eager {result.eager_error:.1e})  compiled in {result.compile_s:.1f} s"
    )


def _summary(results: Sequence[Result]) -> str:
    good = [result for result in results if result.status == "ok"]
    whole = sum("eager" not in result.engines for result in good)
    lines = [f"{len(good)} of {len(results)} right, {whole} of them not left to eager"]
    for family in dict.fromkeys(result.family for result in good):
        ratios = [math.log(r.speedup) for r in good if r.family == family and r.speedup]
        mean = math.exp(sum(ratios) / len(ratios)) if ratios else math.nan
        lines.append(f"  {family}: {len(ratios)} models, geometric mean {mean:.2f}x over eager")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
