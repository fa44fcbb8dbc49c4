"""Layers and basic models of PyG in the zoo: those called with features, edges and little else."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BASIC", "WIDTH", "Made", "Stack", "random_graph"]

Made = tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]
"""A model and the arguments of a call."""

WIDTH = 32
_DEGREES = (0, 5, 20, 60, 90, 80, 40, 20, 10, 5)


class Stack(nn.Module):
    """Two of a layer with a ReLU between them.

    Args:
        layer: Makes the layer.
    """

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x: Tensor, *rest: Any) -> Any:
        """Features after both layers; what else the layers take is the same for both."""
        return self.second(self.first(x, *rest).relu(), *rest)


def random_graph(quick: bool) -> tuple[Tensor, Tensor]:
    """Features `[N, WIDTH]` and edges `[2, E]` of a graph of 20,000 nodes, or of 500."""
    nodes, edges = (500, 3_000) if quick else (20_000, 300_000)
    return torch.randn(nodes, WIDTH), torch.randint(0, nodes, (2, edges))


# Layer, its arguments, and what a call gets beside features and edges.
_LAYERS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "GCNConv": ("GCNConv", (WIDTH, WIDTH), {}, ""),
    "GCNConv, weighted": ("GCNConv", (WIDTH, WIDTH), {}, "weight"),
    "GCNConv without self-loops": ("GCNConv", (WIDTH, WIDTH), {"add_self_loops": False}, ""),
    "SAGEConv": ("SAGEConv", (WIDTH, WIDTH), {}, ""),
    "SAGEConv, max": ("SAGEConv", (WIDTH, WIDTH), {"aggr": "max"}, ""),
    "SAGEConv, projected": ("SAGEConv", (WIDTH, WIDTH), {"project": True}, ""),
    "GraphConv": ("GraphConv", (WIDTH, WIDTH), {}, ""),
    "GraphConv, weighted": ("GraphConv", (WIDTH, WIDTH), {}, "weight"),
    "GATConv": ("GATConv", (WIDTH, WIDTH // 4), {"heads": 4}, ""),
    "GATv2Conv": ("GATv2Conv", (WIDTH, WIDTH // 4), {"heads": 4}, ""),
    "TransformerConv": ("TransformerConv", (WIDTH, WIDTH // 4), {"heads": 4}, ""),
    "SuperGATConv": ("SuperGATConv", (WIDTH, WIDTH // 4), {"heads": 4}, ""),
    "TAGConv": ("TAGConv", (WIDTH, WIDTH), {}, ""),
    "SGConv": ("SGConv", (WIDTH, WIDTH), {"K": 2}, ""),
    "SSGConv": ("SSGConv", (WIDTH, WIDTH), {"alpha": 0.1, "K": 2}, ""),
    "APPNP": ("APPNP", (), {"K": 3, "alpha": 0.1}, ""),
    "ARMAConv": ("ARMAConv", (WIDTH, WIDTH), {}, ""),
    "ChebConv": ("ChebConv", (WIDTH, WIDTH), {"K": 2}, ""),
    "ClusterGCNConv": ("ClusterGCNConv", (WIDTH, WIDTH), {}, ""),
    "LEConv": ("LEConv", (WIDTH, WIDTH), {}, ""),
    "LGConv": ("LGConv", (), {}, ""),
    "MFConv": ("MFConv", (WIDTH, WIDTH), {"max_degree": 3}, ""),
    "MixHopConv": ("MixHopConv", (WIDTH, WIDTH), {"powers": [1]}, ""),
    "GatedGraphConv": ("GatedGraphConv", (WIDTH, 2), {}, ""),
    "ResGatedGraphConv": ("ResGatedGraphConv", (WIDTH, WIDTH), {}, ""),
    "AGNNConv": ("AGNNConv", (), {}, ""),
    "GENConv": ("GENConv", (WIDTH, WIDTH), {}, ""),
    "FiLMConv": ("FiLMConv", (WIDTH, WIDTH), {}, ""),
    "EGConv": ("EGConv", (WIDTH, WIDTH), {}, ""),
    "FeaStConv": ("FeaStConv", (WIDTH, WIDTH), {}, ""),
    "GeneralConv": ("GeneralConv", (WIDTH, WIDTH), {}, ""),
    "SimpleConv": ("SimpleConv", (), {}, ""),
    "RGCNConv": ("RGCNConv", (WIDTH, WIDTH, 3), {}, "type"),
    "FastRGCNConv": ("FastRGCNConv", (WIDTH, WIDTH, 3), {}, "type"),
    "PDNConv": ("PDNConv", (WIDTH, WIDTH, 4, 8), {}, "attributes"),
    "CGConv": ("CGConv", (WIDTH,), {}, ""),
}
_NETWORKS = ("GINConv", "EdgeConv", "PNAConv")
_MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN", "PNA")


def _layer(name: str, quick: bool) -> Made:
    cls, args, kwargs, extra = _LAYERS[name]
    layer = functools.partial(getattr(importlib.import_module("torch_geometric.nn"), cls), *args)
    model = Stack(lambda: layer(**kwargs))
    x, edges = random_graph(quick)
    rest: tuple[Tensor, ...] = ()
    if extra == "weight":
        rest = (torch.rand(edges.shape[1]),)
    elif extra == "type":
        rest = (torch.randint(0, 3, (edges.shape[1],)),)
    elif extra == "attributes":
        rest = (torch.rand(edges.shape[1], 4),)
    return model, ((x, edges, *rest), {})


def _with_network(name: str, quick: bool) -> Made:
    import torch_geometric.nn as layers

    if name == "GINConv":
        model = Stack(lambda: layers.GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH))))
    elif name == "EdgeConv":
        model = Stack(lambda: layers.EdgeConv(nn.Linear(2 * WIDTH, WIDTH)))
    else:
        model = Stack(
            lambda: layers.PNAConv(
                WIDTH,
                WIDTH,
                aggregators=["mean", "min", "max", "std"],
                scalers=["identity", "amplification", "attenuation"],
                deg=torch.tensor(_DEGREES),
            )
        )
    return model, (random_graph(quick), {})


def _model(name: str, quick: bool) -> Made:
    models = importlib.import_module("torch_geometric.nn.models")
    more: dict[str, Any] = {}
    if name == "PNA":
        more = {"aggregators": ["mean", "max"], "scalers": ["identity", "attenuation"]}
        more["deg"] = torch.tensor(_DEGREES)
    return getattr(models, name)(WIDTH, WIDTH, 2, **more), (random_graph(quick), {})


def _basic() -> dict[str, Callable[[bool], Made]]:
    made: dict[str, Callable[[bool], Made]] = {}
    made.update((name, functools.partial(_layer, name)) for name in _LAYERS)
    made.update((name, functools.partial(_with_network, name)) for name in _NETWORKS)
    made.update((f"{name} model", functools.partial(_model, name)) for name in _MODELS)
    return made


BASIC = _basic()
"""From an entry's name to what makes it; the argument is whether small inputs are wanted."""
