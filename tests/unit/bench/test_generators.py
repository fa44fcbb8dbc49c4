"""Sizes, order, symmetry and repeatability of the benchmark graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from edgeweave.bench import generators
from edgeweave.bench.generators import GraphData

SMALL: dict[str, Callable[[int], GraphData]] = {
    "rmat": lambda seed: generators.rmat(scale=8, edge_factor=4, seed=seed),
    "arxiv-community": lambda seed: generators.arxiv_sized("community", seed, shrink=100),
    "arxiv-random": lambda seed: generators.arxiv_sized("random", seed, shrink=100),
    "half-arxiv": lambda seed: generators.half_arxiv(seed, shrink=100),
    "molecules": lambda seed: generators.molecule_batch(16, seed),
}


def edge_keys(graph: GraphData) -> torch.Tensor:
    src, dst = graph.edge_index
    return src * graph.num_nodes + dst


@pytest.fixture(params=SMALL)
def make(request: pytest.FixtureRequest) -> Callable[[int], GraphData]:
    return SMALL[request.param]


def test_same_seed_same_graph_other_seed_other_graph(make: Callable[[int], GraphData]) -> None:
    first, again, other = make(1), make(1), make(2)
    assert torch.equal(first.edge_index, again.edge_index)
    assert not torch.equal(first.edge_index, other.edge_index)


def test_nodes_are_in_range_and_int64(make: Callable[[int], GraphData]) -> None:
    graph = make(0)
    assert graph.edge_index.dtype == torch.int64
    assert graph.edge_index.is_contiguous()
    assert int(graph.edge_index.min()) >= 0
    assert int(graph.edge_index.max()) < graph.num_nodes


def test_full_sizes_are_those_of_the_numbers_table() -> None:
    rmat = generators.rmat()
    assert (rmat.num_nodes, rmat.num_edges) == (1 << 17, 16 << 17)
    arxiv = generators.arxiv_sized()
    assert (arxiv.num_nodes, arxiv.num_edges) == (169_343, 2_315_598)
    half = generators.half_arxiv()
    assert (half.num_nodes, half.num_edges) == (84_672, 1_157_799)


def test_rmat_fills_the_quadrants_as_asked() -> None:
    # Before shuffling, the first bit of an endpoint is 0 with probability a + b = 0.76; after it,
    # what remains visible is the skew: the busiest 1 % of the nodes carry far more than 1 %.
    graph = generators.rmat(scale=12, edge_factor=16)
    degree = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes).sort().values
    assert degree[-40:].sum() > 0.08 * graph.num_edges
    assert (degree == 0).float().mean() > 0.1


def test_rmat_edges_come_in_no_order() -> None:
    src, dst = generators.rmat(scale=10).edge_index
    for row in (src, dst):
        ascending = (row[1:] >= row[:-1]).float().mean()
        assert 0.4 < ascending < 0.6


@pytest.mark.parametrize("order", ["community", "random"])
def test_arxiv_sized_is_symmetric_and_sorted(order: str) -> None:
    graph = generators.arxiv_sized(order, shrink=50)
    keys = edge_keys(graph)
    assert bool((keys[1:] >= keys[:-1]).all())
    reverse = graph.edge_index[1] * graph.num_nodes + graph.edge_index[0]
    assert torch.equal(reverse.sort().values, keys)


def test_half_arxiv_is_directed() -> None:
    graph = generators.half_arxiv(shrink=50)
    reverse = graph.edge_index[1] * graph.num_nodes + graph.edge_index[0]
    assert torch.isin(reverse, edge_keys(graph)).float().mean() < 0.5


def test_community_order_is_local_and_random_order_is_not() -> None:
    shares = {}
    for order in ("community", "random"):
        graph = generators.arxiv_sized(order, shrink=20)
        src, dst = graph.edge_index
        shares[order] = ((src - dst).abs() < graph.num_nodes // 40).float().mean().item()
        # Two thirds inside the community, and a few that land there by chance.
        inside = (graph.community[src] == graph.community[dst]).float().mean()
        assert 0.63 < inside < 0.72
        assert torch.bincount(graph.community).numel() == 40
    assert shares["community"] > 0.6
    assert shares["random"] < 0.15


def test_orders_are_the_same_graph_up_to_names() -> None:
    degrees = [
        torch.bincount(generators.arxiv_sized(order, shrink=50).edge_index[1]).sort().values
        for order in ("community", "random")
    ]
    assert torch.equal(*degrees)


def test_degrees_have_a_heavy_tail() -> None:
    graph = generators.arxiv_sized()
    degree = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
    assert degree.max() > 2_000
    assert degree.median() < degree.float().mean()


def test_molecules_are_trees_with_rings() -> None:
    graph = generators.molecule_batch(256)
    src, dst = graph.edge_index
    assert torch.equal(graph.batch[src], graph.batch[dst])
    assert bool((graph.batch[1:] >= graph.batch[:-1]).all())
    assert int(graph.batch.max()) == 255
    assert 17 < graph.num_nodes / 256 < 19
    assert 35 < graph.num_edges / 256 < 39
    assert bool((src != dst).all())
    reverse = dst * graph.num_nodes + src
    assert torch.equal(reverse.sort().values, edge_keys(graph).sort().values)
    # A tree of n nodes has 2 (n - 1) directed edges; one or two rings add 2 or 4.
    surplus = torch.bincount(graph.batch[src]) - 2 * (torch.bincount(graph.batch) - 1)
    assert set(surplus.tolist()) <= {2, 4}
    assert int(torch.bincount(dst, minlength=graph.num_nodes).min()) >= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: generators.rmat(scale=0), "rmat: scale must be at least 1, got 0"),
        (lambda: generators.rmat(edge_factor=0), "edge_factor must be at least 1"),
        (lambda: generators.block_model(10, 5), "num_nodes must be at least 40, got 10"),
        (lambda: generators.block_model(50, 5, order="no"), "order must be 'community' or"),
        (lambda: generators.molecule_batch(0), "num_graphs must be at least 1"),
    ],
)
def test_refusals(make: Callable[[], GraphData], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
