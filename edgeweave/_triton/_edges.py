"""An edge set on a device, in the forms that kernels want; built there, by torch's own sort.

The same arrays as `csrc/ops/plan.h` holds for the CPU: CSR by destination, CSC by source once it is
asked for, both stable, so that the edges of a row keep their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

__all__ = ["CHUNK", "DeviceEdges", "Direction", "Parts", "finish"]

# A row with more edges is dealt with in chunks of so many, counted from its own first edge, whose
# results are merged in order. One program reads four to sixteen rows of features at a time and
# waits for them, a microsecond a time: this is some 50 of them, a sixth of what all the rows of a
# graph of two million edges take.
CHUNK: Final = 256

# Programs with so many edges are started before the others, or one of them would still run when
# all the rest are done.
_LONG_FIRST: Final = 64

# As csrc/ops/plan.cpp: indices are 32 bits wide as long as nothing is larger.
_MOST_NARROW: Final = (1 << 31) - 1 - 64

_T = TypeVar("_T")


@dataclass(frozen=True)
class Parts:
    """The programs of a direction that has long rows: whole rows, and chunks of the long ones.

    Attributes:
        row: `[P]`; the row of each. Those with many edges come first.
        begin: `[P]`; its first edge, in the order of the rows.
        slot: `[P]` int32; where a chunk's result goes among the partial results; -1: a whole row.
        num_slots: Number of partial results.
        long_row: `[L]`; the rows that have more than one chunk.
        long_first: `[L]` int32; the slot of each one's first chunk.
        long_count: `[L]` int32; its number of chunks.
    """

    row: Tensor
    begin: Tensor
    slot: Tensor
    num_slots: int
    long_row: Tensor
    long_first: Tensor
    long_count: Tensor


@dataclass(frozen=True)
class Direction:
    """The edges of each row, in order.

    Attributes:
        ptr: `[rows + 1]`; where the edges of a row begin.
        col: `[E]`; the row at the other end.
        perm: `[E]`; where each edge was in the input.
        num_rows: Rows of a result.
        num_cols: Rows of the features.
        parts: How long rows are cut; None if there are none.
    """

    ptr: Tensor
    col: Tensor
    perm: Tensor
    num_rows: int
    num_cols: int
    parts: Parts | None

    @property
    def num_programs(self) -> int:
        """Number of rows and chunks that programs are run for."""
        return self.num_rows if self.parts is None else self.parts.row.shape[0]


class DeviceEdges:
    """Private copies of the indices of an edge set, checked, and what is derived from them.

    To be made and used outside every mode that changes what torch's operations do.

    Args:
        dst: Destination of each edge, `[E]`, int32 or int64, any stride, on any device.
        src: Source of each edge, `[E]`, or None for an index (an edge then reads row `e`).
        num_dst: Number of destinations.
        num_src: Number of sources; E without `src`.
        force_wide: Keep int64 even where int32 would do.
        quiet: Makes the context that arrays are built in, whoever asks for them first.

    Raises:
        IndexError: If an index is out of range; names the value, its position and the bound.
    """

    def __init__(
        self,
        dst: Tensor,
        src: Tensor | None,
        num_dst: int,
        num_src: int,
        force_wide: bool = False,
        quiet: Callable[[torch.device], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._quiet = quiet or (lambda device: nullcontext())
        self.device = dst.device
        self.num_edges = int(dst.shape[0])
        self.num_dst = int(num_dst)
        self.num_src = self.num_edges if src is None else int(num_src)
        largest = max(self.num_edges, self.num_dst, self.num_src)
        self.wide = force_wide or largest > _MOST_NARROW
        self.is_sorted = _check(dst, src, self.num_dst, self.num_src)
        self.over_index = src is None
        dtype = torch.int64 if self.wide else torch.int32
        self.dst = dst.to(dtype, copy=True).contiguous()
        self.src = None if src is None else src.to(dtype, copy=True).contiguous()
        self._kept: dict[object, object] = {}
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that exist now."""
        tensors = [self.dst, self.src]
        for kept in list(self._kept.values()):
            if isinstance(kept, Direction):
                tensors += [kept.ptr, kept.col, kept.perm]
        storages = {t.data_ptr(): t.nbytes for t in tensors if t is not None}
        return sum(storages.values())

    def direction(self, transpose: bool) -> Direction:
        """The edges by destination, or by source."""
        return self.transposed if transpose else self.forward

    @property
    def forward(self) -> Direction:
        """The edges by destination."""
        return self._keep("forward", self._build_forward)

    @property
    def transposed(self) -> Direction:
        """The edges by source."""
        return self._keep("transposed", self._build_transposed)

    @property
    def has_transpose(self) -> bool:
        """Whether the edges by source have been sorted."""
        return "transposed" in self._kept

    def degree(self, transpose: bool) -> Tensor:
        """Number of edges of each destination, or of each source, int64; a fresh tensor."""
        return self.direction(transpose).ptr.diff().long()

    def array(self, name: str) -> Tensor:
        """A fresh copy of rowptr, col, perm, colptr, row, perm_t, dst or src."""
        if name in ("rowptr", "col", "perm"):
            found = {"rowptr": "ptr"}.get(name, name)
            return getattr(self.forward, found).clone()  # type: ignore[no-any-return]
        if name in ("colptr", "row", "perm_t"):
            found = {"colptr": "ptr", "row": "col", "perm_t": "perm"}[name]
            return getattr(self.transposed, found).clone()  # type: ignore[no-any-return]
        if name == "src" and self.src is None:
            return torch.arange(self.num_edges, dtype=self.dst.dtype, device=self.device)
        kept = self.dst if name == "dst" else self.src
        assert kept is not None, "dst is always there, and src was made above"
        return kept.clone()

    def matches(self, edges: Tensor, dst_row: int) -> bool:
        """Whether these are exactly the indices `[2, E]` (`[E]` where `dst_row` is -1)."""
        if dst_row < 0:
            return self.src is None and _equal(self.dst, edges)
        if self.src is None or edges.shape[1] != self.num_edges:
            return False
        return _equal(self.dst, edges[dst_row]) and _equal(self.src, edges[1 - dst_row])

    def _build_forward(self) -> Direction:
        return self._sorted_by(self.dst, self.src, self.num_dst, self.num_src, self.is_sorted)

    def _build_transposed(self) -> Direction:
        if self.src is None:
            # Each entry is a row of its own.
            ptr = torch.arange(self.num_edges + 1, dtype=self.dst.dtype, device=self.device)
            return Direction(ptr, self.dst, ptr[:-1], self.num_edges, self.num_dst, None)
        return self._sorted_by(self.src, self.dst, self.num_src, self.num_dst, False)

    def _sorted_by(
        self, key: Tensor, other: Tensor | None, rows: int, cols: int, is_sorted: bool
    ) -> Direction:
        dtype = key.dtype
        if is_sorted:
            ordered = key
            perm = torch.arange(self.num_edges, dtype=dtype, device=self.device)
        else:
            ordered, order = torch.sort(key, stable=True)
            perm = order.to(dtype)
        bounds = torch.arange(rows + 1, dtype=dtype, device=self.device)
        ptr = torch.searchsorted(ordered, bounds).to(dtype)
        col = perm
        if other is not None:
            col = other if is_sorted else other.index_select(0, perm)
        return Direction(ptr, col, perm, rows, cols, _cut(ptr))

    def _keep(self, key: object, build: Callable[[], _T]) -> _T:
        if key not in self._kept:
            with self._lock:
                if key not in self._kept:
                    with self._quiet(self.device):
                        made = build()
                        finish(self.device)
                    self._kept[key] = made
        return self._kept[key]  # type: ignore[return-value]


def finish(device: torch.device) -> None:
    """Waits for what was just built and will be kept: another stream may be the next to read it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _equal(kept: Tensor, given: Tensor) -> bool:
    return kept.shape == given.shape and bool((kept == given).all())


def _check(dst: Tensor, src: Tensor | None, num_dst: int, num_src: int) -> bool:
    """Whether the destinations are in order; raises if an index is out of range."""
    if dst.shape[0] == 0:
        return True
    ends = [("index" if src is None else "destination index", dst, num_dst)]
    if src is not None:
        ends.append(("source index", src, num_src))
    facts = [(dst[1:] >= dst[:-1]).all().long()]
    for _, index, _ in ends:
        facts += [t.long() for t in torch.aminmax(index)]
    in_order, *extremes = torch.stack(facts).tolist()  # one look at the device for all of them
    for i, (what, index, bound) in enumerate(ends):
        if extremes[2 * i] < 0 or extremes[2 * i + 1] >= bound:
            position = int(((index < 0) | (index >= bound)).nonzero()[0])
            raise IndexError(
                f"edgeweave: {what} must be in [0, {bound}), got {int(index[position])} at "
                f"position {position}"
            )
    return bool(in_order)


def _cut(ptr: Tensor) -> Parts | None:
    """How long rows are cut into chunks; None if no row is long."""
    if ptr.shape[0] <= 1:
        return None
    count = ptr.diff()
    chunks = ((count + (CHUNK - 1)) // CHUNK).clamp(min=1).long()
    rows = chunks.shape[0]
    total = int(chunks.sum())
    if total == rows:
        return None
    row = torch.repeat_interleave(torch.arange(rows, device=ptr.device), chunks, output_size=total)
    first = chunks.cumsum(0) - chunks
    nth = torch.arange(total, device=ptr.device) - first.index_select(0, row)
    begin = ptr.index_select(0, row) + (nth * CHUNK).to(ptr.dtype)
    is_chunk = (chunks > 1).index_select(0, row)
    slot = torch.where(is_chunk, is_chunk.cumsum(0) - 1, -1)
    long_row = (chunks > 1).nonzero().view(-1)
    end = torch.minimum(begin + CHUNK, ptr.index_select(0, row + 1))
    order = torch.argsort((end - begin < _LONG_FIRST).to(torch.int8), stable=True)
    return Parts(
        row.index_select(0, order).to(ptr.dtype),
        begin.index_select(0, order),
        slot.index_select(0, order).to(torch.int32),
        int(is_chunk.sum()),
        long_row.to(ptr.dtype),
        slot.index_select(0, first.index_select(0, long_row)).to(torch.int32),
        chunks.index_select(0, long_row).to(torch.int32),
    )
