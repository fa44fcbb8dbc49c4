"""`mm`: an edge set times features, reduced by sum, mean, amax or amin.

Messages are never materialised.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .._checks import (
    FLOAT_DTYPES,
    check_features,
    check_ties,
    describe,
    normalize_reduce,
    shape_text,
)
from .._plan import Plan, plan_for_edges, plan_minmax, plan_sum
from .._plan._batched import check_batched_index
from .._plan._compiled import is_batched, mm_elsewhere, mm_op, must_trace
from .._plan._device import has_kernels, same_device
from ._convert import Operand, as_operand, check_edge_list, is_sparse_tensor
from ._graph import Graph

__all__ = ["mm", "mm_plan"]

_OP = "mm"


def mm(
    A: object,
    x: Tensor,
    reduce: str = "sum",
    weight: Tensor | None = None,
    ties: str = "even",
    flow: str = "source_to_target",
) -> Tensor:
    """Reduces features along edges: `out[i] = reduce(weight[e] * x[j] for edges e from j to i)`.

    Nothing of size `[E, F]` is ever in memory, forward or backward.

    Args:
        A: The edges. An edge list: `[2, E]` int32/int64 (row 0 source, row 1 destination;
            `x.size(0)` nodes on both sides), a PyG `EdgeIndex` or a `Graph`. Or a matrix, whose
            product with x is taken: a torch sparse COO (coalesced), CSR or CSC tensor, a
            `torch_sparse.SparseTensor` or a scipy sparse array.
        x: Features, `[num_src, ...]`; floating point or integer (not bool), any strides.
        reduce: "sum", "mean" (over the number of edges), "amax" or "amin"; "add", "max" and "min"
            mean the same.
        weight: One value per edge, `[E]`, or per edge and head, `[E, H]` with x
            `[num_src, H, ...]`; in the order of the edge list, or of a matrix' stored values, which
            it replaces.
        ties: How equal winners of amax/amin share a gradient: "even", or "first" (the first edge
            takes it, as `torch.sparse.mm` does on CSR).
        flow: "source_to_target", or "target_to_source" to reduce into sources (edge lists only).

    Returns:
        `[num_dst, ...]` in `torch.result_type(x, weight)`; 0 where a node has no edges. Bitwise the
        same for any number of threads. float16 and bfloat16 are summed in float32 and rounded once.

    Raises:
        IndexError: If an index is out of range; names the value, its position and the bound.
        ValueError: If shapes, `reduce`, `ties` or `flow` do not fit.
        TypeError: If `A` is none of the above or a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave import sparse
        >>> edges = torch.tensor([[0, 1, 2], [2, 2, 0]])  # 0 -> 2, 1 -> 2, 2 -> 0
        >>> sparse.mm(edges, torch.tensor([[1.0], [2.0], [4.0]]), reduce="sum")
        tensor([[4.],
                [0.],
                [3.]])
    """
    _refuse_sparse(x)
    check_features(_OP, "x", x)
    reduce = normalize_reduce(_OP, reduce)
    check_ties(_OP, ties)
    if x.dim() == 0:
        raise ValueError(f"{_OP}: x must have at least one dimension, got {describe(x)}")
    flip = _flip(flow)
    if type(A) is Tensor and A.layout is torch.strided:
        check_edge_list(_OP, A)
        if not (x.is_cpu and A.is_cpu) and A.device != x.device:
            raise ValueError(f"{_OP}: A must be on x's device {x.device}, got {A.device}")
        if not must_trace(x) and has_kernels(x) and not is_batched(A):
            plan = plan_for_edges(A, x.shape[0], x.shape[0], flip=flip)
            return mm_plan(plan, x, reduce, weight, ties=ties)
        return _traced(
            Operand(A, x.shape[0], x.shape[0], None, None), x, reduce, weight, ties, flip
        )
    if (
        isinstance(A, Graph)
        and not must_trace(x)
        and has_kernels(x)
        and same_device(A.edge_index, x)
    ):
        return mm_plan(A.plan(flip), x, reduce, weight, ties=ties)
    # Without Dynamo in the process nobody compiles, neither this call nor what it calls.
    if "torch._dynamo" in sys.modules and is_sparse_tensor(A):
        return _outside_graphs()(A, x, reduce, weight, ties, flow)
    return _mm_of_operand(A, x, reduce, weight, ties, flow)


def _mm_of_operand(
    A: object, x: Tensor, reduce: str, weight: Tensor | None, ties: str, flow: str
) -> Tensor:
    flip = _flip(flow)
    operand = as_operand(_OP, A, x.shape[0], x.device)
    if flip and operand.is_matrix:
        raise ValueError(
            f"{_OP}: flow must be 'source_to_target' for a matrix, got {flow!r}; "
            "transpose the matrix"
        )
    if weight is None:
        weight = operand.values
    if must_trace(x) or not has_kernels(x):
        return _traced(operand, x, reduce, weight, ties, flip)
    return mm_plan(operand.plan(flip), x, reduce, weight, ties=ties)


@functools.cache
def _outside_graphs() -> Callable[..., Tensor]:
    """`_mm_of_operand` where Dynamo leaves the graph: it fails at views of sparse tensors.

    Made when it is needed: the decorator loads all of Dynamo.
    """
    disable: Any = torch.compiler.disable
    return cast("Callable[..., Tensor]", disable(_mm_of_operand))


def _refuse_sparse(x: object) -> None:
    kind = type(x)
    if isinstance(x, Tensor):
        if x.layout is torch.strided:
            return
        got = f"layout {x.layout}"
    elif kind.__name__ == "SparseTensor" or kind.__module__.startswith("scipy.sparse"):
        got = f"{kind.__module__}.{kind.__name__}"
    else:
        return
    raise TypeError(
        f"{_OP}: x must be dense, got {got}; a product of two sparse matrices is "
        "torch.sparse.mm(A, x), or A @ x in scipy; else convert x with .to_dense()"
    )


def _flip(flow: str) -> bool:
    if flow not in ("source_to_target", "target_to_source"):
        raise ValueError(
            f"{_OP}: flow must be 'source_to_target' or 'target_to_source', got {flow!r}"
        )
    return flow == "target_to_source"


def _match_dtypes(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if weight is None:
        return x, None
    check_features(_OP, "weight", weight)
    if weight.device != x.device:
        raise ValueError(f"{_OP}: weight must be on x's device {x.device}, got {weight.device}")
    if weight.dtype == x.dtype:
        return x, weight
    # Both have dimensions: the same as result_type.
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return x.to(dtype), weight.to(dtype)


def _heads(x: Tensor, weight: Tensor, num_edges: int) -> int:
    """The number of heads that a weight has, checked against x."""
    if weight.dim() == 1 and weight.shape[0] == num_edges:
        return 1
    if weight.dim() == 2 and weight.shape[0] == num_edges:
        if weight.shape[1] == 1:
            return 1
        if x.dim() >= 2 and weight.shape[1] == x.shape[1]:
            return int(weight.shape[1])
    raise ValueError(
        f"{_OP}: weight must be [E] or [E, H] with x [N, H, ...], where E={num_edges}, got weight "
        f"{shape_text(weight.shape)} with x {shape_text(x.shape)}"
    )


def _fold(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x.contiguous()
    width = 1
    for size in x.shape[1:]:
        width *= size
    return x.reshape(x.shape[0], width).contiguous()


def mm_plan(
    plan: Plan,
    x: Tensor,
    reduce: str = "sum",
    weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    ties: str = "even",
    transpose: bool = False,
) -> Tensor:
    """`mm` over a plan, with optional constant scalings of rows and columns.

    `out[i] = row_scale[i] * reduce_{j->i}(weight[e] * col_scale[j] * x[j])`

    Args:
        plan: The edges.
        x: `[num_src, ...]` (`transpose`: `[num_dst, ...]`).
        reduce: sum, mean, amax or amin, in torch's spelling.
        weight: `[E]` or `[E, H]`, or None.
        row_scale: `[num_dst]`, float32 (float64 for float64 features), no gradient; sum and mean
            only.
        col_scale: `[num_src]`, likewise.
        ties: "even" or "first".
        transpose: Reduce into sources; sum only.

    Returns:
        `[num_dst, ...]`.

    Raises:
        ValueError: If shapes do not fit the plan.
    """
    if transpose and reduce != "sum":
        raise ValueError(f"{_OP}: transpose must go with reduce='sum', got {reduce!r}")
    rows = plan.num_dst if transpose else plan.num_src
    if x.shape[0] != rows:
        raise ValueError(
            f"{_OP}: x must have one row per source node, {rows}, got {x.shape[0]} "
            f"(shape {shape_text(x.shape)})"
        )
    x, weight = _match_dtypes(x, weight)
    heads = 1
    if weight is not None:
        heads = _heads(x, weight, plan.num_edges)
        weight = weight.contiguous()
        if weight.dim() == 1:
            weight = weight.unsqueeze(-1)
    folded = _fold(x)
    if reduce in ("sum", "mean"):
        out = plan_sum(
            plan,
            folded,
            weight,
            heads=heads,
            transpose=transpose,
            mean=reduce == "mean",
            row_scale=row_scale,
            col_scale=col_scale,
        )
    else:
        out = plan_minmax(plan, folded, weight, heads=heads, is_max=reduce == "amax", ties=ties)
    return out if x.dim() == 2 else out.reshape(out.shape[0], *x.shape[1:])


def _traced(
    operand: Operand, x: Tensor, reduce: str, weight: Tensor | None, ties: str, flip: bool
) -> Tensor:
    """The path of `torch.compile`, fake tensors and devices without kernels."""
    edge_index = operand.edge_index
    num_dst = operand.num_src if flip else operand.num_dst
    num_src = operand.num_dst if flip else operand.num_src
    if x.shape[0] != num_src:
        raise ValueError(f"{_OP}: x must have one row per source node, {num_src}, got {x.shape[0]}")
    x, weight = _match_dtypes(x, weight)
    heads = 1
    if weight is not None:
        heads = _heads(x, weight, edge_index.shape[1])
        if weight.dim() == 1:
            weight = weight.unsqueeze(-1)
    if x.dtype not in FLOAT_DTYPES and x.device.type != "cpu" and weight is not None:
        raise TypeError(f"{_OP}: weighted integer features must be on the CPU, got {describe(x)}")
    if not must_trace(x) and is_batched(edge_index):
        check_batched_index(_OP, edge_index[0], operand.num_src, "source index")
        check_batched_index(_OP, edge_index[1], operand.num_dst, "destination index")
    # The op's backward is no further differentiable; without tracing the plain operations are.
    run = mm_op if must_trace(x) else mm_elsewhere
    out = run(edge_index, _fold(x), weight, heads, num_dst, flip, reduce, ties)
    return out if x.dim() == 2 else out.reshape(out.shape[0], *x.shape[1:])
