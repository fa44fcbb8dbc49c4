"""What the pipeline did, kept for `explain`: rewrites with their source lines, engines, times."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import fx

from ._outcome import Outcome
from ._snapshots import Snapshots, readable

__all__ = [
    "GraphRecord",
    "Rewrite",
    "add_record",
    "is_recorded",
    "recording",
    "rewrite_each",
    "source_of",
]

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')


@dataclass(frozen=True)
class Rewrite:
    """One change that a pass made to a graph.

    Attributes:
        name: Of the pass.
        what: What was there and what is there now.
        source: `file:line: code` of the innermost Python line that the calls came from; empty if
            the graph does not say.
        layer: Path and class of the innermost module around it; empty outside of modules.
    """

    name: str
    what: str
    source: str
    layer: str


def rewrite_each(
    module: fx.GraphModule, replace: Callable[[fx.Graph, fx.Node], Rewrite | None]
) -> list[Rewrite]:
    """Offer a graph's nodes to a function, in their order; nodes that nobody reads are left out.

    Args:
        module: The graph, which the function may change.
        replace: Replaces a node if it is what it looks for, and says what it did.

    Returns:
        What was replaced.
    """
    nodes = list(module.graph.nodes)
    found = (replace(module.graph, node) for node in nodes if node.users)
    return [rewrite for rewrite in found if rewrite is not None]


@dataclass
class GraphRecord:
    """What became of one graph that Dynamo captured.

    Attributes:
        calls_before: Calls in the graph as captured.
        calls_after: Calls after the passes.
        records_gradients: Whether a backward pass can follow.
        rewrites: What the passes changed, in order.
        engine: `inductor`, `onednn` or `eager`.
        reason: Why that one.
        times_ms: Milliseconds of the candidates where `engine="auto"` has measured: `onednn`,
            `inductor`, `passes + onednn`, `passes + ATen`, and `eager`, the graph as captured.
        ops: How often each of edgeweave's ops is in the graph.
        passes_s: Seconds of the passes.
        engine_s: Seconds until the engine returned a function (oneDNN and backward passes are
            compiled at their first call, and are not in it).
        got: Calls by who ran them, once the graph has run (`settle`).
        share: Share of the calls that were not left to eager.
        left: Why something was left to eager; empty if nothing was.
        refused: Reasons of single calls that oneDNN did not get, and how many gave each.
        snapshots: The graph before and after the passes, for `Report.draw`; not in `asdict`.
    """

    calls_before: int = 0
    calls_after: int = 0
    records_gradients: bool = False
    rewrites: tuple[Rewrite, ...] = ()
    engine: str = ""
    reason: str = ""
    times_ms: dict[str, float] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)
    passes_s: float = 0.0
    engine_s: float = 0.0
    got: dict[str, int] = field(default_factory=dict)
    share: float = 1.0
    left: str = ""
    refused: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Neither is data: what a report is made of must go into JSON.
        self.snapshots: Snapshots | None = None
        self.ask: Callable[[], Outcome] | None = None
        self.compiled: object = None
        self.cut_s = 0.0  # of oneDNN, which cuts and compiles at the first call

    def settle(self) -> None:
        """Ask the engine what it made of the graph, which it knows once the graph has run."""
        if self.ask is not None:
            outcome = self.ask()
            self.got, self.share = outcome.got, outcome.share
            self.left, self.refused = outcome.left, outcome.refused
            self.cut_s = outcome.seconds


_listeners: ContextVar[tuple[list[GraphRecord], ...]] = ContextVar("_listeners", default=())


@contextmanager
def recording() -> Iterator[list[GraphRecord]]:
    """Collect the records of all graphs that are compiled in the block, in this thread."""
    records: list[GraphRecord] = []
    token = _listeners.set((*_listeners.get(), records))
    try:
        yield records
    finally:
        _listeners.reset(token)


def is_recorded() -> bool:
    """Whether anybody wants to know: only then is more kept of a graph than its record."""
    return bool(_listeners.get())


def add_record(record: GraphRecord) -> None:
    """Give a record to every `recording()` block around the caller."""
    for records in _listeners.get():
        records.append(record)


def source_of(node: fx.Node) -> tuple[str, str]:
    """The Python line and the module that a call came from.

    Args:
        node: Of a graph that Dynamo made.

    Returns:
        (`file:line: code`, `path: Class`), each empty if the node does not say.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    source = ""
    if frames:
        path, line, _, code = frames[-1]
        source = f"{path}:{line}: {code.strip()}"
    stack = node.meta.get("nn_module_stack") or {}
    layer = ""
    for path, cls in stack.values():
        name = cls if isinstance(cls, str) else cls.__name__
        layer = f"{readable(path)}: {name.rpartition('.')[2]}"
    return source, layer
