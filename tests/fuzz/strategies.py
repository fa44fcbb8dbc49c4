"""Arguments for the fuzz of the public ops: mostly nearly right, sometimes absurd."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import torch
from hypothesis import strategies as st

INDEX_DTYPES = (torch.int64, torch.int32)
FEATURE_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
OTHER_DTYPES = (torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn)
REDUCES = ("sum", "mean", "amax", "amin", "add", "max", "min")
BAD_WORDS = ("", "SUM", "median", None, 3, b"sum", ("sum",), ["sum"], float("nan"))
NOT_TENSORS = (None, 3, 2.5, "x", [0, 1], np.arange(3), object())
HUGE = (2**31 - 1, 2**31, 2**40, 2**46, 2**46 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30)
ODD_FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 1e38, 1e-45)
ODD_INDICES = (-1, -(2**31), -(2**63), 2**31, 2**31 - 1, 2**32, 2**63 - 1)
# About the vector widths of all types, and about nothing at all.
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33)


def seldom(odds: int = 12) -> st.SearchStrategy[bool]:
    """Mostly false."""
    return st.integers(0, odds).map(lambda n: n == odds)


@st.composite
def relaid(draw: st.DrawFn, values: torch.Tensor) -> torch.Tensor:
    """The same values in another layout of memory."""
    kind = draw(
        st.sampled_from(["plain", "plain", "sliced", "step", "transposed", "misaligned", "negated"])
    )
    if values.dim() == 0 or values.numel() == 0 or kind == "plain":
        return values
    if kind == "sliced":
        return torch.cat([values[:1], values])[1:]
    if kind == "step":
        return torch.stack([values, values], values.dim()).flatten(-2)[..., ::2]
    if kind == "transposed":
        return values.movedim(0, -1).contiguous().movedim(-1, 0)
    if kind == "negated":
        return torch._neg_view(-values) if values.dtype.is_floating_point else values
    if not values.is_contiguous() or values.dtype == torch.bool:
        return values
    raw = bytearray(1 + values.nbytes)
    raw[1:] = values.view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(raw, dtype=values.dtype, offset=1).view(values.shape)


@st.composite
def features(draw: st.DrawFn, shape: tuple[int, ...], floating: bool = False) -> Any:
    """A tensor of the shape, or something that only a slip of the caller's would pass."""
    if draw(seldom(60)):
        return draw(st.sampled_from(NOT_TENSORS))
    if draw(seldom(25)):
        shape = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=5)))
    dtypes = FEATURE_DTYPES[:4] if floating else FEATURE_DTYPES
    dtype = draw(st.sampled_from(OTHER_DTYPES if draw(seldom(25)) else dtypes))
    if draw(seldom(30)):
        return torch.empty(shape, dtype=dtype, device="meta")
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    values = torch.randint(-3, 4, shape, generator=generator)
    if not dtype.is_floating_point:
        return draw(relaid(values.to(dtype)))
    x = values.double()
    if draw(seldom(4)) and x.numel() > 0:
        for odd in draw(st.lists(st.sampled_from(ODD_FLOATS), max_size=4)):
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = odd
    x = x.to(dtype)
    if draw(seldom(10)) and x.dim() > 1 and x.shape[0] > 0:
        return x[:1].expand(x.shape)
    if draw(seldom(40)):
        return x.to_sparse() if x.dtype not in OTHER_DTYPES else x
    x = draw(relaid(x))
    if dtype in FEATURE_DTYPES and draw(seldom(2)):
        x = x.detach().requires_grad_()
    return x


@st.composite
def indices(draw: st.DrawFn, length: int, bound: int) -> Any:
    """An index of `length` entries below `bound`, or something like it."""
    if draw(seldom(60)):
        return draw(st.sampled_from(NOT_TENSORS))
    if draw(seldom(25)):
        length = draw(st.sampled_from(SIZES))
    dtype = draw(st.sampled_from(INDEX_DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    index = torch.randint(0, max(bound, 1), (length,), generator=generator)
    if draw(seldom(2)):
        index = index.sort().values
    if draw(seldom(8)) and length > 0:
        odd = draw(st.sampled_from((*ODD_INDICES, bound, bound + 1)))
        index[draw(st.integers(0, length - 1))] = odd
    index = index.to(dtype)
    if draw(seldom(30)):
        index = index.to(draw(st.sampled_from((torch.float32, torch.bool, torch.uint8))))
    if draw(seldom(40)):
        return index.to("meta")
    return draw(relaid(index))


@st.composite
def along(draw: st.DrawFn, index: Any, shape: tuple[int, ...], dim: int) -> Any:
    """The 1-D index, perhaps expanded to the shape of its values, rightly or wrongly."""
    if not isinstance(index, torch.Tensor) or index.dim() != 1 or len(shape) < 2 or draw(seldom(1)):
        return index
    view = index.view([-1 if d == dim else 1 for d in range(len(shape))])
    if draw(seldom(3)):
        return view
    target = [index.numel() if d == dim else size for d, size in enumerate(shape)]
    if draw(seldom(8)):
        target[draw(st.integers(0, len(target) - 1))] = draw(st.sampled_from(SIZES))
    try:
        expanded = view.expand(target)
    except RuntimeError:
        return view
    return expanded.contiguous() if draw(seldom(4)) else expanded


@st.composite
def counts(draw: st.DrawFn, usual: int) -> Any:
    """A number of slots: usually the right one."""
    if draw(seldom(5)):
        return draw(st.sampled_from((-1, 0, usual + 1, 1.5, True, "3", *HUGE)))
    return None if draw(seldom(3)) else usual


@st.composite
def words(draw: st.DrawFn, usual: tuple[str, ...]) -> Any:
    """A name of the usual ones, seldom another object."""
    return draw(st.sampled_from(BAD_WORDS if draw(seldom(30)) else usual))


@st.composite
def dims(draw: st.DrawFn, usual: int) -> Any:
    """A dimension: usually the right one."""
    return (
        draw(st.sampled_from((-7, 6, 2**40, None, 1.0, True, "0"))) if draw(seldom(30)) else usual
    )


@st.composite
def matrices(draw: st.DrawFn, rows: int, cols: int) -> Any:
    """A sparse matrix of torch's or scipy's, perhaps with pointers or indices that lie."""
    entries = draw(st.integers(0, 20)) if rows and cols else 0
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    row = generator.integers(0, max(rows, 1), entries)
    col = generator.integers(0, max(cols, 1), entries)
    dtype = draw(st.sampled_from(("f4", "f8", "i8", "i4", "?", "c8")))
    data = generator.integers(-3, 4, entries).astype(dtype)
    A = scipy.sparse.coo_array((data, (row, col)), shape=(rows, cols))
    kind = draw(
        st.sampled_from(["csr", "csc", "coo", "dok", "torch csr", "torch csc", "torch coo"])
    )
    if kind == "dok":
        return A.tocsr().todok()
    if kind == "coo":
        return A
    if kind == "torch coo":
        sparse = torch.sparse_coo_tensor(
            torch.from_numpy(np.stack([row, col])), torch.from_numpy(data), (rows, cols)
        )
        return sparse if draw(seldom(4)) else sparse.coalesce()
    compressed = A.tocsc() if kind.endswith("csc") else A.tocsr()
    ptr, inner, data = compressed.indptr.copy(), compressed.indices.copy(), compressed.data
    if draw(seldom(3)):
        ptr[draw(st.integers(0, len(ptr) - 1))] = draw(st.sampled_from((-1, 2**31 - 1, 3)))
    if draw(seldom(3)) and len(inner) > 0:
        inner[draw(st.integers(0, len(inner) - 1))] = draw(st.sampled_from((-1, 2**31 - 1, 40)))
    if not kind.startswith("torch"):
        compressed.indptr, compressed.indices = ptr, inner
        return compressed
    make = torch.sparse_csc_tensor if kind.endswith("csc") else torch.sparse_csr_tensor
    parts = (torch.from_numpy(part) for part in (ptr, inner, data))
    return make(*parts, (rows, cols), check_invariants=False)
