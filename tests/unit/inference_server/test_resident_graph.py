"""Resident graphs: updates, subgraphs, and sampling that does not depend on the company."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from edgeweave.inference_server._batch import Work
from edgeweave.inference_server._config import GraphConfig
from edgeweave.inference_server._errors import (
    InvalidArgumentError,
    ModelConfigError,
    ResourceExhaustedError,
)
from edgeweave.inference_server._resident import ResidentRunner
from edgeweave.inference_server._resident_graph import GraphUpdate, ResidentGraph
from edgeweave.inference_server._subgraph import NewNodes, Subgraph, extract
from edgeweave.inference_server._types import InferRequest, Limits, WireTensor

LARGE = 1 << 20
NONE = np.empty(0, np.int64)
NO_EDGES = np.empty((2, 0), np.int64)
NO_ROWS = np.empty((0, 2), np.float32)


def graph(edges: list[tuple[int, int]], nodes: int = 6) -> ResidentGraph:
    x = np.arange(2 * nodes, dtype=np.float32).reshape(nodes, 2)
    pairs = np.array(edges, np.int64).reshape(-1, 2).T
    return ResidentGraph.build(x, pairs, np.zeros(nodes, bool), 1)


def update(**changes: Any) -> GraphUpdate:
    common = {
        "add_features": NO_ROWS,
        "set_ids": NONE,
        "set_features": NO_ROWS,
        "remove_nodes": NONE,
        "remove_edges": NO_EDGES,
        "add_edges": NO_EDGES,
    }
    return GraphUpdate(**{**common, **changes})


def edges_of(g: ResidentGraph) -> list[tuple[int, int]]:
    return sorted(map(tuple, g.edge_index().T.tolist()))


def old_edges(part: Subgraph) -> set[tuple[int, int]]:
    return set(map(tuple, part.ids[part.edge_index].T.tolist()))


def cut(g: ResidentGraph, seeds: list[int], hops: int, **options: Any) -> Subgraph:
    limits = {"max_nodes": LARGE, "max_edges": LARGE}
    return extract(g, np.array(seeds, np.int64), hops, **{**limits, **options})


def test_subgraph_holds_the_incoming_edges_within_reach() -> None:
    g = graph([(1, 0), (2, 1), (3, 2), (0, 5), (0, 4)])
    assert old_edges(cut(g, [0], 1)) == {(1, 0)}
    two = cut(g, [0], 2)
    assert old_edges(two) == {(1, 0), (2, 1)}
    assert two.ids.tolist() == [0, 1, 2]
    assert two.x.tolist() == g.x[[0, 1, 2]].tolist()
    assert old_edges(cut(g, [0, 4], 9)) == {(1, 0), (2, 1), (3, 2), (0, 4)}
    assert cut(g, [], 3).ids.size == 0


def test_loops_and_repeated_edges_are_kept_once_each() -> None:
    g = graph([(1, 0), (1, 0), (0, 0)])
    assert cut(g, [0], 3).edge_index.shape[1] == 3


def test_limits_come_before_the_edges_are_gathered() -> None:
    star = graph([(i, 0) for i in range(1, 6)])
    with pytest.raises(ResourceExhaustedError, match="got 5 where 4 are left"):
        cut(star, [0], 1, max_edges=4)
    with pytest.raises(ResourceExhaustedError, match="at most 3, got 6"):
        cut(star, [0], 1, max_nodes=3)


def test_new_nodes_do_not_change_the_graph() -> None:
    g = graph([(1, 0)])
    new = NewNodes(np.full((2, 2), 9.0, np.float32), np.array([[0, 6, 7], [6, 0, 7]]))
    part = cut(g, [6], 2, new=new)
    assert old_edges(part) == {(0, 6), (1, 0), (6, 0)}
    assert part.x[part.rows(np.array([6]))].tolist() == [[9.0, 9.0]]
    assert old_edges(cut(g, [0], 1)) == {(1, 0)}


@given(st.integers(0, 2**63), st.integers(1, 4), st.data())
def test_sampled_neighbours_depend_on_the_seed_alone(seed: int, fan_out: int, data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    pairs = rng.integers(0, 30, (200, 2))
    g = graph([tuple(p) for p in pairs.tolist()], nodes=30)
    seeds = data.draw(st.lists(st.integers(0, 29), min_size=1, max_size=5))
    alone = cut(g, seeds[:1], 2, fan_out=fan_out, seed=seed)
    assert np.bincount(alone.edge_index[1], minlength=1).max() <= fan_out
    together = cut(g, seeds, 2, fan_out=fan_out, seed=seed)
    # Whatever else is asked for, each node of the smaller part has the same sources.
    inside = {node for _, node in old_edges(alone)}
    assert {(s, t) for s, t in old_edges(together) if t in inside} == old_edges(alone)
    again = cut(g, seeds, 2, fan_out=fan_out, seed=seed)
    assert again.edge_index.tolist() == together.edge_index.tolist()


def test_sampling_is_fair() -> None:
    star = graph([(i, 0) for i in range(1, 6)])
    picked = np.zeros(6)
    for seed in range(3000):
        part = cut(star, [0], 1, fan_out=2, seed=seed)
        picked[part.ids[part.edge_index[0]]] += 1
    # 2 of 5 in 3000 draws: 1200 each, standard deviation 27; five of them.
    assert np.abs(picked[1:] - 1200).max() < 135


class Calls:
    """A model that remembers what it was called with."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def __call__(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        self.sizes.append((x.shape[0], edge_index.shape[1]))
        return x.index_add(0, edge_index[1], x[edge_index[0]])


def resident(model: Calls, edges: list[tuple[int, int]]) -> ResidentRunner:
    config = GraphConfig(features=2, channels=2, hops=1)
    return ResidentRunner(model, config, graph(edges), Limits())


def asked(runner: ResidentRunner, ids: list[int], **parameters: Any) -> Work:
    tensor = WireTensor("NODE_IDS", "INT64", np.array(ids, np.int64))
    return runner.admit(InferRequest("m", "", "", {"NODE_IDS": tensor}, (), parameters, 0))


def answers(runner: ResidentRunner, works: list[Work]) -> list[Any]:
    results = runner.split(runner.infer(runner.collate(works)), works)
    return [(r.outputs[0].array.tolist(), r.parameters["graph_version"]) for r in results]


def test_concurrent_requests_share_one_subgraph() -> None:
    model = Calls()
    runner = resident(model, [(2, 0), (3, 0), (2, 1)])
    alone = [answers(runner, [asked(runner, ids)])[0] for ids in ([0], [1], [0, 1])]
    assert model.sizes == [(3, 2), (2, 1), (4, 3)]
    model.sizes.clear()
    assert answers(runner, [asked(runner, ids) for ids in ([0], [1], [0, 1])]) == alone
    # One call, on the nodes that any of them needs, each once: 0, 1, 2, 3.
    assert model.sizes == [(4, 3)]
    model.sizes.clear()
    # Another fan-out or seed is another subgraph of the same call.
    answers(runner, [asked(runner, [0]), asked(runner, [0], fan_out=1)])
    assert model.sizes == [(5, 3)]


def test_requests_inside_finish_on_their_version() -> None:
    runner = resident(Calls(), [(2, 0)])
    before = asked(runner, [0])
    runner.update(update(set_ids=np.array([2]), set_features=np.array([[90.0, 90.0]], np.float32)))
    after = asked(runner, [0])
    # In one batch: 0 has (0, 1), and 2 had (4, 5).
    assert answers(runner, [before, after]) == [([[4.0, 6.0]], 1), ([[90.0, 91.0]], 2)]


def test_updates() -> None:
    g = graph([(1, 0), (1, 0), (2, 1), (3, 2)], nodes=4)
    changed = g.updated(
        update(
            add_features=np.ones((2, 2), np.float32),
            set_ids=np.array([3, 4]),
            set_features=np.array([[7.0, 7.0], [8.0, 8.0]], np.float32),
            remove_nodes=np.array([2]),
            remove_edges=np.array([[1], [0]]),
            add_edges=np.array([[5, 4], [0, 5]]),
        ),
        LARGE,
        LARGE,
    )
    assert (changed.version, changed.nodes) == (2, 6)
    # One copy of (1, 0) went, and all edges of 2.
    assert edges_of(changed) == [(1, 0), (4, 5), (5, 0)]
    assert changed.x[3:].tolist() == [[7, 7], [8, 8], [1, 1]]
    with pytest.raises(InvalidArgumentError, match="must not be removed ones, got 2"):
        changed.check_nodes("ids", np.array([1, 2]))
    # The old version is as it was.
    assert edges_of(g) == [(1, 0), (1, 0), (2, 1), (3, 2)]
    assert g.x[3].tolist() == [6, 7]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remove_edges": np.array([[0], [1]])}, r"edges must exist, got \(0, 1\)"),
        ({"remove_edges": np.array([[1, 1], [0, 0]])}, r"edges must exist, got \(1, 0\)"),
        ({"remove_edges": np.array([[9], [0]])}, r"remove_edges: node ids must be in \[0, 6\)"),
        ({"add_edges": np.array([[-1], [0]])}, "add_edges: node ids must be"),
        ({"remove_nodes": np.array([6])}, "remove_node_ids: node ids must be"),
        (
            {"remove_nodes": np.array([2]), "add_edges": np.array([[2], [0]])},
            "add_edges: nodes must not be removed ones, got 2",
        ),
    ],
)
def test_updates_that_are_refused(changes: dict[str, Any], words: str) -> None:
    g = graph([(1, 0), (2, 1)])
    with pytest.raises(InvalidArgumentError, match=words):
        g.updated(update(**changes), LARGE, LARGE)
    assert g.version == 1


def test_graph_cannot_grow_without_bound() -> None:
    g = graph([(1, 0)])
    with pytest.raises(ResourceExhaustedError, match="at most 6 nodes"):
        g.updated(update(add_features=np.ones((1, 2), np.float32)), 6, LARGE)
    with pytest.raises(ResourceExhaustedError, match="at most 1 edges"):
        g.updated(update(add_edges=np.array([[0], [1]])), LARGE, 1)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"x": torch.zeros(2, 2)}, "must be x and edge_index"),
        ({"x": torch.zeros(2, 3), "edge_index": torch.zeros(2, 0).long()}, r"fp32 \[N, 2\]"),
        ({"x": torch.zeros(2, 2), "edge_index": torch.zeros(2, 0)}, r"int64 \[2, E\]"),
        ({"x": torch.zeros(2, 2), "edge_index": torch.tensor([[0], [2]])}, r"lie in \[0, 2\)"),
    ],
)
def test_files_that_are_refused(tensors: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ModelConfigError, match=words):
        ResidentGraph.from_tensors(tensors, 2)
