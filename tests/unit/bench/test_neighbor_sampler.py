"""Batches of the sampled training rows: their form, and that no two calls share a tensor."""

from __future__ import annotations

import pytest
import torch

from edgeweave.bench import generators
from edgeweave.bench.neighbor_sampler import SampledBatches


@pytest.fixture(scope="module")
def graph() -> generators.GraphData:
    return generators.half_arxiv(shrink=500)


@pytest.fixture
def batches(graph: generators.GraphData) -> SampledBatches:
    # The features are the numbers of the nodes, which says where a row came from.
    x = torch.arange(graph.num_nodes, dtype=torch.float32).unsqueeze(-1)
    return SampledBatches(graph, x, [3, 2], batch_size=20)


def test_seeds_come_first_and_edges_are_the_graphs(
    graph: generators.GraphData, batches: SampledBatches
) -> None:
    batch = batches(0)
    nodes = batch.x.view(-1).long()
    assert nodes.unique().numel() == nodes.numel()
    assert graph.community is not None
    assert torch.equal(batch.target, graph.community[nodes[:20]])
    assert batch.rows == slice(0, 20)
    found = {(int(s), int(d)) for s, d in nodes[batch.edge_index].t()}
    assert found <= {(int(s), int(d)) for s, d in graph.edge_index.t()}
    into = torch.bincount(batch.edge_index[1])
    wanted = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)[nodes]
    assert torch.equal(into[:20], wanted[:20].clamp(max=3))
    assert int(into[20:].max()) <= 2


def test_every_step_is_another_batch_of_another_size(batches: SampledBatches) -> None:
    sizes = {batches(step).edge_index.size(1) for step in range(6)}
    assert len(sizes) > 1
    seeds = torch.cat([batches(step).x[:20] for step in range(6)])
    assert seeds.unique().numel() == 120


def test_a_step_comes_again_in_tensors_of_its_own(batches: SampledBatches) -> None:
    first, again = batches(1), batches(1)
    batches(2)
    later = batches(1)
    for name in ("x", "edge_index", "target"):
        mine, others = getattr(first, name), (getattr(again, name), getattr(later, name))
        for other in others:
            assert torch.equal(mine, other)
            assert mine.data_ptr() != other.data_ptr()


def test_an_epoch_has_every_node_once_and_the_next_another_order(
    graph: generators.GraphData, batches: SampledBatches
) -> None:
    steps = -(-graph.num_nodes // 20)
    parts = [batches(step) for step in range(steps)]
    seeds = torch.cat([part.x[part.rows].view(-1) for part in parts])
    assert torch.equal(seeds.sort().values, torch.arange(graph.num_nodes, dtype=torch.float32))
    assert parts[-1].target.numel() == graph.num_nodes - 20 * (steps - 1)
    assert not torch.equal(batches(steps).x[:20], parts[0].x[:20])


def test_a_graph_without_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="graph must have communities, got none"):
        SampledBatches(generators.molecule_batch(2), torch.ones(9, 1), [2], batch_size=2)
