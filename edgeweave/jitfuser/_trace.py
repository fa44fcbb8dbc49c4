"""Trace, freeze, lint and warm up: from a model and inputs to a fused TorchScript function."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edgeweave.jitfuser._capture import Capture
from edgeweave.jitfuser._edit import Finding
from edgeweave.jitfuser._flags import fuser
from edgeweave.jitfuser._lint import guard_fusion
from edgeweave.jitfuser._prepare import prepare
from edgeweave.jitfuser._values import Values, probe

__all__ = ["LEVELS", "Candidate", "CaptureError", "Traced", "make_candidate", "trace"]

LEVELS = ("fused", "products", "frozen")
"""How much is left to the bridge, most first: all that is right, products and convolutions only,
or nothing (then the frozen graph still has its batch norms folded)."""

_MOST_WARM_UPS = 4
# Tracing and warming up change flags of the process: one at a time.
_recipe = threading.RLock()

Function = Callable[..., tuple[Tensor, ...]]


class CaptureError(Exception):
    """A model cannot be traced and frozen; the message says why."""


@dataclass(frozen=True)
class Traced:
    """A frozen graph.

    Attributes:
        graph: Without `self`; never changed, only copied.
        values: What its tensors are.
        warnings: What the tracer was not sure about.
    """

    graph: Any
    values: Values
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Candidate:
    """A function that could replace the model.

    Attributes:
        level: Of `LEVELS`.
        function: Takes and returns flat tensors.
        groups: Operations of each fused group, by the group's name.
        findings: What the lint pass changed.
        left_out: Operations outside of groups, by name; those that the bridge could map count too.
        warm_ups: Calls until the function was fused.
    """

    level: str
    function: Function
    groups: dict[str, tuple[str, ...]]
    findings: tuple[Finding, ...]
    left_out: dict[str, int] = field(default_factory=dict)
    warm_ups: int = 0


@contextmanager
def autocast_recipe(dtype: torch.dtype | None) -> Iterator[None]:
    """The setting in which a model is traced and run: no gradients, autocast as asked or off.

    TorchScript's own autocast pass is turned off, since the casts are in the trace; the weight
    cache is off, because a trace would keep its entries as constants of another trace.

    Args:
        dtype: Of autocast, or None to have none.

    Yields:
        None.
    """
    enabled = dtype is not None
    with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled, False):
        yield


def trace(capture: Capture, inputs: Sequence[Tensor], dtype: torch.dtype | None) -> Traced:
    """Traces and freezes a model.

    Args:
        capture: The model.
        inputs: Flat inputs.
        dtype: Of autocast, or None.

    Returns:
        The frozen graph.

    Raises:
        CaptureError: If that is not possible, or the graph would change its inputs or itself.
    """
    with _recipe, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script_autocast = torch._C._jit_set_autocast_mode(False)
        try:
            with autocast_recipe(dtype), fuser("none"):
                traced = torch.jit.trace(  # type: ignore[no-untyped-call]
                    capture, tuple(inputs), check_trace=False, strict=False
                )
                graph = _freeze(traced)
                return Traced(graph, probe(graph, inputs), _tracer_warnings(caught))
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"tracing failed: {last_line(error)}") from error
        finally:
            torch._C._jit_set_autocast_mode(script_autocast)


def _freeze(traced: Any) -> Any:
    """The graph of a frozen module, without `self`, without what it writes in place."""
    try:
        graph = torch.jit.freeze(traced.eval()).graph.copy()
    except RuntimeError:
        # Folding a batch norm into a layer of another width fails; the model may yet be right.
        graph = torch.jit.freeze(traced.eval(), optimize_numerics=False).graph.copy()
    if next(iter(graph.inputs())).uses():
        raise CaptureError("the model changes its own buffers or parameters")
    graph.eraseInput(0)
    torch._C._jit_pass_remove_mutation(graph)
    aliases = graph.alias_db()
    if any(aliases.has_writers(value) for value in graph.inputs()):
        raise CaptureError("the model writes into its inputs")
    prepare(graph)
    return graph


def make_candidate(
    traced: Traced, inputs: Sequence[Tensor], level: str, *, keep_nan: bool
) -> Candidate:
    """Makes a function of a frozen graph and runs it until it is fused.

    Args:
        traced: The graph.
        inputs: Flat inputs.
        level: Of `LEVELS`.
        keep_nan: See `guard_fusion`.

    Returns:
        The function and what is in it. If `level` asks for fusion and there is nothing to fuse,
        `groups` is empty.

    Raises:
        RuntimeError: What torch or oneDNN raise while they compile or run it.
    """
    graph = traced.graph.copy()
    findings: list[Finding] = []
    fuse = level != "frozen"
    if fuse:
        findings = guard_fusion(
            graph, traced.values, keep_nan=keep_nan, products_only=level == "products"
        )
    function: Any = torch._C._create_function_from_graph("edgeweave_jitfuser", graph)
    warm_ups, plan = 0, None
    profiled_runs = getattr(torch._C, "_jit_get_num_profiled_runs", lambda: 1)()
    with _recipe, fuser("fuser3" if fuse else "none"), autocast_recipe(None):
        while warm_ups < _MOST_WARM_UPS and plan is None:
            function(*inputs)
            warm_ups += 1
            # There is no optimised graph to look at before the profiled runs are over.
            if warm_ups > profiled_runs:
                plan = _fused_plan(function)
    groups = _groups(plan) if plan is not None else {}
    left_out = Counter(node.kind() for node in (plan or graph).nodes())
    return Candidate(level, function, groups, tuple(findings), _operations_only(left_out), warm_ups)


def _fused_plan(function: Any) -> Any:
    """The optimised graph with fused groups in it, or None while there is none."""
    for plan in function.get_debug_state().execution_plans.values():
        if plan.graph.findNode("prim::oneDNNFusionGroup", True) is not None:
            return plan.graph
    return None


def _groups(plan: Any) -> dict[str, tuple[str, ...]]:
    found = {}
    for number, node in enumerate(plan.findAllNodes("prim::oneDNNFusionGroup", True)):
        kinds = [inner.kind() for inner in node.g("Subgraph").nodes()]
        found[f"group {number}"] = tuple(k.removeprefix("aten::") for k in kinds if "aten::" in k)
    return found


def _operations_only(kinds: Counter[str]) -> dict[str, int]:
    return {
        kind.removeprefix("aten::"): n for kind, n in kinds.items() if kind.startswith("aten::")
    }


def _tracer_warnings(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """What the tracer says about values that it had to fix, without places and repeats."""
    # Imported here: a torch without TorchScript must be able to import this room.
    from torch.jit._trace import TracerWarning

    found = [str(w.message) for w in caught if issubclass(w.category, TracerWarning)]
    # The first sentence; what follows is the same every time.
    return tuple(dict.fromkeys(f"tracer: {text.split('. ')[0].strip()}" for text in found))


def last_line(error: BaseException) -> str:
    """The line of an error that says what went wrong; TorchScript puts it last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
