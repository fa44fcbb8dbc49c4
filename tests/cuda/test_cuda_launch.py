"""Launches of kept kernels: each gets the kernel that was compiled for what it passes."""

from __future__ import annotations

import _reference as ref
import pytest
import torch
from _cuda_graphs import hub_edges, random_edges

from edgeweave import sparse
from edgeweave._plan import _device


def total(graph, x):
    return sparse.mm(graph, x, "sum")


def check(x, edges, out):
    expected = ref.mm(edges, x.cpu(), out.shape[0], "sum", None)
    terms = expected.degree.reshape(-1, *([1] * (x.dim() - 1)))
    ref.assert_within(
        out.cpu(), expected.value, ref.error_bound(expected, terms, x.dtype, roundings=1)
    )


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, four bytes behind where an allocation begins."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return moved.copy_(x)


@pytest.mark.parametrize("width", [1, 4, 16, 33, 128])
def test_where_memory_begins_may_change_from_call_to_call(width, device):
    edges = random_edges(23, 19, 90)
    graph = sparse.Graph(edges.to(device), size=(23, 19))
    x = torch.randn(23, width, device=device)
    moved = shifted(x)
    assert moved.data_ptr() % 16 == 4
    for features in (x, moved, x, moved):
        check(features, edges, total(graph, features))


def test_widths_dtypes_and_sizes_may_change_from_call_to_call(device):
    for count in (90, 16, 1, 91):
        edges = random_edges(16, 16, count)
        graph = sparse.Graph(edges.to(device), size=(16, 16))
        for width in (16, 1, 17):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                x = torch.randn(16, width, device=device).to(dtype)
                check(x, edges, total(graph, x))


def test_a_kept_kernel_is_launched_again(gpu):
    from edgeweave._triton import _compiled

    graph = sparse.Graph(random_edges(23, 19, 90).to(gpu), size=(23, 19))
    x = torch.randn(23, 48, device=gpu)
    first = total(graph, x)
    before = dict(_compiled._kept)
    assert torch.equal(total(graph, x), first)
    assert _compiled._kept == before
    assert before, "the kernel was kept"


def test_launches_go_to_the_current_stream(gpu):
    graph = sparse.Graph(random_edges(23, 19, 90).to(gpu), size=(23, 19))
    x = torch.ones(23, 48, device=gpu)
    total(graph, x)
    stream = torch.cuda.Stream()
    recorded = torch.cuda.CUDAGraph()
    # Under capture a launch on any other stream is an error, and what is recorded does not run.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total(graph, x)
    torch.cuda.synchronize()
    with torch.cuda.graph(recorded, stream=stream):
        out = total(graph, x)
    x.fill_(2.0)
    recorded.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, total(graph, x), rtol=0, atol=0)


def test_programs_with_many_edges_come_first(device):
    edges = hub_edges(40, 900)
    graph = sparse.Graph(edges.to(device), size=(40, 40))
    parts = graph.plan().handle.forward.parts
    assert parts is not None, "the graph has a long row"
    ptr = graph.plan().handle.forward.ptr
    ends = torch.minimum(parts.begin + 256, ptr[parts.row.long() + 1])
    is_long = (ends - parts.begin >= 64).tolist()
    assert is_long == sorted(is_long, reverse=True)
    assert 0 < sum(is_long) < len(is_long)
    assert _device.has_kernels(edges.to(device))
