"""The models of the training rows: plain PyG, as its users write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edgeweave.bench.generators import COMMUNITIES, GraphData

NUM_LAYERS = 3
NUM_RELATIONS = 8
HEADS = 4


@dataclass(frozen=True)
class ModelSpec:
    """One training row.

    Attributes:
        name: Name in the tables.
        group: Row of the numbers table that it belongs to.
        conv: Makes a layer from (in_channels, out_channels, is_last, graph).
        channels: Width of input and hidden layers; the last layer has one output per class.
        extra: Further argument of every layer made from the graph, such as edge types, or None.
        takes_sparse_tensor: Whether the layer also runs on a `torch_sparse.SparseTensor`.
        in_default_set: Whether it runs without `--all`.
        lr: Learning rate.
        feature_scale: Factor of the input features.
    """

    name: str
    group: str
    conv: Callable[[int, int, bool, GraphData], nn.Module]
    channels: int = 128
    extra: Callable[[GraphData], Tensor] | None = None
    takes_sparse_tensor: bool = False
    in_default_set: bool = False
    lr: float = 0.01
    feature_scale: float = 1.0


class GraphNetwork(nn.Module):
    """Layers with ReLU in between; with `pool` a mean over each graph of a batch at the end.

    Args:
        convs: The layers, called as `conv(x, edge_index, *extra)`.
        pool: Whether the result is one row per graph.
        dropout: Share of the values between layers that is dropped in training.
    """

    def __init__(self, convs: list[nn.Module], pool: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.pool = pool
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Any, *extra: Tensor) -> Tensor:
        """Runs the layers.

        Args:
            x: fp32 `[N, channels]`.
            edge_index: int64 `[2, E]`, or a transposed `SparseTensor`.
            *extra: Passed on to each layer; with `pool` int64 `[N]` graph of each node.

        Returns:
            `[N, classes]`, or `[graphs, classes]` with `pool`.
        """
        passed_on = () if self.pool else extra
        for position, conv in enumerate(self.convs):
            if position:
                x = x.relu()
                if self.dropout:
                    x = nn.functional.dropout(x, self.dropout, self.training)
            x = conv(x, edge_index, *passed_on)
        if self.pool:
            from torch_geometric.nn import global_mean_pool

            x = global_mean_pool(x, extra[0])
        return x


def build_model(
    spec: ModelSpec,
    graph: GraphData,
    num_classes: int = COMMUNITIES,
    seed: int = 0,
    hidden: Sequence[int] | None = None,
    dropout: float = 0.0,
) -> GraphNetwork:
    """Makes a network with weights that depend on the seed only.

    Args:
        spec: The training row.
        graph: The graph, for layers that look at it when they are made (PNA).
        num_classes: Width of the last layer's output.
        seed: Seed of the weights.
        hidden: Width of the input of every layer; three times `spec.channels` if None.
        dropout: Share of the values between layers that is dropped in training.

    Returns:
        The network; it has a pooling end if the graph is a batch.

    Example:
        >>> from edgeweave.bench.generators import half_arxiv
        >>> from edgeweave.bench.models import MODELS, build_model
        >>> model = build_model(MODELS["GCN"], half_arxiv(shrink=500))
        >>> [tuple(conv.lin.weight.shape) for conv in model.convs]
        [(128, 128), (128, 128), (40, 128)]
    """
    torch.manual_seed(seed)
    inputs = list(hidden) if hidden is not None else [spec.channels] * NUM_LAYERS
    outputs = [*inputs[1:], num_classes]
    last = len(inputs) - 1
    convs = [spec.conv(inputs[i], outputs[i], i == last, graph) for i in range(len(inputs))]
    return GraphNetwork(convs, graph.batch is not None, dropout)


def select_models(everything: bool) -> list[ModelSpec]:
    """Lists the training rows.

    Args:
        everything: Also those which are measured only on request.

    Returns:
        Specs in table order.

    Example:
        >>> from edgeweave.bench.models import select_models
        >>> [spec.name for spec in select_models(everything=False)]
        ['GCN', 'GraphSAGE', 'GIN']
    """
    return [spec for spec in MODELS.values() if everything or spec.in_default_set]


def _perceptron(*widths: int) -> nn.Sequential:
    first, *rest = widths
    layers: list[nn.Module] = []
    for width in rest:
        layers += [nn.Linear(first, width), nn.ReLU()]
        first = width
    return nn.Sequential(*layers[:-1])


def _gcn(inputs: int, outputs: int, last: bool, graph: GraphData) -> nn.Module:
    from torch_geometric.nn import GCNConv

    conv: nn.Module = GCNConv(inputs, outputs)
    return conv


def _gcn_cached(inputs: int, outputs: int, last: bool, graph: GraphData) -> nn.Module:
    from torch_geometric.nn import GCNConv

    conv: nn.Module = GCNConv(inputs, outputs, cached=True)
    return conv


def _sage(inputs: int, outputs: int, last: bool, graph: GraphData) -> nn.Module:
    from torch_geometric.nn import SAGEConv

    conv: nn.Module = SAGEConv(inputs, outputs)
    return conv


def _gin(inputs: int, outputs: int, last: bool, graph: GraphData) -> nn.Module:
    from torch_geometric.nn import GINConv

    conv: nn.Module = GINConv(_perceptron(inputs, outputs, outputs))
    return conv


def _graph_conv(inputs: int, outputs: int, last: bool, graph: GraphData) -> nn.Module:
    from torch_geometric.nn import GraphConv

    conv: nn.Module = GraphConv(inputs, outputs)
    return conv


def _attention(layer: str) -> Callable[[int, int, bool, GraphData], nn.Module]:
    """4 heads which share the hidden width; one head in the last layer."""

    def make(inputs: int, outputs: int, last: bool, graph: GraphData) -> nn.Module:
        import torch_geometric.nn

        heads = 1 if last else HEADS
        conv: nn.Module = getattr(torch_geometric.nn, layer)(inputs, outputs // heads, heads=heads)
        return conv

    return make


def _pna(inputs: int, outputs: int, last: bool, graph: GraphData) -> nn.Module:
    from torch_geometric.nn import PNAConv

    degree = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
    conv: nn.Module = PNAConv(
        inputs,
        outputs,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity", "amplification", "attenuation"],
        deg=torch.bincount(degree),
    )
    return conv


def _rgcn(inputs: int, outputs: int, last: bool, graph: GraphData) -> nn.Module:
    from torch_geometric.nn import RGCNConv

    conv: nn.Module = RGCNConv(inputs, outputs, NUM_RELATIONS)
    return conv


def _edge_cnn(inputs: int, outputs: int, last: bool, graph: GraphData) -> nn.Module:
    from torch_geometric.nn import EdgeConv

    conv: nn.Module = EdgeConv(_perceptron(2 * inputs, outputs, outputs))
    return conv


def _edge_types(graph: GraphData) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(NUM_RELATIONS, (graph.num_edges,), generator=generator)


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("GCN", "train-gnn", _gcn, takes_sparse_tensor=True, in_default_set=True),
        # What PyG offers for a graph that never changes: the normalisation is kept by the layer.
        ModelSpec("GCN, cached=True", "train-gcn-cached", _gcn_cached),
        ModelSpec("GraphSAGE", "train-gnn", _sage, takes_sparse_tensor=True, in_default_set=True),
        # Three sums over hubs of 9,495 neighbours: from inputs of size 1 the loss starts at 32,619
        # and training amplifies rounding, so that two correct runs part within five steps.
        ModelSpec(
            "GIN",
            "train-gnn",
            _gin,
            takes_sparse_tensor=True,
            in_default_set=True,
            lr=1e-4,
            feature_scale=1e-3,
        ),
        # Sums as in GIN, and scaled as there.
        ModelSpec("GraphConv", "train-graphconv", _graph_conv, lr=1e-4, feature_scale=1e-3),
        ModelSpec("GAT", "train-attention", _attention("GATConv")),
        ModelSpec("GATv2", "train-attention", _attention("GATv2Conv")),
        ModelSpec("Transformer", "train-attention", _attention("TransformerConv")),
        ModelSpec("PNA", "train-relational", _pna, channels=32),
        ModelSpec("RGCN", "train-relational", _rgcn, extra=_edge_types),
        ModelSpec("EdgeCNN", "train-edge", _edge_cnn, channels=32),
    )
}

TEN_MODELS = (
    "GCN",
    "GraphSAGE",
    "GIN",
    "GraphConv",
    "GAT",
    "GATv2",
    "Transformer",
    "PNA",
    "EdgeCNN",
    "RGCN",
)
"""Rows that stand for PyG's layers as a whole: their geometric mean has a target of its own."""
