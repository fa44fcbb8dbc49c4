"""Times of the CUDA kernels alone, with the bandwidth that they reach.

They show where the time of a layer goes, and what another size of tile changes. Bytes are counted
as if nothing read once were found in a cache again: more than the memory's own bandwidth means that
caches helped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from edgeweave.bench.generators import ARXIV_NODES, ARXIV_PAIRS, block_model
from edgeweave.sparse import Graph

_HEADS = 4
_WIDTH = 128


def _kernels(
    edges: Any, nodes: int, dtype: torch.dtype
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, bytes without reuse, and call of each kernel."""
    from edgeweave._triton import _ops as ops

    count, size = edges.num_edges, torch.finfo(dtype).bits // 8
    x = torch.randn(nodes, _WIDTH, device="cuda").to(dtype)
    weight = torch.rand(count, _HEADS, device="cuda").to(dtype)
    att = torch.rand(_WIDTH, device="cuda").to(dtype)
    scale = torch.rand(nodes, device="cuda")
    top = ops.spmm(edges, False, x, 1, None, None, None, 2)
    messages, rows = count * _WIDTH * size, nodes * _WIDTH * size
    entries, ids = count * _HEADS * size, 4 * count
    yield (
        "sum",
        messages + rows + ids,
        lambda: ops.spmm(edges, False, x, 1, None, None, None, 0),
    )
    yield (
        "sum, transposed",
        messages + rows + ids,
        lambda: ops.spmm(edges, True, x, 1, None, None, None, 0),
    )
    yield (
        "sum, scaled (GCN)",
        messages + rows + 2 * ids,
        lambda: ops.spmm(edges, False, x, 1, None, scale, scale, 0),
    )
    yield (
        "sum, a weight per head",
        messages + rows + 2 * ids + entries,
        lambda: ops.spmm(edges, False, x, _HEADS, weight, None, None, 0),
    )
    yield (
        "max",
        messages + rows + ids,
        lambda: ops.spmm(edges, False, x, 1, None, None, None, 2),
    )
    yield (
        "max, backward",
        3 * messages + 4 * rows + 2 * ids,
        lambda: ops.minmax_grad(edges, x, 1, None, top, x, True, False),
    )
    yield (
        "dot of two ends",
        messages + rows + 2 * ids + entries,
        lambda: ops.sddmm(edges, x, x, _HEADS, None, None),
    )
    yield (
        "scores of GATv2",
        messages + rows + 2 * ids + entries,
        lambda: ops.plan_scores(edges, x, x, att, _HEADS, 0.2),
    )
    yield (
        "scores of GATv2, backward",
        2 * (messages + 2 * rows + 2 * ids + entries),
        lambda: [
            ops.plan_scores_grad(edges, turned, x, x, att, weight, _HEADS, 0.2, not turned)
            for turned in (False, True)
        ],
    )
    yield "softmax", 4 * entries + 3 * ids, lambda: ops.plan_softmax(edges, weight)
    yield (
        "softmax, backward",
        5 * entries + 2 * ids,
        lambda: ops.plan_softmax_grad(edges, weight, weight),
    )


def _milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    event: Any = torch.cuda.Event
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(sorted(times)[len(times) // 2])


def main() -> None:
    """Print a table for each graph, dtype and size of tile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", default="1024", help="values per tile, with commas between")
    parser.add_argument("--graphs", default="1,10", help="multiples of arxiv's size")
    args = parser.parse_args()
    from edgeweave._triton import _launch

    for scale in map(float, args.graphs.split(",")):
        nodes, pairs = int(ARXIV_NODES * scale), int(ARXIV_PAIRS * scale)
        data = block_model(nodes, pairs, order="random")
        edge_index: Tensor = data.edge_index.cuda()
        edges = Graph(edge_index, size=(nodes, nodes)).plan().handle
        for dtype in (torch.float32, torch.bfloat16):
            for tile in map(int, args.tiles.split(",")):
                _launch._TILE_VALUES = tile
                print(f"\n{data.num_edges} edges, {dtype}, tiles of {tile}")
                for name, nbytes, call in _kernels(edges, nodes, dtype):
                    ms = _milliseconds(call)
                    print(f"  {name:28} {ms:9.3f} ms {nbytes / ms / 1e6:8.0f} GB/s")
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
