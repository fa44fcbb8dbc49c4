"""A neighbour sampler in numpy for PyG's `NodeLoader`, and small graphs to sample from.

PyG's `NeighborLoader` is `NodeLoader` with a sampler that needs `pyg_lib` or `torch_sparse`. This
one gives batches of the same structure: seeds first, then the nodes of each hop in the order in
which they were met; edges hop by hop, those into the same node side by side: destinations ascend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    HeteroSamplerOutput,
    NodeSamplerInput,
    SamplerOutput,
)

NODE = "node"
EDGE = (NODE, "to", NODE)


class _Incoming:
    """The edges into each node."""

    def __init__(self, edge_index: Tensor, num_dst: int) -> None:
        src, dst = edge_index.numpy()
        self.edge = np.argsort(dst, kind="stable")
        self.src = src[self.edge]
        self.start = np.zeros(num_dst + 1, dtype=np.int64)
        np.cumsum(np.bincount(dst, minlength=num_dst), out=self.start[1:])

    def sample(self, node: int, count: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        """Return places in `src` and `edge` of at most `count` edges into a node."""
        first, last = self.start[node], self.start[node + 1]
        if last - first <= count:
            return np.arange(first, last)
        return first + np.sort(rng.choice(last - first, count, replace=False))


class NumpySampler(BaseSampler):
    """Samples neighbours without replacement, of one kind of nodes or of several.

    Args:
        data: The graph.
        num_neighbors: Neighbours of each node, per hop; for each relation of a heterogeneous graph.
    """

    def __init__(self, data: Data | HeteroData, num_neighbors: list[int]) -> None:
        self.hetero = isinstance(data, HeteroData)
        self.num_neighbors = num_neighbors
        if isinstance(data, HeteroData):
            self.num_nodes = {name: int(data[name].num_nodes) for name in data.node_types}
            edges = data.edge_index_dict
        else:
            self.num_nodes = {NODE: int(data.num_nodes)}
            edges = {EDGE: data.edge_index}
        self.incoming = {
            relation: _Incoming(index, self.num_nodes[relation[2]])
            for relation, index in edges.items()
        }

    def sample_from_nodes(
        self, index: NodeSamplerInput, **_: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """Sample around seeds, the same neighbours for the same seeds."""
        kind = index.input_type or NODE
        out = self._sample(kind, index.node.numpy())
        out.metadata = (index.input_id, index.time)
        if self.hetero:
            return out
        return SamplerOutput(
            node=out.node[NODE],
            row=out.row[EDGE],
            col=out.col[EDGE],
            edge=out.edge[EDGE],
            num_sampled_nodes=out.num_sampled_nodes[NODE],
            num_sampled_edges=out.num_sampled_edges[EDGE],
            metadata=out.metadata,
        )

    def sample_from_edges(self, *_: Any, **__: Any) -> Any:
        """Not needed here."""
        raise NotImplementedError

    def _sample(self, kind: str, seeds: np.ndarray[Any, Any]) -> HeteroSamplerOutput:
        rng = np.random.default_rng(int(seeds.sum()))
        nodes: dict[str, list[int]] = {name: [] for name in self.num_nodes}
        place: dict[str, dict[int, int]] = {name: {} for name in self.num_nodes}

        def place_of(name: str, node: int) -> int:
            found = place[name].setdefault(node, len(nodes[name]))
            if found == len(nodes[name]):
                nodes[name].append(node)
            return found

        for seed in seeds.tolist():
            place_of(kind, seed)
        edges: dict[Any, list[tuple[int, int, int]]] = {key: [] for key in self.incoming}
        counts = {name: [len(nodes[name])] for name in nodes}
        edge_counts: dict[Any, list[int]] = {key: [] for key in self.incoming}
        done = dict.fromkeys(nodes, 0)
        for count in self.num_neighbors:
            known = {name: len(nodes[name]) for name in nodes}
            for key, incoming in self.incoming.items():
                before = len(edges[key])
                for local in range(done[key[2]], known[key[2]]):
                    for at in incoming.sample(nodes[key[2]][local], count, rng):
                        source = place_of(key[0], int(incoming.src[at]))
                        edges[key].append((source, local, int(incoming.edge[at])))
                edge_counts[key].append(len(edges[key]) - before)
            for name in nodes:
                counts[name].append(len(nodes[name]) - known[name])
            done = known
        columns = {
            key: torch.tensor(found, dtype=torch.long).view(-1, 3).t().contiguous()
            for key, found in edges.items()
        }
        return HeteroSamplerOutput(
            node={name: torch.tensor(found, dtype=torch.long) for name, found in nodes.items()},
            row={key: column[0] for key, column in columns.items()},
            col={key: column[1] for key, column in columns.items()},
            edge={key: column[2] for key, column in columns.items()},
            num_sampled_nodes=counts,
            num_sampled_edges=edge_counts,
        )


def graph(nodes: int = 300, edges: int = 2400, width: int = 6, seed: int = 0) -> Data:
    """A random graph with features, edge features and classes."""
    g = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(nodes, width, generator=g),
        edge_index=torch.randint(nodes, (2, edges), generator=g),
        edge_attr=torch.rand(edges, 3, generator=g),
        y=torch.randint(4, (nodes,), generator=g),
    )


def hetero_graph(seed: int = 0) -> HeteroData:
    """Users, items and tags, with five relations between them."""
    g = torch.Generator().manual_seed(seed)
    data = HeteroData()
    for name, count, width in (("user", 120, 6), ("item", 200, 5), ("tag", 30, 4)):
        data[name].x = torch.randn(count, width, generator=g)

    def edges(src: int, dst: int, count: int) -> Tensor:
        return torch.stack([torch.randint(n, (count,), generator=g) for n in (src, dst)])

    data["user", "likes", "item"].edge_index = edges(120, 200, 900)
    data["item", "liked_by", "user"].edge_index = data["user", "item"].edge_index.flip(0)
    data["user", "knows", "user"].edge_index = edges(120, 120, 400)
    data["tag", "on", "item"].edge_index = edges(30, 200, 350)
    data["item", "has", "tag"].edge_index = data["tag", "item"].edge_index.flip(0)
    return data


def molecules(count: int = 40, seed: int = 0) -> list[Data]:
    """Small graphs of 1 to 12 nodes, some without an edge."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        nodes = int(torch.randint(1, 13, (), generator=g))
        bonds = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
        found.append(
            Data(
                x=torch.randn(nodes, 6, generator=g),
                edge_index=torch.cat([bonds, bonds.flip(0)], dim=1),
                edge_attr=torch.rand(2 * (nodes - 1), 3, generator=g),
                y=torch.randn(1, generator=g),
            )
        )
    return found
