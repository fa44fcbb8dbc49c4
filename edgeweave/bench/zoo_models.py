"""The models of the zoo: PyG's layers and models, and those of `edgeweave bench inference`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edgeweave.bench.inference_models import ZOO as DENSE
from edgeweave.bench.inference_models import build as build_dense

__all__ = ["Entry", "zoo"]

WIDTH = 32
_DEGREES = (0, 5, 20, 60, 90, 80, 40, 20, 10, 5)


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        name: As in tables.
        family: `graph layer`, `graph model`, `conv`, `transformer` or `mlp`.
        make: Gives the model and the arguments of a call, `(args, kwargs)`; its argument is whether
            small inputs are wanted.
    """

    name: str
    family: str
    make: Callable[[bool], tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]]


class _TwoLayers(nn.Module):
    """Two of a layer with a ReLU between them."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x: Tensor, edge_index: Tensor, *rest: Tensor) -> Any:
        return self.second(self.first(x, edge_index, *rest).relu(), edge_index, *rest)


def _graph(quick: bool) -> tuple[Tensor, Tensor]:
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
_MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")


def _layer(name: str, quick: bool) -> Any:
    cls, args, kwargs, extra = _LAYERS[name]
    layer = functools.partial(getattr(importlib.import_module("torch_geometric.nn"), cls), *args)
    model = _TwoLayers(lambda: layer(**kwargs))
    x, edges = _graph(quick)
    rest: tuple[Tensor, ...] = ()
    if extra == "weight":
        rest = (torch.rand(edges.shape[1]),)
    elif extra == "type":
        rest = (torch.randint(0, 3, (edges.shape[1],)),)
    elif extra == "attributes":
        rest = (torch.rand(edges.shape[1], 4),)
    return model, ((x, edges, *rest), {})


def _with_network(name: str, quick: bool) -> Any:
    import torch_geometric.nn as layers

    if name == "GINConv":
        model = _TwoLayers(lambda: layers.GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH))))
    elif name == "EdgeConv":
        model = _TwoLayers(lambda: layers.EdgeConv(nn.Linear(2 * WIDTH, WIDTH)))
    else:
        model = _TwoLayers(
            lambda: layers.PNAConv(
                WIDTH,
                WIDTH,
                aggregators=["mean", "min", "max", "std"],
                scalers=["identity", "amplification", "attenuation"],
                deg=torch.tensor(_DEGREES),
            )
        )
    return model, (_graph(quick), {})


def _model(name: str, quick: bool) -> Any:
    models = importlib.import_module("torch_geometric.nn.models")
    return getattr(models, name)(WIDTH, WIDTH, 2), (_graph(quick), {})


def _dense(name: str, quick: bool) -> Any:
    return build_dense(DENSE[name], 2, quick)


def zoo() -> dict[str, Entry]:
    """The models of the zoo by name.

    Returns:
        Graph layers and models first, then conv models, transformers and perceptrons.

    Example:
        >>> from edgeweave.bench.zoo_models import zoo
        >>> zoo()["GCNConv"].family
        'graph layer'
    """
    entries = [Entry(n, "graph layer", functools.partial(_layer, n)) for n in _LAYERS]
    entries += [
        Entry(n, "graph layer", functools.partial(_with_network, n))
        for n in ("GINConv", "EdgeConv", "PNAConv")
    ]
    entries += [Entry(f"{n} model", "graph model", functools.partial(_model, n)) for n in _MODELS]
    entries += [Entry(n, e.family, functools.partial(_dense, n)) for n, e in DENSE.items()]
    return {entry.name: entry for entry in entries}
