"""oneDNN within a graph that also holds ops of edgeweave's: what stands between them, in regions.

The oneDNN backend captures what it is given anew and knows ATen alone. So a graph is cut at each op
that is not ATen's; a region with a convolution, or with a chain of matrix products, goes to oneDNN,
which measures it against ATen; the other regions and the ops run as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from ..graphfuse import edgeweave_onednn
from ._contents import dense_chain, foreign_op
from ._reading import changes_mode, writes

__all__ = ["Region", "cut_for_onednn"]


class Region(nn.Module):
    """Calls between two ops that are not ATen's; oneDNN takes them at the first call.

    Args:
        graph: The calls.

    Attributes:
        compiled: What oneDNN made of them; None before the first call, and where it cannot.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph
        self.compiled: Any = None
        self.train(False)

    @property
    def calls(self) -> int:
        """Calls of the region."""
        return sum(node.op.startswith("call_") for node in self.graph.graph.nodes)

    def forward(self, *inputs: Any) -> Any:
        """Run the region."""
        if self.compiled is None:
            self.compiled = self._compile(inputs)
        return self.compiled(*inputs)

    def _compile(self, inputs: Sequence[Any]) -> Any:
        # oneDNN converts from float32 itself, and reads sizes off tensors.
        fits = all(
            isinstance(value, Tensor) and value.dtype in (torch.float32, torch.int64, torch.bool)
            for value in inputs
        )
        return edgeweave_onednn(self.graph, inputs) if fits else self.graph.forward


def cut_for_onednn(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | None:
    """Cut a graph at the ops that are not ATen's, and give regions to oneDNN.

    Args:
        module: The graph after the passes; it stays as it is.
        inputs: Of `real_inputs`.

    Returns:
        A graph of regions and the ops between them; None if oneDNN has nothing to gain here, sizes
        are open, or the graph writes to a tensor or changes the mode of autocast.
    """
    sized = any(not isinstance(value, Tensor) for value in inputs)
    if sized or writes(module) or changes_mode(module):
        return None
    part, parts = 0, {}
    for node in module.graph.nodes:
        foreign = bool(foreign_op(node))
        part += foreign
        parts[node] = part
        part += foreign
    cut: fx.GraphModule = split_module(
        module, module, lambda node: parts[node], keep_original_order=True
    )
    found = False
    for name, region in list(cut.named_children()):
        if isinstance(region, fx.GraphModule) and dense_chain(region):
            cut.set_submodule(name, Region(region))
            found = True
    return cut if found else None
