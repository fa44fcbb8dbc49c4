"""From tensors to launches: block sizes, dtypes, grids, and the chunks of long rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import torch
import triton.language as tl
from torch import Tensor

from . import _compiled
from ._edges import CHUNK, Direction, Parts
from .kernels import entries, rows

__all__ = [
    "Blocks",
    "accumulator",
    "blocks_for",
    "launch",
    "map_entries",
    "reduce_rows",
    "tl_dtype",
]

SUM: Final = 0
MEAN: Final = 1
MAX: Final = 2
MIN: Final = 3
PROD: Final = 4

# One warp reads 512 bytes of a row at once, 16 a thread; of float32 four such rows before it waits
# for them. With 32 programs on a multiprocessor that is 64 KiB on their way, as much as the memory
# needs to be busy; a larger tile takes the registers of some of those programs.
_ROW_BYTES: Final = 512
_TILE_VALUES = 512
_LARGE_TILE_VALUES = 1024
_MOST_EDGES: Final = 32
# Registers of a thread that let 32 programs of one warp, the most there can be, share a
# multiprocessor. Sums alone are held to it: they do as well with them, in tiles twice as large.
_SUM_REGISTERS: Final[dict[str, int]] = {} if torch.version.hip else {"maxnreg": 64}
_ENTRY_VALUES: Final = 2048
_MOST_PROGRAMS: Final = (1 << 31) - 1

_TL: Final = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int64: tl.int64,
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are reduced in: float64, float32, or int64 for all integers."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32


def tl_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of an accumulator's dtype."""
    return _TL[dtype]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A tile of a program, and how many blocks of features there are.

    Attributes:
        edges: BE.
        heads: BH.
        features: BD, of a head.
        count: Programs for each row.
    """

    edges: int
    heads: int
    features: int
    count: int


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def blocks_for(
    heads: int, width: int, element: int, *, at_once: bool = False, large: bool = False
) -> Blocks:
    """The tile for rows of `heads` times `width` values of `element` bytes.

    Args:
        heads: Heads of a row.
        width: Features of a head, all of them in one block with `at_once`: the program then loops
            over what is wider.
        element: Bytes of a value.
        at_once: Whether a head may not be shared out among programs.
        large: Whether the tile holds twice as many edges.
    """
    most = max(32, _ROW_BYTES // element)
    bd = min(_power(width), most)
    bh = min(_power(heads), max(1, most // bd))
    values = _LARGE_TILE_VALUES if large and element < 8 else _TILE_VALUES
    be = max(4, min(_MOST_EDGES, values // (bh * bd)))
    across = 1 if at_once else -(-width // bd)
    return Blocks(be, bh, bd, -(-heads // bh) * across)


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **constants: Any) -> None:
    """Runs a kernel on the device of a tensor; nothing where the grid is empty."""
    if 0 in grid:
        return
    if like.is_cuda and like.device.index != torch.cuda.current_device():
        with torch.cuda.device(like.device):
            _compiled.run(kernel, grid, args, constants)
    else:
        _compiled.run(kernel, grid, args, constants)


def _batches(
    most: int, results: Tensor, *tensors: Tensor | None
) -> Iterator[tuple[int, Tensor, tuple[Tensor | None, ...]]]:
    """`(how many, of the results, of the tensors)` of a batch, as many at once as a grid can hold.

    What is no batch is one entry, as it is.
    """
    if results.dim() == 2:
        yield 1, results, tensors
        return
    for begin in range(0, results.shape[0], most):
        parts = tuple(None if t is None else t[begin : begin + most] for t in tensors)
        out = results[begin : begin + most]
        yield out.shape[0], out, parts


def reduce_rows(
    direction: Direction,
    x: Tensor,
    reduce: int,
    *,
    message: Any = rows.PLAIN,
    heads: int = 1,
    out_dtype: torch.dtype | None = None,
    other: Tensor | None = None,
    weight: Tensor | None = None,
    centre: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    init: Tensor | None = None,
    init_scale: float = 1.0,
) -> Tensor:
    """Reduces a message of each edge into its row; see `kernels.rows`.

    Args:
        direction: The edges.
        x: `[num_cols, F]` or `[B, num_cols, F]`, contiguous.
        reduce: SUM, MEAN, MAX, MIN or PROD.
        message: One of `kernels.rows`.
        heads: Heads of a row, where there is a weight.
        out_dtype: Dtype of the result; x's if None.
        other: Like x in shape, gathered with it.
        weight: `[E, heads]` in input order.
        centre: `[..., num_rows, F]`, the row's own.
        row_scale: `[num_rows]` in the accumulator's dtype.
        col_scale: `[num_cols]`, likewise.
        init: `[num_rows, F]`, added times `init_scale`.
        init_scale: Its factor.

    Returns:
        `[num_rows, F]` or `[B, num_rows, F]`.
    """
    width = x.shape[-1]
    shape = (*x.shape[:-2], direction.num_rows, width)
    is_first = message is rows.FIRST
    held = torch.int64 if is_first else accumulator(x.dtype)
    out = torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if weight is None:
        heads = 1
    is_plain = message is rows.PLAIN and weight is None and col_scale is None and reduce <= MEAN
    of_weights = weight is not None and x.element_size() == 4
    blocks = blocks_for(heads, width // heads, x.element_size(), large=is_plain or of_weights)
    options = _SUM_REGISTERS if is_plain else {}
    parts = direction.parts
    programs = direction.num_programs
    most = max(1, _MOST_PROGRAMS // programs)
    for count, out_part, (x_part, other_part, centre_part) in _batches(most, out, x, other, centre):
        partial = None
        if parts is not None:
            partial = torch.empty(count * parts.num_slots, width, dtype=held, device=x.device)
        sizes = (width, heads, width // heads, init_scale)
        slots = 0 if parts is None else parts.num_slots
        num_edges = direction.col.shape[0]
        launch(
            rows.reduce_rows, (programs * count, blocks.count), x,
            x_part, other_part, weight, centre_part, row_scale, col_scale, init, out_part, partial,
            direction.ptr, direction.col, direction.perm,
            *((None,) * 3 if parts is None else (parts.row, parts.begin, parts.slot)),
            programs, direction.num_rows, direction.num_cols, slots, num_edges, *sizes,
            REDUCE=reduce, MESSAGE=message.value, ACC=tl_dtype(accumulator(x.dtype)),
            HELD=tl_dtype(held), CHUNK=CHUNK,
            BE=blocks.edges, BH=blocks.heads, BD=blocks.features, num_warps=1, **options,
        )  # fmt: skip
        if parts is not None:
            launch(
                rows.merge_rows, (parts.long_row.shape[0] * count, blocks.count), x,
                partial, row_scale, init, out_part, direction.ptr,
                parts.long_row, parts.long_first, parts.long_count,
                parts.long_row.shape[0], direction.num_rows, slots, num_edges, *sizes,
                REDUCE=reduce, HELD=tl_dtype(held), IS_FIRST=is_first,
                BE=blocks.edges, BH=blocks.heads, BD=blocks.features, num_warps=1,
            )  # fmt: skip
    return out


def merge_sums(
    parts: Parts, direction: Direction, partial: Tensor, out: Tensor, blocks: Blocks, heads: int
) -> None:
    """Adds up the chunks of long rows `[num_slots, F]` into their rows of `out` `[num_rows, F]`."""
    width = out.shape[-1]
    launch(
        rows.merge_rows, (parts.long_row.shape[0], blocks.count), out,
        partial, None, None, out, direction.ptr,
        parts.long_row, parts.long_first, parts.long_count,
        parts.long_row.shape[0], direction.num_rows, parts.num_slots, 0,
        width, heads, width // heads, 1.0,
        REDUCE=SUM, HELD=tl_dtype(partial.dtype), IS_FIRST=False,
        BE=blocks.edges, BH=blocks.heads, BD=blocks.features, num_warps=1,
    )  # fmt: skip


def map_entries(
    value: Any,
    group: Tensor,
    num_groups: int,
    x: Tensor,
    *,
    y: Tensor | None = None,
    first: Tensor | None = None,
    second: Tensor | None = None,
    third: Tensor | None = None,
    high: tuple[Tensor, Tensor] | None = None,
    low: tuple[Tensor, Tensor] | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    other: Tensor | None = None,
) -> Tensor:
    """A value for each entry; see `kernels.entries`.

    Args:
        value: One of `kernels.entries`.
        group: `[E]`; the group of each entry.
        num_groups: How many groups there are.
        x: `[..., E, F]`; from GATHER on `[..., num_groups, F]`.
        y: Like x; from GATHER on `[N, F]`.
        first: `[..., num_groups, F]`, as the value says; so are `second` and `third`.
        second: Likewise.
        third: Likewise.
        high: Largest values, and what their winners get, `[..., num_groups, F]` each.
        low: The same for the smallest.
        row_scale: `[E]`.
        col_scale: `[num_groups]`.
        other: `[E]`; the row of y for each entry.

    Returns:
        `[..., E, F]` in x's dtype.
    """
    num_entries, width = group.shape[0], x.shape[-1]
    out = torch.empty((*x.shape[:-2], num_entries, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    bf = min(_power(width), 128)
    be = _ENTRY_VALUES // bf
    num_blocks = -(-num_entries // be)
    groups = (first, second, third, *(high or (None, None)), *(low or (None, None)))
    most = max(1, _MOST_PROGRAMS // num_blocks)
    # One y for all of a batch, or one for each.
    shared, own = (y, None) if y is None or y.dim() == 2 else (None, y)
    for count, out_part, (x_part, y_part, *of_group) in _batches(most, out, x, own, *groups):
        more = shared if own is None else y_part
        launch(
            entries.map_entries, (num_blocks * count, -(-width // bf)), x,
            x_part, more, *of_group, row_scale, col_scale, out_part, group, other,
            num_entries, num_groups, 0 if y is None else y.shape[-2], num_blocks, width,
            VALUE=value.value, ACC=tl_dtype(accumulator(x.dtype)), BE=be, BF=bf, num_warps=4,
        )  # fmt: skip
    return out
