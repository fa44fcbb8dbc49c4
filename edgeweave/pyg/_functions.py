"""`utils.scatter`, `utils.spmm` and the basic aggregations on edgeweave's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

from edgeweave._plan import plan_for_edges
from edgeweave._plan._device import same_device
from edgeweave.pyg._eligibility import (
    INDEX_DTYPES,
    features_refusal,
    leave_error_to_stock,
    may_trace,
    mode_refusal,
)
from edgeweave.pyg._layers import site_of
from edgeweave.pyg._report import record_fallback, record_fused
from edgeweave.scatter import gather, scatter_reduce, softmax
from edgeweave.sparse import mm
from edgeweave.sparse._mm import mm_plan

_SCATTER_REDUCE = {
    "sum": "sum",
    "add": "sum",
    "mean": "mean",
    "max": "amax",
    "min": "amin",
    "amax": "amax",
    "amin": "amin",
}
_SPMM_REDUCE = {"sum": "sum", "add": "sum", "mean": "mean", "max": "amax", "min": "amin"}


def fused_scatter(src: Any, index: Any, dim: Any, dim_size: Any, reduce: Any) -> Any:
    """Run one `utils.scatter` call on edgeweave's kernels if it is covered.

    Args:
        src: As for `utils.scatter`.
        index: As for `utils.scatter`.
        dim: As for `utils.scatter`.
        dim_size: As for `utils.scatter`.
        reduce: As for `utils.scatter`.

    Returns:
        The result, or `NotImplemented` if PyG's own code must run.
    """
    if torch.compiler.is_compiling():
        return _traced_scatter(src, index, dim, dim_size, reduce)
    return _scatter("utils.scatter", src, index, dim, dim_size, reduce)


def fused_reduce(
    aggregation: Any, x: Any, index: Any, ptr: Any, dim_size: Any, dim: Any, reduce: Any
) -> Any:
    """Run one `Aggregation.reduce` call on edgeweave's kernels if it is covered.

    Args:
        aggregation: The aggregation module.
        x: As for `Aggregation.reduce`.
        index: As for `Aggregation.reduce`.
        ptr: As for `Aggregation.reduce`.
        dim_size: As for `Aggregation.reduce`.
        dim: As for `Aggregation.reduce`.
        reduce: As for `Aggregation.reduce`.

    Returns:
        The result, or `NotImplemented` if PyG's own code must run.
    """
    by_ptr = ptr is not None and (index is None or aggregation._deterministic)
    if torch.compiler.is_compiling():
        return NotImplemented if by_ptr else _traced_scatter(x, index, dim, dim_size, reduce)
    site = site_of(type(aggregation))
    if by_ptr:
        record_fallback(site, "ptr is given: PyG calls utils.segment")
        return NotImplemented
    return _scatter(site, x, index, dim, dim_size, reduce)


def _scatter(site: str, src: Any, index: Any, dim: Any, dim_size: Any, reduce: Any) -> Any:
    """Reduce and count, or return `NotImplemented` and count."""
    reason = _scatter_refusal(src, index, dim, dim_size, reduce) or mode_refusal()

    def run(groups: int) -> Tensor:
        return scatter_reduce(src, index, dim, groups, _SCATTER_REDUCE[reduce])

    return run_counted(site, reason, index, dim_size, run)


def run_counted(
    site: str, reason: str | None, index: Any, dim_size: Any, run: Callable[[int], object]
) -> Any:
    """Call `run` with the number of groups and count, unless there is a reason not to."""
    if reason is None:
        if dim_size is None:
            dim_size = int(index.max()) + 1 if index.numel() else 0
        try:
            out = run(dim_size)
        except IndexError:
            if not leave_error_to_stock(index):
                raise
            # PyG's own code raises its own error about these indices; see the tests.
            reason = "index was rejected"
        else:
            record_fused(site)
            return out
    record_fallback(site, reason)
    return NotImplemented


def _traced_scatter(src: Any, index: Any, dim: Any, dim_size: Any, reduce: Any) -> Any:
    """Reduce under `torch.compile`, where the number of groups must not depend on the data."""
    if dim_size is None or not may_trace():
        return NotImplemented
    if _scatter_refusal(src, index, dim, dim_size, reduce) is not None:
        return NotImplemented
    return scatter_reduce(src, index, dim, dim_size, _SCATTER_REDUCE[reduce])


def _scatter_refusal(src: Any, index: Any, dim: Any, dim_size: Any, reduce: Any) -> str | None:
    """Return why PyG's own `scatter` must run, or None."""
    if reduce not in _SCATTER_REDUCE:
        return _reduce_refusal(reduce)
    reason = features_refusal(src, "src")
    if reason is not None:
        return reason
    if type(index) is not Tensor:
        return f"index is a {type(index).__name__}"
    if index.dtype not in INDEX_DTYPES or index.dim() != 1 or not same_device(index, src):
        return "index is not [E] of int32 or int64 where src is"
    if type(dim) is not int or not -src.dim() <= dim < src.dim():
        return "dim is out of range"
    if index.size(0) != src.size(dim):
        return "index and src differ in length"
    if dim_size is not None and (type(dim_size) is not int or dim_size < 0):
        return "dim_size is not a number of groups"
    return None


def fused_softmax(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> Any:
    """Run one `utils.softmax` call on edgeweave's kernels if it is covered.

    Args:
        src: As for `utils.softmax`.
        index: As for `utils.softmax`.
        ptr: As for `utils.softmax`.
        num_nodes: As for `utils.softmax`.
        dim: As for `utils.softmax`.

    Returns:
        The result, or `NotImplemented` if PyG's own code must run.
    """
    if torch.compiler.is_compiling():
        refused = ptr is not None or num_nodes is None or not may_trace()
        if refused or _scatter_refusal(src, index, dim, num_nodes, "sum") is not None:
            return NotImplemented
        return softmax(src, index, dim_size=num_nodes, dim=dim)
    reason: str | None = "ptr is given"
    if ptr is None:
        reason = _scatter_refusal(src, index, dim, num_nodes, "sum") or mode_refusal()

    def run(groups: int) -> Tensor:
        return softmax(src, index, dim_size=groups, dim=dim)

    return run_counted("utils.softmax", reason, index, num_nodes, run)


# Below this many values torch's own backward takes no longer than finding the plan.
_WORTH_A_PLAN = 1 << 15


def fused_gather(layer: Any, src: Any, index: Any) -> Any:
    """Gather the rows of one `MessagePassing._index_select`, for the sake of its backward.

    torch's adds one row after the other on one thread; ours is a reduction over the plan of the
    index. Without a gradient, and for few values, torch's own is as good: not counted then.

    Args:
        layer: The layer.
        src: As for `_index_select`.
        index: As for `_index_select`.

    Returns:
        The rows, or `NotImplemented` if PyG's own code must run.
    """
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or not isinstance(src, Tensor)
        or not src.requires_grad
        or features_refusal(src, "x") is not None
        or type(index) is not Tensor
        or index.dtype not in INDEX_DTYPES
        or index.dim() != 1
        or not same_device(index, src)
    ):
        return NotImplemented
    dim = layer.node_dim
    if type(dim) is not int or not -src.dim() <= dim < src.dim() or src.size(dim) == 0:
        return NotImplemented
    values = src.numel() // src.size(dim) * index.size(0)
    if values < _WORTH_A_PLAN or mode_refusal() is not None:
        return NotImplemented
    try:
        out = gather(src, index, dim)
    except IndexError:
        if leave_error_to_stock(index):
            return NotImplemented  # PyG's own code raises its own error about these indices
        raise
    record_fused("gather")
    return out


def _reduce_refusal(reduce: Any) -> str:
    name = repr(reduce) if type(reduce) is str else type(reduce).__name__
    return f"reduce={name} is not a sum, mean, max or min"


def fused_spmm(src: Any, other: Any, reduce: Any) -> Any:
    """Run one `utils.spmm` call on edgeweave's kernels if it is covered.

    Args:
        src: As for `utils.spmm`.
        other: As for `utils.spmm`.
        reduce: As for `utils.spmm`.

    Returns:
        The product, or `NotImplemented` if PyG's own code must run.
    """
    if torch.compiler.is_compiling():
        return NotImplemented
    reason = features_refusal(other, "other")
    if reason is None and other.dim() != 2:
        reason = "other is not a matrix"
    if reason is None and reduce not in _SPMM_REDUCE:
        reason = _reduce_refusal(reduce)
    if reason is None:
        reason = _matrix_refusal(src, other) or mode_refusal()
    if reason is not None:
        record_fallback("utils.spmm", reason)
        return NotImplemented
    out: Tensor
    if isinstance(src, EdgeIndex):
        # `EdgeIndex.matmul` sums over the columns of each row, that is, against the edges.
        rows, cols = src.get_sparse_size()
        try:
            plan = plan_for_edges(src.as_tensor(), cols, rows, flip=True)
        except IndexError:
            record_fallback("utils.spmm", "src was rejected")
            return NotImplemented
        out = mm_plan(plan, other, _SPMM_REDUCE[reduce])
    else:
        # Stock goes through CSR, where the first of several equal maxima gets the gradient.
        out = mm(src, other, _SPMM_REDUCE[reduce], ties="first")
    record_fused("utils.spmm")
    return out


def _matrix_refusal(src: Any, other: Tensor) -> str | None:
    """Return why the sparse matrix needs PyG's own code, or None."""
    if isinstance(src, EdgeIndex):
        if not src.is_sorted_by_row:
            return "src is an EdgeIndex not sorted by row"
        if not same_device(src, other) or src.get_sparse_size(1) != other.size(0):
            return "src is an EdgeIndex that does not match other"
        return None
    if isinstance(src, SparseTensor):
        if src.device() != other.device or src.requires_grad() or src.size(1) != other.size(0):
            return "src is a SparseTensor elsewhere, with a gradient, or that does not match other"
        value = src.storage.value()
        if value is not None and (value.dtype is not other.dtype or value.dim() != 1):
            return f"src has values of dtype {value.dtype}"
        return None
    if type(src) is not Tensor or src.layout not in (
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
    ):
        return "src is not a sparse matrix"
    if not same_device(src, other):
        return "src and other are on different devices"
    if src.requires_grad:
        return "src requires a gradient"
    if src.layout is torch.sparse_coo and not src.is_coalesced():
        return "src is a COO matrix that is not coalesced"
    if src.dtype is not other.dtype:
        return f"src has dtype {src.dtype}, not that of other"
    if src.dim() != 2 or src.size(1) != other.size(0):
        return "src is a matrix that does not match other"
    return None
