"""Programs put together at random: whatever the passes make of them, the numbers are eager's."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

GATHERS = {
    "index_select": lambda x, i: x.index_select(0, i),
    "brackets": lambda x, i: x[i],
    "gather": lambda x, i: torch.gather(x, 0, wide(i, x.shape[1:])),
    "negative dim": lambda x, i: x.index_select(-x.dim(), i),
}
FACTORS = {
    "none": lambda rows, w: rows,
    "per edge": lambda rows, w: rows * w.view(-1, *[1] * (rows.dim() - 1)),
    "in front": lambda rows, w: w.view(-1, *[1] * (rows.dim() - 1)) * rows,
    "twice": lambda rows, w: rows * w.view(-1, *[1] * (rows.dim() - 1)) * 2.0,
    "of the rows": lambda rows, w: rows * rows.sum(-1, keepdim=True),
    "full": lambda rows, w: rows * rows.detach().cos(),
}
REDUCTIONS = {
    "index_add": lambda n, i, m: m.new_zeros(n, *m.shape[1:]).index_add(0, i, m),
    "index_add_": lambda n, i, m: m.new_zeros(n, *m.shape[1:]).index_add_(0, i, m),
    "scatter_add_": lambda n, i, m: zeros(n, m).scatter_add_(0, wide(i, m.shape[1:]), m),
    "amax": lambda n, i, m: scatter(zeros(n, m), i, m, "amax", False),
    "amin": lambda n, i, m: scatter(zeros(n, m), i, m, "amin", False),
    "mean": lambda n, i, m: scatter(zeros(n, m), i, m, "mean", False),
    "amax into zeros": lambda n, i, m: scatter(zeros(n, m), i, m, "amax", True),
    "sum into ones": lambda n, i, m: scatter(zeros(n, m) + 1, i, m, "sum", True),
    "mean by counts": lambda n, i, m: by_counts(n, i, m),
    "kept target": lambda n, i, m: kept_target(n, i, m),
}
ENDS = {
    "nothing": lambda out, m: out,
    "another reader": lambda out, m: out + m.mean(),
    "an edit": lambda out, m: out.mul_(0.5),
}


def wide(index: Tensor, sizes: Any) -> Tensor:
    return index.view(-1, *[1] * len(sizes)).expand(-1, *sizes)


def zeros(n: int, m: Tensor) -> Tensor:
    return torch.zeros(n, *m.shape[1:], dtype=m.dtype)


def scatter(base: Tensor, index: Tensor, m: Tensor, reduce: str, include_self: bool) -> Tensor:
    return base.scatter_reduce(0, wide(index, m.shape[1:]), m, reduce, include_self=include_self)


def by_counts(n: int, index: Tensor, m: Tensor) -> Tensor:
    counts = torch.zeros(n, dtype=m.dtype).index_add_(0, index, m.new_ones(m.shape[0]))
    return zeros(n, m).index_add_(0, index, m) / counts.clamp(min=1).view(-1, *[1] * (m.dim() - 1))


def kept_target(n: int, index: Tensor, m: Tensor) -> Tensor:
    base = zeros(n, m)
    view = base[:1]
    base.index_add_(0, index, m)
    return base + view


# Each example is compiled: no shrinking, which would take minutes.
@hypothesis.settings(max_examples=40, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    gather=st.sampled_from(sorted(GATHERS)),
    factor=st.sampled_from(sorted(FACTORS)),
    reduction=st.sampled_from(sorted(REDUCTIONS)),
    end=st.sampled_from(sorted(ENDS)),
    rows=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    sizes=st.sampled_from([(5,), (1,), (2, 3), (1, 1), (3, 1)]),
    counts=st.sampled_from([(9, 60), (1, 7), (6, 1), (4, 0), (3, 3), (2, 2)]),
    dynamic=st.sampled_from([None, True]),
    seed=st.integers(0, 2**20),
)
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_random_programs(
    rewrite, gather, factor, reduction, end, rows, sizes, counts, dynamic, seed
):
    nodes, num_edges = counts
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, nodes, (2, num_edges), generator=generator)
    # Few distinct values: ties, also at 0. Their gradients are shared as torch shares them, but
    # for torch's excluded zeros, so zeros are moved away.
    x = torch.randint(-3, 4, (nodes, *sizes), generator=generator).double() + 0.25
    weight = torch.rand(num_edges, generator=generator, dtype=torch.float64) + 0.5

    def program(x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
        messages = FACTORS[factor](GATHERS[gather](x, edges[rows[0]]), weight)
        out = REDUCTIONS[reduction](x.shape[0], edges[rows[1]], messages)
        return ENDS[end](out, messages)

    if end == "another reader" and num_edges == 0:
        return  # the mean of nothing
    if end == "an edit" and ("index_add" not in reduction or "scatter" in reduction):
        return  # torch refuses, for its backward pass needs the result
    rewrite(program, x.float(), edges, weight.float(), dynamic=dynamic)
