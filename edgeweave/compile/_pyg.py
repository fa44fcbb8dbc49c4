"""What Dynamo has to be told about PyG, if a program uses it."""

from __future__ import annotations

import functools
import sys

import torch

__all__ = ["prepare_pyg"]


def prepare_pyg() -> None:
    """Keep `RGCNConv` in one graph, from the first model of PyG's on that is optimized.

    The layer asks a heuristic, with the size of the largest relation, whether to call pyg-lib; and
    does not call it in compiled code whatever the answer is. So Dynamo is told an answer instead of
    breaking the graph at a number that depends on values. Eager code asks as before.
    """
    # PyG is never imported for this: a program that has not done so has no layers of it.
    if "torch_geometric.backend" in sys.modules:
        _settle_segment_matmul()


@functools.cache
def _settle_segment_matmul() -> None:
    backend = sys.modules["torch_geometric.backend"]

    @torch.compiler.substitute_in_graph(backend.use_segment_matmul_heuristic)
    def use_segment_matmul_heuristic(
        num_segments: int, max_segment_size: int, in_channels: int, out_channels: int
    ) -> bool:
        return False
