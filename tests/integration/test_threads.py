"""Bitwise the same for any number of threads and whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from edgeweave import sparse
from edgeweave.scatter import gather, scatter_reduce

THREADS = (1, 2, 4)


def skewed(num_nodes: int, num_edges: int, seed: int = 0) -> torch.Tensor:
    """Return edges with one hub of 20,000 leaves, some medium rows, and many short ones."""
    generator = torch.Generator().manual_seed(seed)
    dst = (torch.rand(num_edges, generator=generator).pow(3) * num_nodes).long()
    dst[:20_000] = 7
    src = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    order = torch.randperm(num_edges, generator=generator)
    return torch.stack([src, dst])[:, order]


def bits(tensors) -> list[torch.Tensor]:
    """Return the tensors as integers, so that equality means bitwise equality."""
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [t.detach().contiguous().view(size[t.element_size()]) for t in tensors]


def for_each_number_of_threads(function) -> None:
    results = []
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        assert torch.get_num_threads() == num_threads
        results.append(bits(function()))
    for num_threads, result in zip(THREADS[1:], results[1:], strict=True):
        for position, (a, b) in enumerate(zip(results[0], result, strict=True)):
            assert torch.equal(a, b), f"output {position}: 1 thread against {num_threads}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("features", [(1,), (33,), (4, 8)], ids=str)
def test_mm_forward_and_backward(features, reduce, dtype):
    edges = skewed(2000, 60_000)
    x = torch.randn(2000, *features).to(dtype).requires_grad_()
    weight = torch.randn(60_000, *features[:-1]).to(dtype).requires_grad_()
    upstream = torch.randn(2000, *features).to(dtype)

    def run():
        sparse.cache_clear()
        out = sparse.mm(edges, x, reduce, weight=weight)
        plain = sparse.mm(edges, x, reduce)
        return [
            out, plain, *torch.autograd.grad(out, [x, weight], upstream),
            *torch.autograd.grad(plain, [x], upstream),
        ]  # fmt: skip

    for_each_number_of_threads(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize(("shape", "dim"), [((60_000,), 0), ((60_000, 9), 0), ((3, 60_000, 5), 1)])
def test_scatter_reduce_and_gather(shape, dim, reduce, dtype):
    index = skewed(2000, 60_000)[1]
    src = torch.randn(shape).to(dtype)
    src.requires_grad_()
    out_shape = list(shape)
    out_shape[dim] = 2000
    upstream = torch.randn(out_shape).to(dtype)
    x = torch.randn(out_shape).to(dtype).requires_grad_()

    def run():
        sparse.cache_clear()
        out = scatter_reduce(src, index, dim, 2000, reduce)
        picked = gather(x, index, dim)
        return [
            out, picked, *torch.autograd.grad(out, [src], upstream),
            *torch.autograd.grad(picked, [x], src.detach()),
        ]  # fmt: skip

    for_each_number_of_threads(run)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("place", ["after", "before", "interleaved"])
@pytest.mark.parametrize("width", [1, 8, 33])
def test_rows_do_not_depend_on_the_rest_of_the_batch(width, place, reduce):
    """One graph alone, and the same graph beside another: same bits, forward and backward."""
    torch.set_num_threads(2)
    alone, other = skewed(2000, 60_000), skewed(1501, 47_003, seed=1)
    shift, keep = (1501, 0) if place == "before" else (0, 2000)
    if place == "before":
        both = torch.cat([other, alone + shift], 1)
        mine = torch.arange(47_003, 107_003)
    else:
        both = torch.cat([alone, other + keep], 1)
        mine = torch.arange(60_000)
    if place == "interleaved":
        # Any merge that keeps the order of each part.
        order = torch.cat([torch.arange(60_000) / 60_000, torch.arange(47_003) / 47_003])
        order = order.argsort(stable=True)
        both = both[:, order]
        mine = (order < 60_000).nonzero()[:, 0]
    rows = torch.arange(shift, shift + 2000)
    x_all, weight_all = torch.randn(3501, width), torch.randn(107_003)
    upstream_all = torch.randn(3501, width)
    results = []
    for edges, x, weight, upstream in (
        (alone, x_all[rows], weight_all[mine], upstream_all[rows]),
        (both, x_all, weight_all, upstream_all),
    ):
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = sparse.mm(edges, x, reduce, weight=weight)
        grad_x, grad_weight = torch.autograd.grad(out, [x, weight], upstream)
        src = weight.detach()[:, None] * x.detach()[edges[0]]
        scattered = scatter_reduce(src, edges[1], 0, len(x), reduce)
        results.append((out, grad_x, grad_weight, scattered))
    (a_out, a_x, a_weight, a_scattered), (b_out, b_x, b_weight, b_scattered) = results
    for name, a, b in (
        ("out", a_out, b_out[rows]),
        ("grad of x", a_x, b_x[rows]),
        ("grad of weight", a_weight, b_weight[mine]),
        ("scattered", a_scattered, b_scattered[rows]),
    ):
        assert torch.equal(*bits([a, b])), name
