"""The plan cache: what hits, what must miss, and that a wrong plan is never used."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import _reference as ref
import pytest
import torch

from edgeweave import scatter, sparse

pytestmark = pytest.mark.usefixtures("empty_cache")

LARGE = 120_000  # above the 1e5 edges up to which everything is compared at each look-up


def random_edges(num_nodes: int = 20, num_edges: int = 80, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_nodes, (2, num_edges), generator=generator)


class Counting:
    """Counts what look-ups within a `with` block did."""

    def __enter__(self):
        self._before = sparse.cache_info()
        return self

    def __exit__(self, *_):
        after = sparse.cache_info()
        self.misses = after.misses - self._before.misses
        self.hits = after.hits - self._before.hits
        self.content_hits = after.content_hits - self._before.content_hits
        self.entries = after.entries - self._before.entries


def check_sum(edges: torch.Tensor, x: torch.Tensor) -> None:
    """Check the unweighted sum of integers, which is exact, against torch."""
    expected = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
    assert torch.equal(sparse.mm(edges, x), expected)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randint(-9, 10, (20, 3)).float()


def test_empty_cache_knows_nothing(x):
    info = sparse.cache_info()
    assert (info.entries, info.bytes) == (0, 0)
    assert info.max_bytes > 0
    with Counting() as first:
        sparse.mm(random_edges(), x)
    assert (first.misses, first.hits) == (1, 0)
    assert sparse.cache_info().entries == 1
    assert sparse.cache_info().bytes > 0
    sparse.cache_clear()
    assert (sparse.cache_info().entries, sparse.cache_info().bytes) == (0, 0)


@pytest.mark.parametrize("num_edges", [80, LARGE])
def test_same_tensor_hits(x, num_edges):
    edges = random_edges(num_edges=num_edges)
    check_sum(edges, x)
    with Counting() as again:
        for _ in range(3):
            check_sum(edges, x)
    assert (again.misses, again.hits) == (0, 3)


@pytest.mark.parametrize("num_edges", [80, LARGE])
def test_forward_backward_and_reduces_share_one_plan(x, num_edges):
    edges = random_edges(num_edges=num_edges)
    with Counting() as all_calls:
        for reduce in ("sum", "mean", "amax", "amin"):
            leaf = x.clone().requires_grad_()
            sparse.mm(edges, leaf, reduce).sum().backward()
    assert all_calls.misses == 1


@pytest.mark.parametrize("num_edges", [80, LARGE])
def test_equal_content_in_a_new_tensor_hits(x, num_edges):
    """A model that rebuilds its edges in each forward."""
    edges = random_edges(num_edges=num_edges)
    check_sum(edges, x)
    with Counting() as again:
        for _ in range(3):
            check_sum(edges.clone(), x)
    assert again.misses == 0
    assert again.content_hits == 3


@pytest.mark.parametrize("num_edges", [80, LARGE])
def test_equal_content_hits_after_the_first_tensor_died(x, num_edges):
    check_sum(random_edges(num_edges=num_edges), x)
    gc.collect()
    with Counting() as again:
        check_sum(random_edges(num_edges=num_edges), x)
    assert (again.misses, again.content_hits) == (0, 1)


@pytest.mark.parametrize("num_edges", [80, LARGE])
def test_views_of_edge_index_hit(num_edges):
    """`edge_index[1]` makes a new tensor object at each call."""
    edges = random_edges(num_edges=num_edges)
    src = torch.randn(num_edges, 2)
    first = scatter.scatter_reduce(src, edges[1], dim_size=20)
    with Counting() as again:
        for _ in range(3):
            assert torch.equal(scatter.scatter_reduce(src, edges[1], dim_size=20), first)
    assert again.misses == 0


@pytest.mark.parametrize("num_edges", [80, LARGE])
def test_rows_of_edge_index_are_told_apart(num_edges):
    edges = random_edges(num_edges=num_edges)
    src = torch.randint(-9, 10, (num_edges, 2)).float()
    for _ in range(2):
        for row in (0, 1):
            expected = torch.zeros(20, 2).index_add_(0, edges[row], src)
            assert torch.equal(scatter.scatter_reduce(src, edges[row], dim_size=20), expected)


def test_expanded_index_hits():
    index, src = random_edges()[1], torch.randn(80, 6)
    first = scatter.scatter_reduce(src, index[:, None].expand(80, 6), dim_size=20)
    with Counting() as again:
        for form in (index, index[:, None], index[:, None].expand(80, 6)):
            assert torch.equal(scatter.scatter_reduce(src, form, dim_size=20), first)
    assert again.misses == 0


@pytest.mark.parametrize("num_edges", [80, LARGE])
def test_strides_do_not_confuse(x, num_edges):
    """Same memory, same shape, other strides: other edges."""
    flat = torch.randint(0, 20, (2 * num_edges,))
    for _ in range(2):
        check_sum(flat.view(2, num_edges), x)
        check_sum(flat.view(num_edges, 2).t(), x)


def test_sizes_do_not_confuse():
    edges = random_edges()
    for num_nodes in (20, 25, 20, 31):
        x = torch.randint(-9, 10, (num_nodes, 3)).float()
        check_sum(edges, x)
    wide = sparse.Graph(edges, size=(20, 40))
    assert sparse.mm(wide, torch.ones(20, 1)).shape == (40, 1)


def test_smaller_size_is_validated_again():
    edges = random_edges()
    check_sum(edges, torch.ones(20, 1))
    with pytest.raises(IndexError, match="19"):
        sparse.mm(edges, torch.ones(19, 1))


def test_int32_and_int64_edges_of_equal_value(x):
    edges = random_edges()
    for _ in range(2):
        assert torch.equal(sparse.mm(edges, x), sparse.mm(edges.int(), x))


@pytest.mark.parametrize("num_edges", [80, LARGE])
@pytest.mark.parametrize(
    "edit",
    [
        lambda edges: edges.__setitem__((1, 7), (edges[1, 7] + 1) % 20),
        lambda edges: edges[1].add_(1).remainder_(20),
        lambda edges: edges.copy_(edges.flip(0)),
        lambda edges: edges.t()[3:5].fill_(0),
        lambda edges: edges.detach().narrow(1, 40, 2).zero_(),
    ],
    ids=["one entry", "a row view", "copy_", "a transposed view", "a detached view"],
)
def test_edit_in_place_is_noticed(x, num_edges, edit):
    edges = random_edges(num_edges=num_edges)
    check_sum(edges, x)
    before = edges.clone()
    edit(edges)
    assert not torch.equal(before, edges)
    check_sum(edges, x)


@pytest.mark.parametrize("position", [0, 1, 40, 79])
@pytest.mark.parametrize("row", [0, 1])
def test_edit_that_torch_cannot_see_is_noticed_below_1e5_edges(x, row, position):
    edges = random_edges()
    check_sum(edges, x)
    version = edges._version
    edges.data[row, position] = (edges[row, position] + 1) % 20
    check_sum(edges, x)
    edges.numpy()[row, position] = (edges[row, position] + 1) % 20
    assert edges._version == version
    check_sum(edges, x)


@pytest.mark.parametrize("position", [0, 1, 49_999, 99_998])
def test_edit_that_torch_cannot_see_just_below_1e5_edges(x, position):
    edges = random_edges(num_edges=99_999)
    check_sum(edges, x)
    edges.data[1, position] = (edges[1, position] + 1) % 20
    check_sum(edges, x)


def test_content_that_differs_in_one_entry_is_not_taken_for_equal(x):
    """The fingerprint only finds candidates: an exact comparison decides."""
    edges = random_edges(num_edges=LARGE)
    check_sum(edges, x)
    for position in (0, 1, 12_345, LARGE // 2, LARGE - 1):
        for row in (0, 1):
            other = edges.clone()
            other[row, position] = (other[row, position] + 1) % 20
            check_sum(other, x)


def test_private_copy_survives_edits(x):
    """Content must be compared with a copy, not with the tensor that was edited meanwhile."""
    edges = random_edges()
    before = edges.clone()
    check_sum(edges, x)
    edges.data.zero_()
    check_sum(before, x)
    check_sum(edges, x)


def test_inference_tensors_are_compared_entirely(x):
    """They have no version, so only their content can tell."""
    for num_edges in (80, LARGE):
        with torch.inference_mode():
            edges = random_edges(num_edges=num_edges) + 0
            assert edges.is_inference()
            check_sum(edges, x)
            with Counting() as again:
                check_sum(edges, x)
            assert again.misses == 0
            edges[1, num_edges // 3] = (edges[1, num_edges // 3] + 1) % 20
            check_sum(edges, x)
        check_sum(edges, x)


def test_addresses_are_never_trusted(x):
    """Create and delete: the allocator gives the next tensor the same address."""
    addresses = set()
    for seed in range(100):
        edges = random_edges(seed=seed)
        addresses.add(edges.data_ptr())
        check_sum(edges, x)
        del edges
    assert len(addresses) < 100  # else this shows nothing


def test_addresses_of_large_tensors_are_never_trusted(x):
    buffer = torch.empty(2 * LARGE, dtype=torch.int64)
    for seed in range(5):
        buffer.data.copy_(random_edges(num_edges=LARGE, seed=seed).flatten())
        edges = torch.from_numpy(buffer.numpy()).view(2, LARGE)  # version 0, same address
        check_sum(edges, x)


def test_dead_tensors_are_not_kept_alive(x):
    edges = random_edges()
    alive = _watch(edges)
    sparse.mm(edges, x)
    scatter.scatter_reduce(x[edges[0]], edges[1], dim_size=20)
    del edges
    gc.collect()
    assert not alive()


def _watch(tensor):
    import weakref

    reference = weakref.ref(tensor)
    return lambda: reference() is not None


def test_least_recently_used_goes_first(x):
    graphs = [random_edges(num_edges=2000, seed=seed) for seed in range(4)]
    sparse.mm(graphs[0], x)
    one = sparse.cache_info().bytes
    sparse.set_cache_limit(3 * one + one // 2)
    for edges in graphs[1:3]:
        sparse.mm(edges, x)
    assert sparse.cache_info().entries == 3
    sparse.mm(graphs[0], x)  # now graph 1 is the oldest
    sparse.mm(graphs[3], x)
    assert sparse.cache_info().entries == 3
    with Counting() as kept:
        for index in (0, 2, 3):
            sparse.mm(graphs[index], x)
    assert kept.misses == 0
    with Counting() as evicted:
        sparse.mm(graphs[1], x)
    assert evicted.misses == 1


def test_bytes_stay_bounded(x):
    sparse.mm(random_edges(num_edges=2000), x)
    limit = 5 * sparse.cache_info().bytes
    sparse.set_cache_limit(limit)
    assert sparse.cache_info().max_bytes == limit
    for seed in range(30):
        edges = random_edges(num_edges=2000, seed=seed)
        sparse.mm(edges, x.clone().requires_grad_()).sum().backward()  # backward adds the CSC
        assert sparse.cache_info().bytes <= limit


def test_lowering_the_limit_evicts_at_once(x):
    for seed in range(5):
        sparse.mm(random_edges(seed=seed), x)
    assert sparse.cache_info().entries == 5
    sparse.set_cache_limit(0)
    # The most recent plan stays, so that a graph above any limit is not sorted at each call.
    assert sparse.cache_info().entries == 1
    edges = random_edges()
    for _ in range(2):
        check_sum(edges, x)
        assert sparse.cache_info().entries == 1


def test_bytes_count_what_plans_hold(x):
    """CSR, CSC and the private copies, from the start: a limit must not be passed unseen."""
    edges = random_edges(num_edges=50_000)
    sparse.mm(edges, x)
    before = sparse.cache_info().bytes
    sparse.mm(edges, x.clone().requires_grad_()).sum().backward()
    graph = sparse.Graph(edges, size=(20, 20))
    assert graph.row.numel() == 50_000
    assert sparse.cache_info().bytes >= graph.nbytes >= 4 * 50_000 * 4
    assert before >= graph.nbytes


def test_backward_works_after_the_cache_was_cleared(x):
    edges = random_edges()
    leaf = x.clone().requires_grad_()
    out = sparse.mm(edges, leaf)
    sparse.cache_clear()
    edges.zero_()
    out.sum().backward()
    expected, _ = ref.mm_grad(random_edges(), x, torch.ones(20, 3))
    ref.assert_exact(leaf.grad, expected)


def test_invalidate_forgets_the_plan(x):
    edges = random_edges(num_edges=LARGE)
    graph = sparse.Graph(edges, size=(20, 20))
    sparse.mm(graph, x)
    edges.data[1, 777] = (edges[1, 777] + 1) % 20
    graph.invalidate()
    expected = torch.zeros(20, 3).index_add_(0, edges[1], x[edges[0]])
    assert torch.equal(sparse.mm(graph, x), expected)
    check_sum(edges, x)


CHECK_PLANS = """
import sys, torch
from edgeweave import sparse
edges = torch.randint(0, 20, (2, 300_000))
x = torch.randint(-9, 10, (20, 3)).float()
for position in (5, 123_457, 299_998):
    sparse.mm(edges, x)
    version = edges._version
    edges.data[1, position] = (edges[1, position] + 1) % 20
    assert edges._version == version
    expected = torch.zeros(20, 3).index_add_(0, edges[1], x[edges[0]])
    assert torch.equal(sparse.mm(edges, x), expected), position
"""


def test_environment_variable_compares_fully(run_python):
    run_python(CHECK_PLANS, env={"EDGEWEAVE_CHECK_PLANS": "1"})


def test_many_threads_look_up_at_once(x):
    graphs = [random_edges(num_edges=3000, seed=seed) for seed in range(6)]
    expected = [torch.zeros(20, 3).index_add_(0, e[1], x[e[0]]) for e in graphs]
    barrier = threading.Barrier(8)

    def work(worker: int) -> int:
        barrier.wait()
        wrong = 0
        for step in range(60):
            which = (worker + step) % 6
            edges = graphs[which] if step % 2 else graphs[which].clone()
            wrong += not torch.equal(sparse.mm(edges, x), expected[which])
            if step % 20 == worker:
                sparse.cache_clear()
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8
    info = sparse.cache_info()
    assert 0 <= info.entries <= 6
    assert info.bytes >= 0


def test_many_threads_share_one_lazy_csc():
    """Backward builds the CSC on first use; eight backwards at once must not build half of one."""
    edges = random_edges(50, 5000)
    graph = sparse.Graph(edges, size=(50, 50))
    upstream = torch.randint(-3, 4, (50, 2)).float()
    expected = torch.zeros(50, 2).index_add_(0, edges[0], upstream[edges[1]])
    barrier = threading.Barrier(8)

    def work(_: int) -> bool:
        leaf = torch.zeros(50, 2, requires_grad=True)
        out = sparse.mm(graph, leaf)
        barrier.wait()
        out.backward(upstream)
        return torch.equal(leaf.grad, expected)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
