"""Small graphs to sample from, and the benchmarks' sampler under a short name."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from edgeweave.bench.neighbor_sampler import NumpySampler

__all__ = ["NumpySampler", "graph", "hetero_graph", "molecules"]


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
