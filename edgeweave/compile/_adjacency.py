"""Adjacencies as arguments of `optimize`d models: what torch's compiler does not take as it is.

PyG's layers take the transposed adjacency in place of `edge_index`, with the same results. A matrix
of ones is such an adjacency and nothing more, and becomes edges, once per matrix. Where a matrix
may be more than that, the model runs as it is.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import EdgeweaveWarning
from ._matrix_uses import other_use

__all__ = ["Adjacencies"]

_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
_MOST_KEPT = 16
_NOT_ONES = "its values are not all 1"


def _is_sparse(value: Any) -> bool:
    """Whether an argument is a sparse matrix of torch's."""
    return isinstance(value, Tensor) and value.layout in _LAYOUTS


class Adjacencies:
    """The sparse matrices that a model was called with, as edges.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._uses: dict[bool, str] = {}
        self._takes_edges = _holds_layers_of_pyg(model)
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Any]] = {}
        self._said = False

    def replace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of a call with edges for each sparse matrix.

        Args:
            args: Of the call.
            kwargs: Of the call.

        Returns:
            The arguments, the same where there are none; None if the model must run as it is, which
            is said once.
        """
        _fill_caches((*args, *kwargs.values()))
        # At each call of a model: a call without such a matrix must not notice it.
        if not (any(map(_is_sparse, args)) or any(map(_is_sparse, kwargs.values()))):
            return args, kwargs
        values = [*args, *kwargs.values()]
        why = "" if self._takes_edges else "the model holds no layer of PyG"
        edges: dict[int, Any] = {}
        for value in filter(_is_sparse, values):
            found = None if why else self._edges(value)
            if isinstance(found, str) or found is None:
                why = why or str(found)
                break
            if any(_is_of_edges(other, found.size(1)) for other in values):
                why = "another argument has a row for each of its values"
                break
            edges[id(value)] = found
        if not why:
            why = self._other_use(list(filter(_is_sparse, values)), args, kwargs)
        if why:
            self._say(why)
            return None
        return (
            tuple(edges.get(id(value), value) for value in args),
            {name: edges.get(id(value), value) for name, value in kwargs.items()},
        )

    def _other_use(
        self, matrices: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """What else the model does with matrices: asked once for each mode."""
        mode = self._model.training
        if mode not in self._uses:
            self._uses[mode] = other_use(self._model, matrices, args, kwargs)
        return self._uses[mode]

    def _edges(self, matrix: Tensor) -> Any:
        """The edges of a matrix, by destination: `[2, E]`; or why it is more than that."""
        if matrix.layout == torch.sparse_coo and not matrix.is_coalesced():
            return "it is not coalesced"
        if matrix.is_inference():
            return "it was made in inference mode, where edits of it leave no trace"
        # Edited values count: the version is that of the matrix for all layouts.
        known = self._known.get(id(matrix))
        if known is not None and known[0]() is matrix and known[1] == matrix._version:
            # Values may be written through the tensor that the matrix was made of.
            return known[2] if isinstance(known[2], str) or _is_ones(matrix) else _NOT_ONES
        found = _as_edges(matrix)
        if len(self._known) >= _MOST_KEPT:
            self._known.clear()
        self._known[id(matrix)] = (weakref.ref(matrix), matrix._version, found)
        return found

    def _say(self, why: str) -> None:
        if self._said:
            return
        self._said = True
        warnings.warn(
            "optimize: a sparse matrix cannot be compiled, and stands for more than edges "
            f"({why}), so such calls run the model as it is; give an EdgeIndex, or edge_index and "
            "weights",
            EdgeweaveWarning,
            stacklevel=5,
        )


def _holds_layers_of_pyg(model: nn.Module) -> bool:
    if "torch_geometric.nn.conv.message_passing" not in sys.modules:
        return False
    from torch_geometric.nn import MessagePassing

    return any(isinstance(module, MessagePassing) for module in model.modules())


def _is_of_edges(value: Any, num_edges: int) -> bool:
    plain = isinstance(value, Tensor) and value.layout is torch.strided
    return plain and value.dim() > 0 and value.size(0) == num_edges


def _is_ones(matrix: Tensor) -> bool:
    return bool((matrix.values() == 1).all())


def _as_edges(matrix: Tensor) -> Any:
    from torch_geometric import EdgeIndex

    values = matrix.values()
    if matrix.dim() != 2 or values.dim() != 1:
        return f"it has {matrix.dim()} dimensions, and values of {values.dim()}"
    if matrix.requires_grad or not _is_ones(matrix):
        return _NOT_ONES
    with torch.no_grad():
        # Rows are destinations; sorted by them, as a matrix in rows is.
        rows: Tensor = matrix.to_sparse_coo()  # type: ignore[no-untyped-call]
        dst, src = rows.coalesce().indices()
        if bool((dst == src).any()):
            # GCN adds its own to those of a matrix, and keeps those of edges.
            return "it has self-loops, which layers of PyG take otherwise than those of edges"
        edges = torch.stack([src, dst]).long()
        if matrix.size(0) == matrix.size(1):
            # Nodes are counted by their features. Torch's guards on an `EdgeIndex` compare its
            # size: a graph of another would be compiled anew.
            return edges
        return EdgeIndex(
            edges,
            sparse_size=(matrix.size(1), matrix.size(0)),
            sort_order="col",
        ).fill_cache_(no_transpose=True)


def _fill_caches(values: tuple[Any, ...]) -> None:
    """Compute the row pointers of sorted edges now.

    A layer would within the compiled code, as a side effect on its argument that AOTAutograd takes
    for a change of metadata (2.13).
    """
    module = sys.modules.get("torch_geometric.edge_index")
    if module is None:
        return
    for value in values:
        if type(value) is module.EdgeIndex and value.is_sorted and value._indptr is None:
            value.fill_cache_(no_transpose=True)
