"""The passes over a captured graph, in their order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import fx

from .. import _version
from .._plan import _compiled, _traced, _traced_edges, _traced_network
from . import _ops
from ._factor_scales import factor_scales
from ._fuse_gcn import fuse_gcn, fuse_self_loops, share_self_loops
from ._fuse_mm import fuse_mm
from ._fuse_multi import fuse_multi
from ._fuse_network import fuse_network
from ._fuse_pairs import fuse_pairs
from ._fuse_scores import fuse_scores
from ._fuse_softmax import fuse_softmax
from ._fuse_variance import fuse_variance
from ._move_linear import move_linear
from ._reading import follow_writes, name_of
from ._record import Rewrite
from ._replace_scatter import replace_gather, replace_scatter
from ._replace_segment import replace_segment
from ._snapshots import Snapshots
from ._writing import erase_dead

__all__ = ["PASSES", "Pass", "pipeline_id", "run_passes"]

# The rewritten graphs call these ops, so they must be registered.
_REGISTERED = (
    _compiled.mm_op,
    _traced.softmax_op,
    *_traced_edges.registered,
    *_traced_network.registered,
    *_ops.registered,
)


@dataclass(frozen=True)
class Pass:
    """One rewriting of a captured graph.

    Attributes:
        name: A verb phrase; `options={"without": [name]}` leaves the pass out.
        version: Goes up when the pass makes other graphs than before.
        run: From a graph, which it changes in place, to what it replaced.
    """

    name: str
    version: int
    run: Callable[[fx.GraphModule], list[Rewrite]]

    @property
    def id(self) -> str:
        """Stable name of what the pass does, part of the key of Inductor's cache."""
        return f"edgeweave.{self.name}.{self.version}"


# Segments first, since they become reductions; softmax, since its parts are reductions and gathers;
# linear layers out of the messages, so that more is a gather or a sum of two; then what fuses; then
# what is left.
PASSES: tuple[Pass, ...] = (
    Pass("replace_segment", 1, replace_segment),
    Pass("fuse_self_loops", 1, fuse_self_loops),
    Pass("fuse_softmax", 1, fuse_softmax),
    Pass("move_linear", 1, move_linear),
    Pass("fuse_mm", 1, fuse_mm),
    Pass("fuse_gcn", 1, fuse_gcn),
    Pass("fuse_scores", 1, fuse_scores),
    Pass("replace_scatter", 1, replace_scatter),
    Pass("fuse_variance", 1, fuse_variance),
    Pass("fuse_multi", 2, fuse_multi),
    Pass("fuse_pairs", 1, fuse_pairs),
    Pass("fuse_network", 1, fuse_network),
    Pass("factor_scales", 1, factor_scales),
    Pass("replace_gather", 1, replace_gather),
    Pass("share_self_loops", 1, share_self_loops),
)
"""What `run_passes` runs, in order."""


def run_passes(
    module: fx.GraphModule, without: Collection[str] = (), snapshots: Snapshots | None = None
) -> list[Rewrite]:
    """Rewrite a graph that Dynamo captured.

    Args:
        module: The graph, changed in place.
        without: Names of passes to leave out.
        snapshots: Is told what each pass took out and put in.

    Returns:
        What was replaced, in order.

    Example:
        >>> import torch
        >>> from edgeweave.compile import run_passes
        >>> run_passes(torch.fx.symbolic_trace(torch.nn.ReLU()))
        []
    """
    done: list[Rewrite] = []
    follow_writes(module.graph)
    # Dynamo leaves calls behind that only looked at a shape; they would keep what they look at.
    erase_dead(module.graph, [node for node in reversed(module.graph.nodes) if not node.users])
    if snapshots is not None:
        snapshots.after_pass("", module.graph)
    for each in PASSES:
        if each.name not in without:
            done += each.run(module)
            if snapshots is not None:
                snapshots.after_pass(each.name, module.graph)
    if done:
        module.graph.lint()
        module.recompile()
    return done


def pipeline_id(without: Collection[str] = ()) -> str:
    """A key that changes when the passes may make another graph of the same one."""
    ids = [each.id for each in PASSES if each.name not in without]
    return hashlib.sha256("/".join([_version.__version__, *ids]).encode()).hexdigest()[:16]


def count_ops(module: fx.GraphModule) -> dict[str, int]:
    """How often each of edgeweave's ops is called in a graph."""
    names = (name_of(node) for node in module.graph.nodes)
    return dict(Counter(name for name in names if name.startswith("edgeweave.")))
