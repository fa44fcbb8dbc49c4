"""Dot products, and what is like them, of the features at the two ends of each edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._edges import CHUNK, DeviceEdges
from ._launch import accumulator, blocks_for, launch, tl_dtype
from .kernels import edges as edge_kernels

__all__ = ["edge_dots"]


def edge_dots(
    edges: DeviceEdges,
    value: Any,
    own: Tensor,
    other: Tensor,
    heads: int,
    *,
    third: Tensor | None = None,
    weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    slope: float = 0.0,
    dtype: torch.dtype,
) -> Tensor:
    """A sum over the features of each head for each edge; see `kernels.edges`.

    Args:
        edges: The edges.
        value: One of `kernels.edges`: what is added up.
        own: `[num_dst, F]`, the rows' own.
        other: `[num_src, F]`, at the other end.
        heads: Heads of a row.
        third: As the value says.
        weight: `[E, heads]` in input order.
        row_scale: `[num_dst]` in the accumulator's dtype.
        col_scale: `[num_src]`, likewise.
        slope: Of GATv2's activation.
        dtype: Of the result.

    Returns:
        `[E, heads]` in input order.
    """
    forward = edges.forward
    width = other.shape[-1] // heads
    out = torch.empty((edges.num_edges, heads), dtype=dtype, device=other.device)
    blocks = blocks_for(heads, width, other.element_size(), at_once=True)
    parts = forward.parts
    if out.numel() == 0:
        return out
    launch(
        edge_kernels.edge_dots, (forward.num_programs, blocks.count), other,
        own, other, third, weight, row_scale, col_scale, out,
        forward.ptr, forward.col, forward.perm,
        *((None, None) if parts is None else (parts.row, parts.begin)),
        forward.num_programs, forward.num_rows, heads, width, slope,
        VALUE=value.value, ACC=tl_dtype(accumulator(other.dtype)), CHUNK=CHUNK,
        BE=blocks.edges, BH=blocks.heads, BD=blocks.features, num_warps=1,
    )  # fmt: skip
    return out
