"""`Graph`: an edge set held once, in the forms that kernels want."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._checks import check_count, check_index_dtype, describe, shape_text
from .._plan import Plan, forget_plan, plan_for_edges
from .._plan._compiled import must_trace
from .._plan._device import has_kernels

if TYPE_CHECKING:
    from torch_geometric import EdgeIndex

__all__ = ["Graph"]


class Graph:
    """An edge set with its CSR (by destination) and, built when first needed, its CSC (by source).

    Pass it wherever an edge list goes, to look plans up by attribute instead of by tensor. Every
    index is checked when the graph is made. The graph holds structure only: values of a matrix are
    kept in `values` for the way back, and take part in a product only if passed as `weight`.

    Args:
        edge_index: `[2, E]` int32 or int64, any strides: row 0 the source of each edge, row 1 its
            destination. The tensor is kept, not copied; an edit in place is noticed at the next
            use, one that torch cannot see (`.data`, a numpy view) needs `invalidate()`.
        size: `(num_src, num_dst)`; None means as many nodes on both sides as the largest index
            names.

    Raises:
        IndexError: If an index is out of range; names the value, its position and the bound.
        ValueError: If `edge_index` is not `[2, E]` or `size` is negative.
        TypeError: If `edge_index` is no int32 or int64 tensor.

    Example:
        >>> import edgeweave, torch
        >>> graph = edgeweave.Graph(torch.tensor([[0, 1, 2], [2, 2, 0]]), size=(3, 3))
        >>> graph.rowptr.tolist(), graph.col.tolist()
        ([0, 1, 1, 3], [2, 0, 1])
        >>> edgeweave.sparse.mm(graph, torch.eye(3), reduce="mean")
        tensor([[0.0000, 0.0000, 1.0000],
                [0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000]])
    """

    def __init__(self, edge_index: Tensor, size: tuple[int, int] | None = None) -> None:
        known = known_size(edge_index)
        edge_index = plain_edges(edge_index)
        check_index_dtype("Graph", "edge_index", edge_index)
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ValueError(
                f"Graph: edge_index must have shape [2, E], got {shape_text(edge_index.shape)}"
            )
        if size is None:
            # Not below 0: then the first negative index is an IndexError, with its position.
            named = None in known and edge_index.numel() > 0
            nodes = max(int(edge_index.max()) + 1, 0) if named else 0
            size = (
                nodes if known[0] is None else known[0],
                nodes if known[1] is None else known[1],
            )
        num_src, num_dst = _check_size(size)
        self._edge_index = edge_index
        self._num_src = num_src
        self._num_dst = num_dst
        self.values: Tensor | None = None
        self._plans: dict[bool, Plan] = {}
        self._version = -1
        if not must_trace(edge_index) and has_kernels(edge_index):
            self.plan()

    @classmethod
    def from_matrix(cls, A: object, rows: str) -> Graph:
        """The graph of a sparse matrix' stored entries.

        Args:
            A: A torch sparse COO (coalesced), CSR or CSC tensor, a `torch_sparse.SparseTensor` or a
                scipy sparse array. Its values are kept in `values`, in A's own order (CSR order for
                a CSR matrix).
            rows: "dst" if rows are destinations (then `mm(graph, x, weight=graph.values)` is
                `A @ x`), "src" if they are sources. There is no default: PyG's own converters use
                rows as sources, products use the other.

        Returns:
            A graph with one edge for each stored entry.

        Raises:
            TypeError: If `A` is none of the above.
            ValueError: If `rows` is neither, or a COO matrix is not coalesced.

        Example:
            >>> import torch
            >>> from edgeweave import Graph
            >>> A = torch.tensor([[0.0, 2.0], [0.0, 3.0]]).to_sparse()
            >>> Graph.from_matrix(A, rows="dst").edge_index
            tensor([[1, 1],
                    [0, 1]])
        """
        from ._convert import matrix_graph

        if rows not in ("dst", "src"):
            raise ValueError(f"Graph.from_matrix: rows must be 'dst' or 'src', got {rows!r}")
        return matrix_graph("Graph.from_matrix", A, rows)

    # ---- the plan --------------------------------------------------------------------------------

    def plan(self, flip: bool = False) -> Plan:
        """The plan that operators run on (`flip`: with sources and destinations exchanged)."""
        num_src, num_dst = (self.num_dst, self.num_src) if flip else (self.num_src, self.num_dst)
        if self.edge_index.is_inference():
            # It has no version to tell of edits: the cache compares its contents.
            return plan_for_edges(self.edge_index, num_src, num_dst, flip=flip, op="Graph")
        if self.edge_index._version != self._version:
            self._plans.clear()
            self._version = self.edge_index._version
        plan = self._plans.get(flip)
        if plan is None:
            plan = plan_for_edges(self.edge_index, num_src, num_dst, flip=flip, op="Graph")
            self._plans[flip] = plan
        return plan

    def invalidate(self) -> None:
        """Forgets what was built from `edge_index`; call it after an edit that torch cannot see."""
        for plan in self._plans.values():
            forget_plan(plan)
        self._plans.clear()

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def edge_index(self) -> Tensor:
        """The edges, `[2, E]`, as they were given."""
        return self._edge_index

    @property
    def num_src(self) -> int:
        """Number of sources."""
        return self._num_src

    @property
    def num_dst(self) -> int:
        """Number of destinations."""
        return self._num_dst

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return int(self.edge_index.shape[1])

    @property
    def size(self) -> tuple[int, int]:
        """`(num_src, num_dst)`."""
        return self.num_src, self.num_dst

    @property
    def is_sorted(self) -> bool:
        """Whether the edges came sorted by destination (then no permutation is kept)."""
        return self.plan().is_sorted

    @property
    def nbytes(self) -> int:
        """Bytes that the library holds for this graph now."""
        return self.plan().nbytes

    @property
    def rowptr(self) -> Tensor:
        """CSR row pointers by destination, `[num_dst + 1]`.

        A copy, int32 where the graph fits, else int64.
        """
        return self.plan().array("rowptr")

    @property
    def col(self) -> Tensor:
        """Source of each edge in CSR order, `[E]`. A copy."""
        return self.plan().array("col")

    @property
    def perm(self) -> Tensor:
        """Position in `edge_index` of each edge in CSR order, `[E]`. A copy.

        Edges of a row keep their order.
        """
        return self.plan().array("perm")

    @property
    def colptr(self) -> Tensor:
        """CSC column pointers by source, `[num_src + 1]`. A copy."""
        return self.plan().array("colptr")

    @property
    def row(self) -> Tensor:
        """Destination of each edge in CSC order, `[E]`. A copy."""
        return self.plan().array("row")

    @property
    def perm_t(self) -> Tensor:
        """Position in `edge_index` of each edge in CSC order, `[E]`. A copy."""
        return self.plan().array("perm_t")

    @property
    def in_degree(self) -> Tensor:
        """Edges into each destination, `[num_dst]` int64. A copy."""
        return self.plan().in_degree().clone()

    @property
    def out_degree(self) -> Tensor:
        """Edges out of each source, `[num_src]` int64. A copy."""
        return self.plan().out_degree().clone()

    # ---- and back --------------------------------------------------------------------------------

    def to_edge_index(self) -> EdgeIndex:
        """A PyG `EdgeIndex` of the same edges, in the same order.

        Raises:
            ImportError: If torch_geometric is not installed.
        """
        from torch_geometric import EdgeIndex

        order = {"sort_order": "col"} if self.is_sorted else {}
        return EdgeIndex(self.edge_index.long(), sparse_size=(self.num_src, self.num_dst), **order)

    def to_torch_coo(self, rows: str, values: Tensor | None = None) -> Tensor:
        """A coalesced torch COO matrix; parallel edges are added up.

        Args:
            rows: "dst" or "src", as in `from_matrix`.
            values: `[E]` in edge order; None means `self.values`, or ones.
        """
        row, col, shape = self._ends(rows)
        return torch.sparse_coo_tensor(
            torch.stack([row, col]),
            self._values(values),
            shape,
            device=row.device,
            check_invariants=False,
        ).coalesce()

    def to_torch_csr(self, rows: str, values: Tensor | None = None) -> Tensor:
        """A torch CSR matrix; parallel edges are added up. Arguments as in `to_torch_coo`."""
        return self.to_torch_coo(rows, values).to_sparse_csr()

    def to_torch_csc(self, rows: str, values: Tensor | None = None) -> Tensor:
        """A torch CSC matrix; parallel edges are added up. Arguments as in `to_torch_coo`."""
        return self.to_torch_coo(rows, values).to_sparse_csc()

    def to_scipy(self, rows: str, values: Tensor | None = None) -> Any:
        """A `scipy.sparse.csr_array`; parallel edges are added up.

        Arguments as in `to_torch_coo`.
        """
        import scipy.sparse

        row, col, shape = self._ends(rows)
        data = self._values(values).detach().numpy()
        return scipy.sparse.coo_array((data, (row.numpy(), col.numpy())), shape=shape).tocsr()

    def to_sparse_tensor(self, rows: str, values: Tensor | None = None) -> Any:
        """A `torch_sparse.SparseTensor`; parallel edges stay. Arguments as in `to_torch_coo`.

        Raises:
            ImportError: If torch_sparse is not installed.
        """
        from torch_sparse import SparseTensor

        row, col, shape = self._ends(rows)
        value = self.values if values is None else values
        return SparseTensor(row=row, col=col, value=value, sparse_sizes=shape)

    def _ends(self, rows: str) -> tuple[Tensor, Tensor, tuple[int, int]]:
        if rows not in ("dst", "src"):
            raise ValueError(f"Graph: rows must be 'dst' or 'src', got {rows!r}")
        src, dst = self.edge_index.long()
        if rows == "dst":
            return dst, src, (self.num_dst, self.num_src)
        return src, dst, (self.num_src, self.num_dst)

    def _values(self, values: Tensor | None) -> Tensor:
        if values is None:
            values = self.values
        if values is None:
            return torch.ones(self.num_edges, device=self.edge_index.device)
        if values.shape != (self.num_edges,):
            raise ValueError(
                f"Graph: values must be [E], E={self.num_edges}, got {describe(values)}"
            )
        return values

    # ---- Python ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # A plan is a handle into this process: the copy builds its own.
        return {k: v for k, v in self.__dict__.items() if k not in ("_plans", "_version")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._plans = {}
        self._version = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        twin = Graph.__new__(Graph)
        twin.__setstate__({k: copy.deepcopy(v, memo) for k, v in self.__getstate__().items()})
        return twin

    def __repr__(self) -> str:
        return f"Graph(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges})"


def _check_size(size: Any) -> tuple[int, int]:
    try:
        num_src, num_dst = size
    except (TypeError, ValueError):
        raise ValueError(f"Graph: size must be (num_src, num_dst), got {size!r}") from None
    for count in (num_src, num_dst):
        if not isinstance(count, (int, torch.SymInt)) or isinstance(count, bool):
            raise TypeError(f"Graph: size must be two integers, got {size!r}")
        check_count("Graph", count)
        if count < 0:
            raise ValueError(f"Graph: size must not be negative, got {size!r}")
    return num_src, num_dst


def plain_edges(edge_index: Tensor) -> Tensor:
    """The plain tensor behind a PyG EdgeIndex, or the tensor itself."""
    if type(edge_index) is not Tensor and hasattr(edge_index, "as_tensor"):
        return edge_index.as_tensor()  # type: ignore[no-any-return]
    return edge_index


def known_size(edge_index: object) -> tuple[int | None, int | None]:
    """Numbers of sources and destinations that a PyG EdgeIndex knows.

    (None, None) for a plain tensor.
    """
    if type(edge_index) is not Tensor and hasattr(edge_index, "sparse_size"):
        num_src, num_dst = edge_index.sparse_size()
        return num_src, num_dst
    return None, None
