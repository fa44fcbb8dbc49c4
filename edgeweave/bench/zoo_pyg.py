"""More layers and models of PyG in the zoo: those with positions, kinds, readouts or own inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from edgeweave.bench.zoo_layers import WIDTH, Made, Stack, random_graph

__all__ = ["MORE"]


def _nn() -> Any:
    import torch_geometric.nn

    return torch_geometric.nn


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


def _molecules(quick: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges and graph of each node: rings of 20 atoms with a bond across."""
    graphs, size = (10 if quick else 500), 20
    ring = torch.arange(size)
    bonds = torch.stack([ring, (ring + 1) % size])
    bonds = torch.cat([bonds, torch.tensor([[0], [size // 2]])], dim=1)
    one = torch.cat([bonds, bonds.flip(0)], dim=1)
    start = size * torch.arange(graphs)
    edges = (one[:, None, :] + start[None, :, None]).reshape(2, -1)
    return torch.randn(graphs * size, WIDTH), edges, torch.arange(graphs).repeat_interleave(size)


def _call(model: nn.Module, *args: Any) -> Made:
    return model, (args, {})


# ---- layers --------------------------------------------------------------------------------------


def _gcn2(quick: bool) -> Made:
    x, edges = random_graph(quick)
    return _call(Stack(lambda: _nn().GCN2Conv(WIDTH, 0.1)), x, x.sin(), edges)


def _fa(quick: bool) -> Made:
    x, edges = random_graph(quick)
    return _call(Stack(lambda: _nn().FAConv(WIDTH)), x, x.sin(), edges)


def _hypergraph(quick: bool) -> Made:
    x, edges = random_graph(quick)
    # About 15 nodes in each of as many hyperedges as there are nodes.
    return _call(Stack(lambda: _nn().HypergraphConv(WIDTH, WIDTH)), x, edges)


def _with_positions(layer: Callable[[], nn.Module]) -> Callable[[bool], Made]:
    def make(quick: bool) -> Made:
        x, edges = random_graph(quick)
        return _call(Stack(layer), x, torch.randn(x.shape[0], 3), edges)

    return make


def _ppf(quick: bool) -> Made:
    x, edges = random_graph(quick)
    pos, normal = torch.randn(2, x.shape[0], 3).unbind()
    return _call(Stack(lambda: _nn().PPFConv(_mlp(WIDTH + 4, WIDTH))), x, pos, normal, edges)


def _with_attributes(layer: Callable[[], nn.Module], size: int = 4) -> Callable[[bool], Made]:
    def make(quick: bool) -> Made:
        x, edges = random_graph(quick)
        return _call(Stack(layer), x, edges, torch.rand(edges.shape[1], size))

    return make


def _nnconv(quick: bool) -> Made:
    x, edges = random_graph(quick)
    # A matrix for each edge: 8 by 8, or they would fill gigabytes.
    layer = lambda: _nn().NNConv(8, 8, nn.Linear(4, 64))  # noqa: E731
    return _call(Stack(layer), x[:, :8].contiguous(), edges, torch.rand(edges.shape[1], 4))


def _rgat(quick: bool) -> Made:
    x, edges = random_graph(quick)
    kinds = torch.randint(0, 3, (edges.shape[1],))
    return _call(Stack(lambda: _nn().RGATConv(WIDTH, WIDTH, 3)), x, edges, kinds)


def _heat(quick: bool) -> Made:
    x, edges = random_graph(quick)
    of_nodes = torch.randint(0, 3, (x.shape[0],))
    of_edges = torch.randint(0, 3, (edges.shape[1],))
    layer = lambda: _nn().HEATConv(WIDTH, WIDTH, 3, 3, 4, 4, 4)  # noqa: E731
    return _call(Stack(layer), x, edges, of_nodes, of_edges, torch.rand(edges.shape[1], 4))


class _Signed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.first = _nn().SignedConv(WIDTH, half, first_aggr=True)
        self.second = _nn().SignedConv(half, half, first_aggr=False)

    def forward(self, x: Tensor, positive: Tensor, negative: Tensor) -> Any:
        return self.second(self.first(x, positive, negative).relu(), positive, negative)


def _signed(quick: bool) -> Made:
    x, edges = random_graph(quick)
    middle = edges.shape[1] // 2
    return _call(_Signed(), x, edges[:, :middle].contiguous(), edges[:, middle:].contiguous())


def _on_graph(layer: Callable[[], nn.Module]) -> Callable[[bool], Made]:
    def make(quick: bool) -> Made:
        return _call(Stack(layer), *random_graph(quick))

    return make


def _gps(quick: bool) -> Made:
    def layer() -> nn.Module:
        conv: nn.Module = _nn().GPSConv(WIDTH, _nn().GINConv(nn.Linear(WIDTH, WIDTH)), heads=4)
        return conv

    return _call(Stack(layer), *_molecules(quick))


def _dna(quick: bool) -> Made:
    x, edges = random_graph(quick)
    return _call(_nn().DNAConv(WIDTH, heads=4), torch.stack([x, x.sin(), x.cos()], dim=1), edges)


def _kinds(quick: bool) -> tuple[dict[str, Tensor], dict[tuple[str, str, str], Tensor]]:
    nodes, edges = (200, 1_000) if quick else (10_000, 100_000)
    x = {"paper": torch.randn(nodes, WIDTH), "author": torch.randn(nodes, WIDTH)}
    kinds = (("author", "writes", "paper"), ("paper", "by", "author"), ("paper", "cites", "paper"))
    return x, {kind: torch.randint(0, nodes, (2, edges)) for kind in kinds}


def _hgt(quick: bool) -> Made:
    x, edges = _kinds(quick)
    return _call(_nn().HGTConv(WIDTH, WIDTH, (list(x), list(edges)), heads=4), x, edges)


def _han(quick: bool) -> Made:
    x, edges = _kinds(quick)
    return _call(_nn().HANConv(WIDTH, WIDTH, (list(x), list(edges)), heads=4), x, edges)


def _hetero(quick: bool) -> Made:
    x, edges = _kinds(quick)
    convs = {kind: _nn().SAGEConv((WIDTH, WIDTH), WIDTH) for kind in edges}
    return _call(_nn().HeteroConv(convs), x, edges)


def _dense(cls: str, **more: Any) -> Callable[[bool], Made]:
    def make(quick: bool) -> Made:
        graphs, nodes = (4, 10) if quick else (32, 100)
        adjacency = (torch.rand(graphs, nodes, nodes) < 0.2).float()
        x = torch.randn(graphs, nodes, WIDTH)
        return _call(Stack(lambda: getattr(_nn(), cls)(WIDTH, WIDTH, **more)), x, adjacency)

    return make


# ---- models --------------------------------------------------------------------------------------


class _Distances(nn.Module):
    """Edges that are known, with their lengths: finding neighbours is not what is measured."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        edges: Any = self.edges
        return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)


def _schnet(quick: bool) -> Made:
    x, edges, batch = _molecules(quick)
    model = _nn().SchNet(WIDTH, WIDTH, 2, 16, interaction_graph=_Distances(edges))
    return _call(model, torch.randint(1, 20, (x.shape[0],)), torch.randn(x.shape[0], 3), batch)


def _lightgcn(quick: bool) -> Made:
    x, edges = random_graph(quick)
    return _call(_nn().LightGCN(x.shape[0], WIDTH, 2), edges)


def _attentive(quick: bool) -> Made:
    x, edges, batch = _molecules(quick)
    model = _nn().AttentiveFP(WIDTH, WIDTH, 1, edge_dim=4, num_layers=2, num_timesteps=2)
    return _call(model, x, edges, torch.rand(edges.shape[1], 4), batch)


def _linkx(quick: bool) -> Made:
    x, edges = random_graph(quick)
    return _call(_nn().LINKX(x.shape[0], WIDTH, WIDTH, WIDTH, num_layers=2), x, edges)


def _fingerprint(quick: bool) -> Made:
    return _call(_nn().NeuralFingerprint(WIDTH, WIDTH, 10, num_layers=2), *_molecules(quick))


def _pmlp(quick: bool) -> Made:
    return _call(_nn().PMLP(WIDTH, WIDTH, WIDTH, 2), *random_graph(quick))


def _polynormer(quick: bool) -> Made:
    x, edges, batch = _molecules(quick)
    model = _nn().Polynormer(WIDTH, WIDTH, 10, local_layers=2, global_layers=1)
    return _call(model, x, edges, batch)


def _sgformer(quick: bool) -> Made:
    return _call(_nn().SGFormer(WIDTH, WIDTH, 10), *_molecules(quick))


def _rect(quick: bool) -> Made:
    return _call(_nn().RECT_L(WIDTH, WIDTH), *random_graph(quick))


def _deepgcn(quick: bool) -> Made:
    def layer() -> nn.Module:
        conv = _nn().GENConv(WIDTH, WIDTH)
        block: nn.Module = _nn().DeepGCNLayer(conv, nn.LayerNorm(WIDTH), nn.ReLU())
        return block

    return _call(Stack(layer), *random_graph(quick))


def _unet(quick: bool) -> Made:
    # It squares adjacency matrices: of one large graph they would fill.
    return _call(_nn().GraphUNet(WIDTH, WIDTH, WIDTH, depth=2), *_molecules(quick))


class _Edges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = _mlp(2 * WIDTH + 8, 4)

    def forward(self, src: Tensor, dst: Tensor, attr: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        out: Tensor = self.mlp(torch.cat([src, dst, attr, u[batch]], dim=1))
        return out


class _Nodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = _mlp(WIDTH + 8, WIDTH)

    def forward(
        self, x: Tensor, edge_index: Tensor, attr: Tensor, u: Tensor, batch: Tensor
    ) -> Tensor:
        from torch_geometric.utils import scatter

        gathered = scatter(attr, edge_index[1], dim=0, dim_size=x.shape[0], reduce="mean")
        out: Tensor = self.mlp(torch.cat([x, gathered, u[batch]], dim=1))
        return out


def _meta(quick: bool) -> Made:
    x, edges, batch = _molecules(quick)
    u = torch.randn(int(batch[-1]) + 1, 4)
    model = _nn().MetaLayer(_Edges(), _Nodes())
    return _call(model, x, edges, torch.rand(edges.shape[1], 4), u, batch)


class _Classifier(nn.Module):
    """GIN, a readout, a linear layer."""

    def __init__(self, readout: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.conv = _nn().GINConv(_mlp(WIDTH, WIDTH))
        self.readout, self.head = readout, nn.Linear(width, 10)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Any:
        return self.head(self.readout(self.conv(x, edges).relu(), batch))


def _readout(make: Callable[[], nn.Module], width: int = WIDTH) -> Callable[[bool], Made]:
    return lambda quick: _call(_Classifier(make(), width), *_molecules(quick))


class _Pooled(nn.Module):
    """Half of the nodes stay, then the mean of each graph."""

    def __init__(self, cls: str) -> None:
        super().__init__()
        self.conv = _nn().GraphConv(WIDTH, WIDTH)
        self.pool = getattr(_nn(), cls)(WIDTH, ratio=0.5)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Any:
        x = self.conv(x, edges).relu()
        x, _, _, batch, _, _ = self.pool(x, edges, batch=batch)
        return self.head(_nn().global_mean_pool(x, batch))


MORE: dict[str, Callable[[bool], Made]] = {
    "GCN2Conv": _gcn2,
    "FAConv": _fa,
    "HypergraphConv": _hypergraph,
    "PointNetConv": _with_positions(lambda: _nn().PointNetConv(_mlp(WIDTH + 3, WIDTH))),
    "PointTransformerConv": _with_positions(lambda: _nn().PointTransformerConv(WIDTH, WIDTH)),
    "PointGNNConv": _with_positions(
        lambda: _nn().PointGNNConv(_mlp(WIDTH, 3), _mlp(WIDTH + 3, WIDTH), _mlp(WIDTH, WIDTH))
    ),
    "PPFConv": _ppf,
    "GMMConv": _with_attributes(lambda: _nn().GMMConv(WIDTH, WIDTH, 3, 4), 3),
    "GINEConv": _with_attributes(lambda: _nn().GINEConv(_mlp(WIDTH, WIDTH), edge_dim=4)),
    "NNConv": _nnconv,
    "RGATConv": _rgat,
    "HEATConv": _heat,
    "SignedConv": _signed,
    "AntiSymmetricConv": _on_graph(lambda: _nn().AntiSymmetricConv(WIDTH)),
    "DirGNNConv": _on_graph(lambda: _nn().DirGNNConv(_nn().SAGEConv(WIDTH, WIDTH))),
    "WLConvContinuous": _on_graph(lambda: _nn().WLConvContinuous()),
    "GPSConv": _gps,
    "DNAConv": _dna,
    "HGTConv": _hgt,
    "HANConv": _han,
    "HeteroConv": _hetero,
    "DenseGCNConv": _dense("DenseGCNConv"),
    "DenseGATConv": _dense("DenseGATConv", heads=4, concat=False),
    "SchNet": _schnet,
    "LightGCN": _lightgcn,
    "AttentiveFP": _attentive,
    "LINKX": _linkx,
    "NeuralFingerprint": _fingerprint,
    "PMLP": _pmlp,
    "Polynormer": _polynormer,
    "SGFormer": _sgformer,
    "RECT-L": _rect,
    "DeepGCNLayer": _deepgcn,
    "GraphUNet": _unet,
    "MetaLayer": _meta,
    "Set2Set": _readout(lambda: _nn().Set2Set(WIDTH, 2), 2 * WIDTH),
    "AttentionalAggregation": _readout(lambda: _nn().AttentionalAggregation(nn.Linear(WIDTH, 1))),
    "SoftmaxAggregation": _readout(lambda: _nn().SoftmaxAggregation(learn=True)),
    "SortAggregation": _readout(lambda: _nn().SortAggregation(5), 5 * WIDTH),
    "TopKPooling": lambda quick: _call(_Pooled("TopKPooling"), *_molecules(quick)),
    "SAGPooling": lambda quick: _call(_Pooled("SAGPooling"), *_molecules(quick)),
}
"""From an entry's name to what makes it; the argument is whether small inputs are wanted."""
