"""The cases of `edgeweave bench inference`: model by batch by precision, all engines side by side.

Every engine's result is compared with a float64 run of the model before anything is timed; a peer
whose result is wrong is left out by name, and so is one that raises. What building an engine took,
its first call included, is in the case's `params`: `compile ms: <engine>` and
`memory MiB: <engine>`, the largest growth of the process's resident memory meanwhile.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from edgeweave.bench.harness import CheckFailedError, distance_to_reference, measure
from edgeweave.bench.inference_engines import (
    ENGINES,
    TORCH_NATIVE,
    EngineUnavailableError,
    Run,
    Task,
    flat,
    make_eager,
)
from edgeweave.bench.inference_models import ZOO, build
from edgeweave.bench.records import Case, CaseResult, Reference, Settings, Side, Speedup

__all__ = ["InferenceRun", "inference_runs"]

BEST_OF_TORCH = "best of torch"
# A peer this far from the float64 result, or this many times as far as eager in the same precision,
# computes something else.
_WRONG = 1e-2
_TIMES_EAGER = 4.0
# Worker threads of these engines turn round for tens of milliseconds after a call.
_SETTLE_S = {"ONNX Runtime": 0.1, "OpenVINO": 0.1}
_SAMPLE_S = 0.005
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class InferenceRun:
    """One model at one batch size in one precision.

    Attributes:
        model: A key of `ZOO`.
        batch: Size of the batch.
        dtype: `"fp32"` or `"bf16"`.
        quick: The small variant.
        engines: Keys of `ENGINES`, ours first.
    """

    model: str
    batch: int
    dtype: str
    quick: bool
    engines: tuple[str, ...]

    @property
    def case_id(self) -> str:
        """Unique name."""
        return f"inference-{ZOO[self.model].family}/{self.model}/b{self.batch}/{self.dtype}"

    def run(self, settings: Settings) -> CaseResult:
        """Builds all engines, checks and times them.

        Args:
            settings: How long to measure.

        Returns:
            The result.
        """
        model, inputs = build(ZOO[self.model], self.batch, self.quick)
        task = Task(model, inputs, _DTYPES[self.dtype])
        reference = _reference(task)
        params: dict[str, str | int] = {
            "model": self.model,
            "batch": self.batch,
            "dtype": self.dtype,
        }
        sides = [side for name in self.engines if (side := _side(name, task, reference, params))]
        if not sides or sides[0].name != self.engines[0]:
            return CaseResult(
                self.case_id.split("/", 1)[0],
                self.case_id,
                params,
                "error",
                f"{self.case_id}: {self.engines[0]}: {params[f'left out: {self.engines[0]}']}",
            )
        ours, *peers = sides
        # Eager, channels_last and fuser3 share weights that the others would read from memory.
        case = Case(
            self.case_id.split("/", 1)[0],
            self.case_id,
            params,
            ours,
            peers,
            lambda: reference,
            warm_turns=True,
        )
        return _with_best_of_torch(measure(case, settings))


def inference_runs(quick: bool, engines: Sequence[str] = ()) -> list[InferenceRun]:
    """Lists the cases.

    Args:
        quick: Small variants of the models at batch 2, without Inductor, whose compiler takes
            longer than everything else together.
        engines: Keys of `ENGINES` to compare, ours first; none for all.

    Returns:
        The cases; bf16 only where the processor has instructions for it.

    Raises:
        ValueError: If an engine is unknown.

    Example:
        >>> from edgeweave.bench.inference import inference_runs
        >>> inference_runs(quick=True)[0].case_id
        'inference-conv/ResNet-50/b2/fp32'
    """
    for name in engines:
        if name not in ENGINES:
            raise ValueError(f"bench: --engines must be among {', '.join(ENGINES)}, got {name!r}")
    chosen = tuple(engines) or tuple(n for n in ENGINES if not (quick and n == "Inductor"))
    dtypes = ["fp32"] + ["bf16"] * bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return [
        InferenceRun(model, batch, dtype, quick, chosen)
        for model in ZOO
        for batch in ((2,) if quick else (1, 16))
        for dtype in dtypes
    ]


def _reference(task: Task) -> Reference:
    model = copy.deepcopy(task.model).double()
    args = [x.double() if x.is_floating_point() else x for x in task.inputs[0]]
    with torch.no_grad():
        values = flat(model(*args, **task.inputs[1]))
    eps = torch.finfo(task.dtype).eps
    # Sixty layers in bf16 lose digits that one layer keeps: what eager loses is the measure.
    eager = distance_to_reference(make_eager(task)(), Reference(values, eps=eps))
    return Reference(values, eps=eps, peer_limit=max(_WRONG, _TIMES_EAGER * eager))


def _side(name: str, task: Task, reference: Reference, params: dict[str, str | int]) -> Side | None:
    """Builds an engine and checks it; writes down why where it is left out."""
    gc.collect()
    with _memory_growth() as growth:
        start = time.perf_counter()
        try:
            run = ENGINES[name](task)
            result = run()
        except EngineUnavailableError as error:
            params[f"left out: {name}"] = str(error)
            return None
        except Exception as error:
            # A peer that does not take the model must not end the comparison of the others.
            params[f"left out: {name}"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            return None
        compile_s = time.perf_counter() - start
    try:
        far = distance_to_reference(result, reference)
    except CheckFailedError as error:
        params[f"left out: {name}"] = f"wrong: {error}"
        return None
    assert reference.peer_limit is not None
    if not far <= reference.peer_limit:
        params[f"left out: {name}"] = f"wrong: {far:.1e} from the float64 result"
        return None
    params[f"compile ms: {name}"] = round(1e3 * compile_s)
    params[f"memory MiB: {name}"] = growth[0] >> 20
    return Side(name, _ignoring_argument(run), settle_s=_SETTLE_S.get(name, 0.0))


def _ignoring_argument(run: Run) -> Callable[[Any], tuple[Tensor, ...]]:
    return lambda _: run()


@contextmanager
def _memory_growth() -> Iterator[list[int]]:
    """Yields a list whose entry is, at the end, by how many bytes resident memory grew at most."""
    process = psutil.Process()
    before = process.memory_info().rss
    growth = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_S):
            growth[0] = max(growth[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield growth
    finally:
        done.set()
        thread.join()
        growth[0] = max(growth[0], process.memory_info().rss - before)


def _with_best_of_torch(result: CaseResult) -> CaseResult:
    """Adds the fastest of torch's own engines as a peer of its own."""
    native = [t for t in result.timings if t.name in TORCH_NATIVE]
    if not native or result.timings[0].name in TORCH_NATIVE:
        return result
    best = min(native, key=lambda timing: timing.median_s)
    (speedup,) = (s for s in result.speedups if s.peer == best.name)
    return dataclasses.replace(
        result,
        params={**result.params, "best of torch is": best.name},
        distances={**result.distances, BEST_OF_TORCH: result.distances[best.name]},
        timings=[*result.timings, dataclasses.replace(best, name=BEST_OF_TORCH)],
        speedups=[
            *result.speedups,
            Speedup(BEST_OF_TORCH, speedup.ratio, speedup.q25, speedup.q75),
        ],
    )
