"""Edges cut into tiles of whole rows, so that what is made per edge stays in the cache.

A tile holds the edges of some consecutive destinations (sources, for the transpose) in the plan's
order. Values of a tile's edges are computed, reduced into its rows, and forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._cache import charge
from ._plan import Plan

__all__ = ["EdgeTile", "edge_tiles", "sorted_edges", "tile_bounds"]


@dataclass(frozen=True)
class SortedEdges:
    """The edges of a plan in the order of their rows; int64 all.

    Attributes:
        ptr: `[rows + 1]`; where the edges of a row begin.
        row: `[E]`; the destination of each edge (`transpose`: the source).
        other: `[E]`; the node at the other end.
        position: `[E]`; where the edge was in the input.
    """

    ptr: Tensor
    row: Tensor
    other: Tensor
    position: Tensor


def sorted_edges(plan: Plan, transpose: bool) -> SortedEdges:
    """The edges of a plan by destination, or by source; made anew at each call."""
    names = ("colptr", "row", "perm_t") if transpose else ("rowptr", "col", "perm")
    ptr, other, position = (plan.array(name).long() for name in names)
    rows = torch.arange(ptr.numel() - 1)
    row = torch.repeat_interleave(rows, ptr.diff(), output_size=plan.num_edges)
    return SortedEdges(ptr, row, other, position)


def tile_bounds(ptr: Tensor, most_edges: int, most_rows: int) -> list[tuple[int, int]]:
    """Ranges of rows with at most so many edges (but for a row that has more) and rows each."""
    out = []
    rows = ptr.numel() - 1
    begin = 0
    while begin < rows:
        limit = ptr[begin] + most_edges
        end = int(torch.searchsorted(ptr, limit, right=True)) - 1
        end = min(max(end, begin + 1), begin + most_rows, rows)
        out.append((begin, end))
        begin = end
    return out


@dataclass(frozen=True)
class EdgeTile:
    """Some destinations and all their edges.

    Attributes:
        rows: The destinations.
        span: The edges, in the order of `SortedEdges`.
        edges: Plan of the edges: destinations counted from the first of the tile, all sources.
        groups: Plan of the destinations alone, for values per edge.
        position: `[edges]`; where the edges were in the input.
        sources: `[edges]`; the source of each.
    """

    rows: slice
    span: slice
    edges: Plan
    groups: Plan
    position: Tensor
    sources: Tensor


@dataclass(frozen=True)
class EdgeTiles:
    """All tiles of a plan.

    Attributes:
        tiles: In order.
        sources: Plan over the source of each edge, in the order of the tiles: what gathers the
            gradients of all tiles.
    """

    tiles: list[EdgeTile]
    sources: Plan


def edge_tiles(plan: Plan, most_edges: int) -> EdgeTiles:
    """Tiles by destination; kept with the plan.

    Args:
        plan: A plan over edges.
        most_edges: Edges of a tile; a row with more is a tile of its own.
    """

    def build() -> EdgeTiles:
        edges = sorted_edges(plan, False)
        tiles = []
        for begin, end in tile_bounds(edges.ptr, most_edges, plan.num_dst):
            span = slice(int(edges.ptr[begin]), int(edges.ptr[end]))
            local = edges.row[span] - begin
            rows = end - begin
            tiles.append(
                EdgeTile(
                    slice(begin, end),
                    span,
                    Plan(local, edges.other[span], rows, plan.num_src),
                    Plan(local, None, rows, 0),
                    edges.position[span],
                    edges.other[span],
                )
            )
        made = EdgeTiles(tiles, Plan(edges.other, None, plan.num_src, 0))
        parts = [made.sources, *(p for t in tiles for p in (t.edges, t.groups))]
        # Two int64 per edge beside the plans: where it was, and its source.
        charge(plan, sum(p.nbytes_bound for p in parts) + 16 * plan.num_edges)
        return made

    return plan.memo(("edge_tiles", most_edges), build)
