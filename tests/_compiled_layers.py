"""Stock PyG layers, two of each in a model, and what `optimize` makes of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    PNAConv,
    SAGEConv,
    TransformerConv,
)

F = 8
DEGREES = torch.tensor([1, 2, 5, 3, 2, 1])
Make = Callable[[], nn.Module]

# What each layer is, and edgeweave's ops in a compiled model of two of them.
LAYERS: dict[str, tuple[Make, dict[str, int]]] = {
    "SAGE": (lambda: SAGEConv(F, F), {"mm": 2}),
    "SAGE max": (lambda: SAGEConv(F, F, aggr="max"), {"mm": 2}),
    "SAGE against the edges": (lambda: SAGEConv(F, F, flow="target_to_source"), {"mm": 2}),
    "GIN": (lambda: GINConv(nn.Sequential(nn.Linear(F, F), nn.ReLU())), {"mm": 2}),
    "GraphConv, weighted": (lambda: GraphConv(F, F), {"mm": 2}),
    "GCN": (lambda: GCNConv(F, F), {"gcn": 2}),
    "GCN, weighted": (lambda: GCNConv(F, F), {"add_self_loops": 1, "scatter": 2, "mm": 2}),
    "GAT": (
        lambda: GATConv(F, F // 2, heads=2),
        {"add_self_loops": 1, "gather": 4, "softmax": 2, "mm": 2},
    ),
    "GATv2": (
        lambda: GATv2Conv(F, F // 2, heads=2),
        {"add_self_loops": 1, "edge_scores": 2, "softmax": 2, "mm": 2},
    ),
    "GATv2 without self-loops": (
        lambda: GATv2Conv(F, F, add_self_loops=False),
        {"edge_scores": 2, "softmax": 2, "mm": 2},
    ),
    "Transformer": (
        lambda: TransformerConv(F, F // 2, heads=2),
        {"edge_dots": 2, "softmax": 2, "mm": 2},
    ),
    "PNA": (
        lambda: PNAConv(
            F,
            F,
            aggregators=["mean", "min", "max", "std"],
            scalers=["identity", "amplification", "attenuation"],
            deg=DEGREES,
        ),
        {"edge_multi": 2, "in_degree": 2, "scatter": 2},
    ),
    "PNA, towers": (
        lambda: PNAConv(
            F,
            F,
            aggregators=["sum", "max", "var"],
            scalers=["identity", "linear"],
            deg=DEGREES,
            towers=2,
            divide_input=True,
        ),
        {"edge_multi": 2, "in_degree": 2, "scatter": 2},
    ),
    "EdgeConv": (lambda: EdgeConv(nn.Linear(2 * F, F)), {"mm": 2, "in_degree": 2}),
    # On graphs of one tile and less; `test_networks_of_edges` has larger ones.
    "EdgeConv, two layers": (
        lambda: EdgeConv(nn.Sequential(nn.Linear(2 * F, F), nn.ReLU(), nn.Linear(F, F))),
        {"gather": 4, "scatter": 2},
    ),
    "EdgeConv, mean": (
        lambda: EdgeConv(nn.Sequential(nn.Linear(2 * F, F), nn.ReLU()), aggr="mean"),
        {"gather": 4, "scatter": 2},
    ),
}


class Net(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: Tensor, edges: Tensor, *weight: Tensor) -> Tensor:
        return self.second(self.first(x, edges, *weight).relu(), edges, *weight)


def breaks() -> dict[str, int]:
    return dict(torch._dynamo.utils.counters["graph_break"])


def ops_of(record) -> dict[str, int]:
    return {name.removeprefix("edgeweave."): count for name, count in record.ops.items()}


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    x = inputs[0].clone().requires_grad_()
    out = model(x, *inputs[1:])
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return [out.detach(), *torch.autograd.grad(out, [x, *model.parameters()], upstream)]
