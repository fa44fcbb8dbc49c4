"""`sddmm`: a value per edge, made of what is at its two ends."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import FLOAT_DTYPES, check_features, describe, shape_text
from .._plan import Plan
from .._plan._batched import check_batched_index
from .._plan._compiled import is_batched, must_trace
from .._plan._device import has_kernels
from .._plan._functions import plan_dot
from .._plan._pair import PAIR_OPS, pair_messages, plan_pair
from .._plan._traced import checked_index
from ._convert import Operand, as_operand, check_edge_list
from ._graph import Graph, plain_edges

__all__ = ["sddmm"]

_OP = "sddmm"


def sddmm(A: object, a_dst: Tensor, b_src: Tensor, op: str = "dot") -> Tensor:
    """A value per edge of its two ends: `out[e] = op(a_dst[i], b_src[j])` for edge e from j to i.

    With "dot" the product of two dense matrices, taken only where a sparse one has entries
    (sampled dense-dense matrix multiplication); `[E, F]` is never in memory.

    Args:
        A: The edges, as in `mm`: an edge list, a PyG `EdgeIndex`, a `Graph`, or a matrix (rows
            are destinations), whose values are not used.
        a_dst: What is at the destinations, `[num_dst, ...]`.
        b_src: What is at the sources, `[num_src, ...]`, of the same shape beyond the first
            dimension.
        op: "dot" (over the last dimension: `[N, D]` gives `[E]`, `[N, H, D]` gives `[E, H]`),
            "add", "sub" or "mul" (elementwise: `[E, ...]`).

    Returns:
        In the order of the edge list, or of a matrix' stored values, and in
        `torch.result_type(a_dst, b_src)`. float16 and bfloat16 are computed in float32 and
        rounded once. Differentiable to any order.

    Raises:
        IndexError: If an index is out of range; names the value, its position and the bound.
        ValueError: If shapes or `op` do not fit.
        TypeError: If `A` is none of the above or a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave import sparse
        >>> edges = torch.tensor([[0, 1], [1, 1]])  # 0 -> 1, 1 -> 1
        >>> q, k = torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
        >>> sparse.sddmm(edges, q, k)
        tensor([5., 3.])
    """
    if not isinstance(op, str) or (op != "dot" and op not in PAIR_OPS):
        raise ValueError(f"{_OP}: op must be one of dot, add, sub, mul, got {op!r}")
    a, b = _operands(a_dst, b_src)
    operand = _edges(A, a, b)
    shape, edges = a.shape[1:], operand.edge_index
    folded_a, folded_b = _fold(a), _fold(b)
    elsewhere = must_trace(a) or not has_kernels(a)
    if elsewhere or is_batched(edges) or a.dtype not in FLOAT_DTYPES:
        return _elsewhere(edges, a, b, op)
    plan: Plan = operand.plan(False, _OP)
    if op != "dot":
        out = plan_pair(plan, folded_a, folded_b, op)
        return out.reshape(out.shape[0], *shape)
    heads = 1
    for size in shape[:-1]:
        heads *= size
    if heads == 0:
        return a.new_zeros((plan.num_edges, *shape[:-1]))
    out = plan_dot(plan, folded_a, folded_b, heads=heads)
    return out.reshape(out.shape[0], *shape[:-1])


def _operands(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    for name, t in (("a_dst", a), ("b_src", b)):
        check_features(_OP, name, t)
        if t.dim() == 0:
            raise ValueError(f"{_OP}: {name} must have at least one dimension, got {describe(t)}")
    if a.shape[1:] != b.shape[1:]:
        raise ValueError(
            f"{_OP}: b_src must have a_dst's shape beyond the first dimension, "
            f"{shape_text(a.shape[1:])}, got {shape_text(b.shape[1:])}"
        )
    if a.device != b.device:
        raise ValueError(f"{_OP}: b_src must be on a_dst's device {a.device}, got {b.device}")
    if a.dtype != b.dtype:
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(dtype)
    return a, b


def _edges(A: object, a: Tensor, b: Tensor) -> Operand:
    if isinstance(A, Tensor) and A.layout is torch.strided and not isinstance(A, Graph):
        edges = plain_edges(A)
        check_edge_list(_OP, edges)
        if edges.device != a.device:
            raise ValueError(f"{_OP}: A must be on a_dst's device {a.device}, got {edges.device}")
        return Operand(edges, b.shape[0], a.shape[0], None, None)
    operand = as_operand(_OP, A, a.shape[0], a.device)
    if operand.num_dst != a.shape[0] or operand.num_src != b.shape[0]:
        raise ValueError(
            f"{_OP}: a_dst and b_src must have one row per destination and source, "
            f"{operand.num_dst} and {operand.num_src}, got {a.shape[0]} and {b.shape[0]}"
        )
    return operand


def _fold(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x.contiguous()
    width = 1
    for size in x.shape[1:]:
        width *= size
    return x.reshape(x.shape[0], width).contiguous()


def _elsewhere(edges: Tensor, a: Tensor, b: Tensor, op: str) -> Tensor:
    """As plain torch operations: under `torch.compile` Inductor makes one loop of them."""
    src, dst = edges[0], edges[1]
    if must_trace(a):
        if a.device.type == "cpu":
            # Of Inductor's loops a negative index counts from the end.
            src = checked_index(src, b.shape[0], f"{_OP}: source index")
            dst = checked_index(dst, a.shape[0], f"{_OP}: destination index")
    elif is_batched(edges):
        check_batched_index(_OP, src, b.shape[0], "source index")
        check_batched_index(_OP, dst, a.shape[0], "destination index")
    if a.dtype not in (torch.float16, torch.bfloat16):
        out = pair_messages(a, b, dst, src, "mul" if op == "dot" else op)
    else:
        out = pair_messages(a.float(), b.float(), dst, src, "mul" if op == "dot" else op)
    if op == "dot" and a.dim() > 1:
        out = out.sum(-1)
    return out.to(a.dtype)
