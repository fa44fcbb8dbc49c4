"""Which tensors lead to which plan on CUDA: by version where it tells, by contents where not."""

from __future__ import annotations

import gc

import pytest
import torch
from _cuda_graphs import random_edges

import edgeweave
from edgeweave import scatter, sparse
from edgeweave._plan import _cache
from edgeweave._plan._cache import plan_for_edges, plan_for_index


@pytest.fixture(autouse=True)
def _empty_cache():
    sparse.cache_clear()
    yield
    sparse.cache_clear()


def test_a_tensor_is_known_again(device):
    edges, x = random_edges(9, 9, 40).to(device), torch.randn(9, 3, device=device)
    for _ in range(3):
        sparse.mm(edges, x)
    info = sparse.cache_info()
    assert (info.misses, info.content_hits, info.hits) == (1, 0, 2)
    sparse.mm(edges.clone(), x)
    assert sparse.cache_info().content_hits == 1
    scatter.scatter_reduce(torch.randn(40, 2, device=device), edges[1], dim_size=9)
    scatter.scatter_reduce(torch.randn(40, 2, device=device), edges[1], dim_size=9)
    info = sparse.cache_info()
    assert (info.misses, info.hits) == (2, 3)


def test_an_edit_in_place_is_noticed(device):
    edges, x = random_edges(9, 9, 40).to(device), torch.randn(9, 3, device=device)
    sparse.mm(edges, x)
    edges[1, 5] = (edges[1, 5] + 1) % 9
    expected = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
    torch.testing.assert_close(sparse.mm(edges, x), expected)


def test_in_compiled_code_contents_count_unless_the_tensor_came_in(device):
    edges = random_edges(9, 9, 40).to(device)
    first = plan_for_edges(edges, 9, 9, compiled=True)
    # As Inductor reuses a buffer: no version tells of it.
    edges.data.copy_(random_edges(9, 9, 40, seed=1))
    assert plan_for_edges(edges, 9, 9, compiled=True) is not first
    known = plan_for_edges(edges, 9, 9, compiled=True)
    _cache._device_links.note_owner(edges)
    alias = torch.as_strided(edges.detach(), edges.shape, edges.stride())
    assert plan_for_edges(alias, 9, 9, compiled=True) is known
    hits = sparse.cache_info().hits
    assert plan_for_edges(alias, 9, 9, compiled=True) is known
    assert sparse.cache_info().hits == hits + 1
    edges[0, 0] = (edges[0, 0] + 1) % 9
    assert plan_for_edges(edges, 9, 9, compiled=True) is not known


def test_a_tensor_at_a_freed_address_is_not_taken_for_another(device):
    for seed in range(20):
        edges = random_edges(9, 9, 40, seed).to(device)
        plan = plan_for_edges(edges, 9, 9)
        assert torch.equal(plan.array("dst").long(), edges[1])
        del edges, plan
        gc.collect()


def test_inference_tensors_are_compared(device):
    with torch.inference_mode():
        index = torch.randint(0, 5, (30,), device=device)
        first = plan_for_index(index, 5)
        index[0] = (index[0] + 1) % 5
        assert plan_for_index(index, 5) is not first
    x = torch.randn(30, 2, device=device, requires_grad=True)
    scatter.scatter_reduce(x, index.clone(), dim_size=5).sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0]] * 30


def test_a_plan_made_in_inference_mode_serves_training(device):
    edges = random_edges(9, 9, 40).to(device)
    with torch.inference_mode():
        sparse.mm(edges, torch.randn(9, 3, device=device), "amax")
    x = torch.randn(9, 3, device=device, requires_grad=True)
    sparse.mm(edges, x, "amax").sum().backward()
    assert sparse.cache_info().misses == 1
    assert x.grad is not None


def test_bytes_are_bounded_and_given_back(device):
    limit = sparse.cache_info().max_bytes
    try:
        for seed in range(5):
            sparse.mm(random_edges(9, 9, 400, seed).to(device), torch.randn(9, 3, device=device))
        assert sparse.cache_info().entries == 5
        sparse.set_cache_limit(1)
        assert sparse.cache_info().entries == 1
    finally:
        sparse.set_cache_limit(limit)


def test_graph_keeps_its_plan_and_sees_edits(device):
    edges, x = random_edges(9, 9, 40).to(device), torch.randn(9, 3, device=device)
    graph = edgeweave.Graph(edges, size=(9, 9))
    before = sparse.mm(graph, x)
    edges[1] = 0
    after = sparse.mm(graph, x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after[0], x[edges[0]].sum(0))


def test_features_elsewhere_are_an_error(gpu):
    edges = random_edges(9, 9, 40).to(gpu)
    with pytest.raises(ValueError, match="device"):
        sparse.mm(edges, torch.randn(9, 3))
    with pytest.raises(ValueError, match="device"):
        scatter.scatter_reduce(torch.randn(40, 3), edges[0], dim_size=9)


def test_on_another_stream(gpu):
    edges, x = random_edges(99, 99, 4000).to(gpu), torch.randn(99, 32, device=gpu)
    expected = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = sparse.mm(edges, x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sparse.mm(edges, x), expected, rtol=1e-4, atol=1e-4)
