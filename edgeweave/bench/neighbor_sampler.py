"""A neighbour sampler in numpy for PyG's `NodeLoader`, and training batches made with it.

PyG's `NeighborLoader` is `NodeLoader` with a sampler that needs `pyg_lib` or `torch_sparse`. This
one gives batches of the same structure: seeds first, then the nodes of each hop in the order in
which they were met; edges hop by hop, those into the same node side by side: destinations ascend.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import (
    BaseSampler,
    HeteroSamplerOutput,
    NodeSamplerInput,
    SamplerOutput,
)

from edgeweave.bench.generators import GraphData
from edgeweave.bench.training import TrainingBatch

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
        """Places in `src` and `edge` of at most `count` edges into a node."""
        first, last = int(self.start[node]), int(self.start[node + 1])
        if last - first <= count:
            return np.arange(first, last)
        drawn = rng.choice(last - first, count, replace=False)
        return np.asarray(first + np.sort(drawn))


class NumpySampler(BaseSampler):  # type: ignore[misc]  # PyG comes without types
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


class SampledBatches:
    """Batches of a graph's nodes with their neighbourhoods, a new one for every step.

    Args:
        graph: A graph with communities, which are the classes.
        x: fp32 `[num_nodes, channels]`.
        num_neighbors: Neighbours of each node, per hop.
        batch_size: Number of seeds; their rows come first and are the ones that count.
        seed: Seed of the order of the seeds, which is another one in each epoch.

    Raises:
        ValueError: If the graph has no communities.

    Example:
        >>> import torch
        >>> from edgeweave.bench.generators import half_arxiv
        >>> from edgeweave.bench.neighbor_sampler import SampledBatches
        >>> graph = half_arxiv(shrink=500)
        >>> batches = SampledBatches(graph, torch.rand(graph.num_nodes, 4), [3, 2], batch_size=8)
        >>> batches(0).target.shape, batches(0).x.size(0) <= 8 * (1 + 3 + 3 * 2)
        (torch.Size([8]), True)
    """

    def __init__(
        self,
        graph: GraphData,
        x: Tensor,
        num_neighbors: list[int],
        batch_size: int,
        seed: int = 0,
    ) -> None:
        if graph.community is None:
            raise ValueError("SampledBatches: graph must have communities, got none")
        data = Data(x=x, edge_index=graph.edge_index, y=graph.community)
        sampler = NumpySampler(data, num_neighbors)
        self._loader = NodeLoader(data, sampler, batch_size=batch_size)
        self._num_nodes, self._batch_size, self._seed = graph.num_nodes, batch_size, seed
        # All sides ask for a step before the first one asks for the next.
        self._made = lru_cache(maxsize=1)(self._make)

    def __call__(self, step: int) -> TrainingBatch:
        """The batch of a step, in tensors that no other call returns.

        Args:
            step: Number of the step, from 0 and over as many epochs as it takes.

        Returns:
            Features and edges of the sampled graph; the classes of the seeds.
        """
        made = self._made(step)
        # No side may profit from what the other one left with a tensor.
        return TrainingBatch(
            made.x.clone(), made.edge_index.clone(), made.target.clone(), rows=made.rows
        )

    def _make(self, step: int) -> TrainingBatch:
        steps = -(-self._num_nodes // self._batch_size)
        generator = torch.Generator().manual_seed(self._seed + step // steps)
        order = torch.randperm(self._num_nodes, generator=generator)
        first = step % steps * self._batch_size
        batch: Any = self._loader(order[first : first + self._batch_size])
        count = batch.batch_size
        return TrainingBatch(batch.x, batch.edge_index, batch.y[:count], rows=slice(0, count))
