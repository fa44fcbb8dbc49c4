"""Calls of softmax, segments, moments, positions, values per edge and grouped products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import strategies as arg
import torch
from hypothesis import strategies as st

from edgeweave import scatter, sparse

Call = tuple[Callable[..., Any], dict[str, Any]]
MULTI = ("sum", "mean", "amax", "amin", "var", "std", "max")


@st.composite
def pointers(draw: st.DrawFn, entries: int, segments: int) -> Any:
    """`[segments + 1]` from 0 to `entries`, or something like it."""
    inner = draw(arg.indices(max(segments - 1, 0), entries + 1))
    if not isinstance(inner, torch.Tensor) or inner.is_meta:
        return inner
    ends = torch.tensor([0]), torch.tensor([entries])
    parts = (ends[0], inner.long().sort().values, ends[1]) if segments > 0 else (ends[0],)
    ptr = torch.cat(parts)
    if draw(arg.seldom(8)):
        ptr = ptr.flip(0)
    return draw(arg.relaid(ptr.to(draw(st.sampled_from(arg.INDEX_DTYPES)))))


def shapes() -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(arg.SIZES), min_size=1, max_size=4)


@st.composite
def group_calls(draw: st.DrawFn, function: Callable[..., Any], floating: bool = True) -> Call:
    """Of what takes entries and an index."""
    shape = tuple(draw(shapes()))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    slots = draw(st.sampled_from(arg.SIZES[1:]))
    index = draw(arg.along(draw(arg.indices(shape[dim], slots)), shape, dim % len(shape)))
    kwargs = {
        "src": draw(arg.features(shape, floating=floating)),
        "index": index,
        "dim": draw(arg.dims(dim)),
        "dim_size": draw(arg.counts(slots)),
    }
    if function in (scatter.softmax, scatter.logsumexp) and draw(arg.seldom(2)):
        kwargs["ptr"] = draw(pointers(shape[dim], slots))
        kwargs["index"] = index if draw(arg.seldom(8)) else None
    if function in (scatter.var, scatter.std, scatter.multi_reduce):
        kwargs["correction"] = draw(st.sampled_from((0, 1, 1, 2, -1, True, 1.5, *arg.HUGE[:3])))
    if function is scatter.multi_reduce:
        names = draw(st.lists(arg.words(MULTI), max_size=4, unique_by=repr))
        kwargs["reduces"] = tuple(names) if draw(st.booleans()) else names
    return function, kwargs


@st.composite
def segment_reduce_calls(draw: st.DrawFn) -> Call:
    shape = tuple(draw(shapes()))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    return scatter.segment_reduce, {
        "src": draw(arg.features(shape)),
        "ptr": draw(pointers(shape[dim], draw(st.sampled_from(arg.SIZES)))),
        "reduce": draw(arg.words((*arg.REDUCES, "prod", "mul"))),
        "dim": draw(arg.dims(dim)),
        "ties": draw(arg.words(("even", "first"))),
    }


@st.composite
def index_sort_calls(draw: st.DrawFn) -> Call:
    bound = draw(st.sampled_from(arg.SIZES[1:]))
    return scatter.index_sort, {
        "index": draw(arg.indices(draw(st.sampled_from(arg.SIZES)), bound)),
        "max_value": draw(arg.counts(bound)),
    }


@st.composite
def sddmm_calls(draw: st.DrawFn, edge_lists: Callable[[int, int], st.SearchStrategy[Any]]) -> Call:
    rows, cols = draw(st.sampled_from(arg.SIZES[1:])), draw(st.sampled_from(arg.SIZES[1:]))
    rest = tuple(draw(st.lists(st.sampled_from(arg.SIZES), max_size=3)))
    return sparse.sddmm, {
        "A": draw(arg.matrices(rows, cols) if draw(arg.seldom(3)) else edge_lists(cols, rows)),
        "a_dst": draw(arg.features((rows, *rest))),
        "b_src": draw(arg.features((cols, *rest))),
        "op": draw(arg.words(("dot", "add", "sub", "mul"))),
    }


@st.composite
def segment_matmul_calls(draw: st.DrawFn) -> Call:
    entries, segments = draw(st.sampled_from(arg.SIZES)), draw(st.sampled_from(arg.SIZES))
    columns, out_columns = draw(st.sampled_from(arg.SIZES)), draw(st.sampled_from(arg.SIZES))
    x = draw(arg.features((entries, columns), floating=True))
    weight = draw(arg.features((segments, columns, out_columns), floating=True))
    plain = all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in (x, weight))
    if plain and not x.is_sparse and not weight.is_sparse and not draw(arg.seldom(8)):
        weight = weight.detach().to(x.dtype).requires_grad_(weight.requires_grad)
    return sparse.segment_matmul, {
        "x": x,
        "ptr": draw(pointers(entries, segments)),
        "weight": weight,
    }
