"""Synthetic graphs of the benchmarks: deterministic by seed, made with whole-array numpy.

Three kinds, because each stresses something else:

* R-MAT: very skewed degrees and edges in no order; what graph benchmarks have used since Graph500.
* A degree-corrected block model of the size of ogbn-arxiv: communities and Pareto degrees. In
  community order neighbours are close in memory, in random order they are not.
* Batches of molecules: thousands of tiny rows, where the cost of a call decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# ogbn-arxiv: 169,343 papers, 1,157,799 citations which do not lead to the paper itself or repeat
# one seen already; as an undirected graph, twice as many edges.
ARXIV_NODES = 169_343
ARXIV_PAIRS = 1_157_799
HALF_ARXIV_NODES = 84_672
HALF_ARXIV_EDGES = 1_157_799
COMMUNITIES = 40
# Exponent of the degrees' tail. 1.7 gives the arxiv-sized graph a largest degree of several
# thousand at a mean of 13.7; the real one has 13,161.
PARETO_EXPONENT = 1.7
# Share of the edges that stay inside a community (ogbn-arxiv's edge homophily is 0.65).
HOMOPHILY = 0.65
RMAT_PROBABILITIES = (0.57, 0.19, 0.19, 0.05)

_Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GraphData:
    """A generated graph.

    Attributes:
        name: Short name for tables.
        edge_index: int64 `[2, E]`; row 0 is the source, row 1 the destination.
        num_nodes: Number of nodes, also of those without edges.
        community: int64 `[num_nodes]` class of each node, or None.
        batch: int64 `[num_nodes]` number of each node's graph in a batch of graphs, or None.
    """

    name: str
    edge_index: Tensor
    num_nodes: int
    community: Tensor | None = None
    batch: Tensor | None = None

    @property
    def num_edges(self) -> int:
        """Number of directed edges."""
        return int(self.edge_index.size(1))


def rmat(scale: int = 17, edge_factor: int = 16, seed: int = 0) -> GraphData:
    """Makes an R-MAT graph with `2**scale` nodes and `edge_factor * 2**scale` edges.

    Each bit of (source, destination) picks one quadrant of the adjacency matrix; node numbers are
    shuffled afterwards, as Graph500 does, so that the number of a node says nothing about its
    degree. Edges come in no order and may repeat.

    Args:
        scale: Binary logarithm of the number of nodes, at least 1.
        edge_factor: Edges per node, at least 1.
        seed: Seed of the generator.

    Returns:
        The graph, directed.

    Raises:
        ValueError: If `scale` or `edge_factor` is below 1.

    Example:
        >>> from edgeweave.bench.generators import rmat
        >>> graph = rmat(scale=6, edge_factor=4)
        >>> graph.num_nodes, graph.num_edges
        (64, 256)

    Source: Chakrabarti, Zhan, Faloutsos: "R-MAT: A Recursive Model for Graph Mining", SDM 2004.
    """
    _require("rmat", "scale", scale, 1)
    _require("rmat", "edge_factor", edge_factor, 1)
    rng = np.random.default_rng(seed)
    num_nodes = 1 << scale
    num_edges = edge_factor * num_nodes
    a, b, c, _ = RMAT_PROBABILITIES
    src = np.zeros(num_edges, dtype=np.int64)
    dst = np.zeros(num_edges, dtype=np.int64)
    for _ in range(scale):
        draw = rng.random(num_edges, dtype=np.float32)
        # Quadrants in the order a (0,0), b (0,1), c (1,0), d (1,1).
        src_bit = draw >= a + b
        dst_bit = ((draw >= a) & (draw < a + b)) | (draw >= a + b + c)
        src = (src << 1) | src_bit
        dst = (dst << 1) | dst_bit
    label = rng.permutation(num_nodes)
    return GraphData(f"rmat{scale}", _edge_index(label[src], label[dst]), num_nodes)


def block_model(
    num_nodes: int,
    num_draws: int,
    *,
    symmetric: bool = True,
    order: str = "community",
    communities: int = COMMUNITIES,
    seed: int = 0,
    name: str = "block-model",
) -> GraphData:
    """Makes a degree-corrected block model with Pareto degrees.

    Every node has a weight drawn from a Pareto distribution. The source of an edge is drawn with
    these weights; its destination too, with probability 0.65 from the source's community only.
    Edges come sorted by source and then destination, the order in which PyG's `to_undirected`
    and `coalesce` leave them; repeated edges stay, so that the count is exact.

    Args:
        num_nodes: Number of nodes, at least `communities`.
        num_draws: Number of drawn edges; a symmetric graph has twice as many.
        symmetric: Whether each drawn edge is added in both directions.
        order: `"community"` numbers the nodes community by community, `"random"` shuffles
            these numbers.
        communities: Number of communities, of equal size.
        seed: Seed of the generator.
        name: Name for tables.

    Returns:
        The graph with its communities.

    Raises:
        ValueError: If `order` is unknown or a size is too small.

    Example:
        >>> from edgeweave.bench.generators import block_model
        >>> graph = block_model(200, 1000, communities=4)
        >>> graph.num_edges, int(graph.community.max())
        (2000, 3)

    Source: Karrer, Newman: "Stochastic blockmodels and community structure in networks",
    Physical Review E 83, 2011.
    """
    if order not in ("community", "random"):
        raise ValueError(f"block_model: order must be 'community' or 'random', got {order!r}")
    _require("block_model", "communities", communities, 1)
    _require("block_model", "num_nodes", num_nodes, communities)
    _require("block_model", "num_draws", num_draws, 0)
    rng = np.random.default_rng(seed)
    community = np.arange(num_nodes, dtype=np.int64) * communities // num_nodes
    weight = (1.0 - rng.random(num_nodes)) ** (-1.0 / PARETO_EXPONENT)
    # edge[i] .. edge[i + 1] is node i's share of the line on which endpoints are drawn.
    edge = np.concatenate([[0.0], np.cumsum(weight)])
    src = _draw(edge, np.zeros(num_draws), np.full(num_draws, edge[-1]), rng)
    first_node = np.searchsorted(community, np.arange(communities + 1))
    low = edge[first_node[community[src]]]
    high = edge[first_node[community[src] + 1]]
    anywhere = rng.random(num_draws) >= HOMOPHILY
    low[anywhere] = 0.0
    high[anywhere] = edge[-1]
    dst = _draw(edge, low, high, rng)
    if symmetric:
        src, dst = np.concatenate([src, dst]), np.concatenate([dst, src])
    if order == "random":
        label = rng.permutation(num_nodes)
        src, dst = label[src], label[dst]
        shuffled = np.empty_like(community)
        shuffled[label] = community
        community = shuffled
    key = np.sort(src * num_nodes + dst)
    return GraphData(
        name,
        _edge_index(key // num_nodes, key % num_nodes),
        num_nodes,
        community=torch.from_numpy(community),
    )


def arxiv_sized(order: str = "community", seed: int = 0, shrink: int = 1) -> GraphData:
    """Makes the graph with the size of ogbn-arxiv: 169,343 nodes, 2,315,598 directed edges.

    Args:
        order: `"community"` or `"random"` (see `block_model`).
        seed: Seed of the generator.
        shrink: Divides both sizes, for quick runs.

    Returns:
        A symmetric graph with 40 communities.

    Example:
        >>> from edgeweave.bench.generators import arxiv_sized
        >>> arxiv_sized(shrink=100).num_nodes
        1693
    """
    return block_model(
        ARXIV_NODES // shrink, ARXIV_PAIRS // shrink, order=order, seed=seed, name=f"arxiv-{order}"
    )


def half_arxiv(seed: int = 0, shrink: int = 1) -> GraphData:
    """Makes the graph of the training rows: 84,672 nodes, 1,157,799 directed edges.

    Args:
        seed: Seed of the generator.
        shrink: Divides both sizes, for quick runs.

    Returns:
        A directed graph in random order with 40 communities.

    Example:
        >>> from edgeweave.bench.generators import half_arxiv
        >>> half_arxiv(shrink=100).num_edges
        11577
    """
    return block_model(
        HALF_ARXIV_NODES // shrink,
        HALF_ARXIV_EDGES // shrink,
        symmetric=False,
        order="random",
        seed=seed,
        name="half-arxiv",
    )


def molecule_batch(num_graphs: int = 256, seed: int = 0) -> GraphData:
    """Makes a batch of molecule-like graphs of about 18 nodes and 37 directed edges each.

    A molecule is a tree whose every atom hangs on one of the three before it, with one or two
    more bonds that close rings of five or six atoms; each bond is two directed edges.

    Args:
        num_graphs: Number of graphs, at least 1.
        seed: Seed of the generator.

    Returns:
        The batch as one graph: nodes numbered graph by graph, `batch` set.

    Raises:
        ValueError: If `num_graphs` is below 1.

    Example:
        >>> from edgeweave.bench.generators import molecule_batch
        >>> graph = molecule_batch(8)
        >>> int(graph.batch.max())
        7
    """
    _require("molecule_batch", "num_graphs", num_graphs, 1)
    rng = np.random.default_rng(seed)
    size = np.clip(np.rint(rng.normal(18.0, 4.0, num_graphs)), 8, 30).astype(np.int64)
    start = np.cumsum(size) - size
    num_nodes = int(size.sum())
    graph = np.repeat(np.arange(num_graphs), size)
    position = np.arange(num_nodes) - start[graph]
    child = np.flatnonzero(position > 0)
    parent = child - rng.integers(1, np.minimum(position[child], 3) + 1)
    # A tree of n atoms has n - 1 bonds; 1.5 rings on average bring 18 atoms to 18.5 bonds.
    ring_graph = np.repeat(np.arange(num_graphs), rng.integers(1, 3, num_graphs))
    ring_length = rng.integers(5, 7, ring_graph.size)
    ring_first = start[ring_graph] + rng.integers(0, size[ring_graph] - ring_length + 1)
    one_end = np.concatenate([child, ring_first])
    other_end = np.concatenate([parent, ring_first + ring_length - 1])
    edge_index = _edge_index(
        np.concatenate([one_end, other_end]), np.concatenate([other_end, one_end])
    )
    return GraphData("molecules", edge_index, num_nodes, batch=torch.from_numpy(graph))


def op_graphs(quick: bool = False, seed: int = 0) -> dict[str, Callable[[], GraphData]]:
    """Names the four graphs of `bench ops` with a function that makes each.

    Args:
        quick: Makes them 16 times smaller (the molecules stay as they are).
        seed: Seed of all generators.

    Returns:
        From name to generator, in the order of the tables.

    Example:
        >>> from edgeweave.bench.generators import op_graphs
        >>> list(op_graphs())
        ['rmat17', 'arxiv-community', 'arxiv-random', 'molecules']
    """
    shrink = 16 if quick else 1
    scale = 13 if quick else 17
    return {
        f"rmat{scale}": lambda: rmat(scale, seed=seed),
        "arxiv-community": lambda: arxiv_sized("community", seed, shrink),
        "arxiv-random": lambda: arxiv_sized("random", seed, shrink),
        "molecules": lambda: molecule_batch(seed=seed),
    }


def _draw(
    edge: npt.NDArray[np.float64],
    low: npt.NDArray[np.float64],
    high: npt.NDArray[np.float64],
    rng: np.random.Generator,
) -> _Int64Array:
    """Draws one node per entry, uniformly on the line between `low` and `high`."""
    point = low + rng.random(low.size) * (high - low)
    # Rounding can put a point on the line's very end.
    return np.minimum(np.searchsorted(edge, point, side="right") - 1, edge.size - 2)


def _edge_index(src: _Int64Array, dst: _Int64Array) -> Tensor:
    return torch.from_numpy(np.stack([src, dst]).astype(np.int64, copy=False))


def _require(op: str, argument: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{op}: {argument} must be at least {least}, got {value}")
