"""Every layer that `torch_geometric.nn.conv` exports, with arguments and inputs to run it on.

One table for the test that compares each with stock PyG and for the page of the documentation that
`scripts/list_pyg_layers.py` writes. A layer has one case or several: with other options, or with
sources and destinations of different kinds. `_layer_marks.py` has what is fused of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _layer_inputs import DIM, EDGE_TYPES, METADATA, NODE_TYPES, OUT, RELATIONS, WIDTH, Inputs
from torch import Tensor, nn
from torch_geometric.nn import conv

F, O = WIDTH, OUT  # noqa: E741

# Layers that need a package which cannot be had for a CPU, or is not on the package index.
UNAVAILABLE: dict[str, str] = {
    "CuGraphSAGEConv": "pylibcugraphops, which needs an NVIDIA GPU",
    "CuGraphGATConv": "pylibcugraphops, which needs an NVIDIA GPU",
    "CuGraphRGCNConv": "pylibcugraphops, which needs an NVIDIA GPU",
    "FusedGATConv": "dgNN, which needs an NVIDIA GPU",
    "PANConv": "torch_sparse, which has to be compiled for each torch",
}


@dataclass(frozen=True)
class Case:
    """One way to build and call a layer.

    Attributes:
        layer: Name that PyG exports.
        make: Builds the layer; takes `flow` if `flows`.
        inputs: Positional arguments of the call.
        option: What tells this case from the layer's first.
        flows: Whether the layer takes `flow`, and means something with both.
        call: Calls the layer, if not by `layer(*inputs)`.
    """

    layer: str
    make: Callable[..., nn.Module]
    inputs: Callable[[Inputs], tuple[Any, ...]]
    option: str = ""
    flows: bool = True
    call: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """The layer, and what is special about this case."""
        return f"{self.layer}, {self.option}" if self.option else self.layer


class Plain(conv.MessagePassing):
    """A layer of one's own that changes nothing: the base class alone cannot be called."""

    def __init__(self, **flow: str) -> None:
        super().__init__(**flow)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Sum the neighbours."""
        return self.propagate(edge_index, x=x)


def mlp(*sizes: int) -> nn.Module:
    """Linear layers with activations between them, the last without.

    ELU has no kink at which rounding could choose a side.
    """
    layers: list[nn.Module] = []
    for size, following in itertools.pairwise(sizes):
        layers += [nn.Linear(size, following), nn.ELU()]
    return nn.Sequential(*layers[:-1])


def degrees() -> Tensor:
    """Histogram of the degrees that PNA scales by."""
    return torch.tensor([4, 3, 3, 4, 3, 3, 2, 1, 1])


def _case(layer: str, *arguments: Any, at: str, option: str = "", **rest: Any) -> Case:
    """A case whose layer is `cls(*arguments, **rest)`, called with the named inputs."""
    flows = rest.pop("flows", "across" not in at)
    call = rest.pop("call", None)
    names = at.split()

    def make(**flow: str) -> nn.Module:
        built = [a() if callable(a) else a for a in arguments]
        named = {key: value() if callable(value) else value for key, value in rest.items()}
        return getattr(conv, layer)(*built, **named, **flow)

    return Case(
        layer, make, lambda g: tuple(getattr(g, name) for name in names), option, flows, call
    )


def _two(layer: str, *arguments: Any, at: str = "pair across", **rest: Any) -> Case:
    return _case(layer, *arguments, at=at, option="two kinds of nodes", **rest)


PLAIN = "x edges"
WEIGHTED = "x edges weight"
ATTRIBUTED = "x edges attr"
TYPED = "x edges edge_type"

CASES: tuple[Case, ...] = (
    Case("MessagePassing", Plain, lambda g: (g.x, g.edges)),
    _case("SimpleConv", at=WEIGHTED),
    _two("SimpleConv", aggr="max"),
    _case("GCNConv", F, O, at=PLAIN),
    _case("GCNConv", F, O, at=WEIGHTED, option="edge weights"),
    _case("ChebConv", F, O, 3, at=WEIGHTED),
    _case("SAGEConv", F, O, at=PLAIN),
    _case("SAGEConv", F, O, at=PLAIN, option="aggr='max'", aggr="max"),
    _case(
        "SAGEConv", F, O, at=PLAIN, option="four aggregations", aggr=["mean", "max", "min", "std"]
    ),
    _case("SAGEConv", F, O, at=PLAIN, option="aggr='median'", aggr="median"),
    _two("SAGEConv", (F, F), O),
    _case("GraphConv", F, O, at=WEIGHTED),
    _two("GraphConv", (F, F), O),
    _case("GravNetConv", F, O, 3, 5, 4, at="x", flows=False),
    _case("GatedGraphConv", O, 2, at=WEIGHTED),
    _case("ResGatedGraphConv", F, O, at=PLAIN),
    _case("ResGatedGraphConv", F, O, at=ATTRIBUTED, option="edge features", edge_dim=DIM),
    _two("ResGatedGraphConv", (F, F), O),
    _case("GATConv", F, O, 2, at=PLAIN),
    _case("GATConv", F, O, 2, at=ATTRIBUTED, option="edge features", edge_dim=DIM),
    _two("GATConv", (F, F), O, 2, add_self_loops=False),
    _case("GATv2Conv", F, O, 2, at=PLAIN),
    _case("GATv2Conv", F, O, 2, at=ATTRIBUTED, option="edge features", edge_dim=DIM),
    _two("GATv2Conv", (F, F), O, 2, add_self_loops=False),
    _case("TransformerConv", F, O, 2, at=PLAIN),
    _case("TransformerConv", F, O, 2, at=ATTRIBUTED, option="edge features", edge_dim=DIM),
    _two("TransformerConv", (F, F), O, 2),
    _case("AGNNConv", at=PLAIN),
    _case("TAGConv", F, O, 2, at=WEIGHTED),
    _case("GINConv", lambda: mlp(F, O, O), at=PLAIN),
    _case("GINConv", lambda: mlp(F, O, O), at=PLAIN, option="train_eps", train_eps=True),
    _two("GINConv", lambda: mlp(F, O, O)),
    _case("GINEConv", lambda: mlp(F, O, O), at=ATTRIBUTED, edge_dim=DIM),
    _two("GINEConv", lambda: mlp(F, O, O), at="pair across attr", edge_dim=DIM),
    _case("ARMAConv", F, O, 2, 2, at=WEIGHTED),
    _case("SGConv", F, O, 2, at=WEIGHTED),
    _case("SSGConv", F, O, 0.2, 2, at=WEIGHTED),
    _case("APPNP", 2, 0.1, at=WEIGHTED),
    _case("MFConv", F, O, 4, at=PLAIN),
    _two("MFConv", (F, F), O, 4),
    _case("RGCNConv", F, O, RELATIONS, at=TYPED),
    _case("RGCNConv", F, O, RELATIONS, 2, at=TYPED, option="bases"),
    _case("RGCNConv", F, O, RELATIONS, None, 2, at=TYPED, option="blocks"),
    _two("RGCNConv", (F, F), O, RELATIONS, at="pair across edge_type"),
    _case("FastRGCNConv", F, O, RELATIONS, at=TYPED),
    _case("FastRGCNConv", F, O, RELATIONS, 2, at=TYPED, option="bases"),
    _two("FastRGCNConv", (F, F), O, RELATIONS, at="pair across edge_type"),
    _case("RGATConv", F, O, RELATIONS, at=TYPED + " attr", heads=2, edge_dim=DIM),
    _case("SignedConv", F, O, True, at="x edges simple"),
    _case("SignedConv", F, O, True, at="pair across across", option="two kinds of nodes"),
    _case("DNAConv", O, 2, 2, at="history edges weight"),
    _case("PointNetConv", lambda: mlp(F + 3, O, O), lambda: mlp(O, O), at="x pos edges"),
    _case("GMMConv", F, O, DIM, 4, at=ATTRIBUTED),
    _two("GMMConv", (F, F), O, DIM, 4, at="pair across attr"),
    _case("SplineConv", F, O, DIM, 3, at=ATTRIBUTED),
    _two("SplineConv", (F, F), O, DIM, 3, at="pair across attr"),
    _case("NNConv", F, O, lambda: mlp(DIM, 5, F * O), at=ATTRIBUTED),
    _two("NNConv", (F, F), O, lambda: mlp(DIM, 5, F * O), at="pair across attr"),
    _case("CGConv", F, DIM, at=ATTRIBUTED),
    _two("CGConv", (F, F), DIM, at="pair across attr"),
    _case("EdgeConv", lambda: mlp(2 * F, O, O), at=PLAIN),
    _case("EdgeConv", lambda: mlp(2 * F, O, O), at=PLAIN, option="aggr='mean'", aggr="mean"),
    _two("EdgeConv", lambda: mlp(2 * F, O, O)),
    _case("DynamicEdgeConv", lambda: mlp(2 * F, O, O), 4, at="x", flows=False),
    _case("XConv", F, O, DIM, 4, 5, at="x pos", flows=False),
    _case(
        "PPFConv", lambda: mlp(F + 4, O, O), None, False, at="x pos normal simple"
    ),  # the angle of a loop has no derivative
    _case("FeaStConv", F, O, 2, at=PLAIN),
    _two("FeaStConv", F, O, 2, False),
    _case("PointTransformerConv", F, O, at="x pos edges"),
    _case("HypergraphConv", F, O, at="x members", flows=False),
    _case("LEConv", F, O, at=WEIGHTED),
    _two("LEConv", (F, F), O, at="pair across weight"),
    _case(
        "PNAConv",
        F,
        O,
        ["mean", "min", "max", "std"],
        ["identity", "amplification", "attenuation"],
        degrees,
        at=PLAIN,
    ),
    _case(
        "PNAConv",
        F,
        O,
        ["mean", "min", "max", "std"],
        ["identity", "amplification", "attenuation"],
        degrees,
        DIM,
        2,
        at=ATTRIBUTED,
        option="edge features and towers",
    ),
    _case("ClusterGCNConv", F, O, at=PLAIN),
    _case("GENConv", F, O, at=PLAIN),
    _case(
        "GENConv",
        F,
        O,
        "powermean",
        at=ATTRIBUTED,
        option="power mean of edge features",
        edge_dim=DIM,
        learn_p=True,
        p=2.0,
    ),
    _two("GENConv", (F, F), O),
    _case("GCN2Conv", F, 0.1, at="x x0 edges weight"),
    _case("WLConv", at="colors edges", flows=False),
    _case("WLConvContinuous", at=WEIGHTED),
    _case("FiLMConv", F, O, at=PLAIN),
    _case("FiLMConv", F, O, RELATIONS, at=TYPED, option="relations"),
    _two("FiLMConv", (F, F), O),
    _case(
        "SuperGATConv",
        F,
        O,
        2,
        at="x edges negative",
        call=lambda layer, *args: (layer(*args), layer.get_attention_loss()),
    ),
    _case("FAConv", F, at="x x0 edges"),
    _case("EGConv", F, O, at=PLAIN),
    _case("EGConv", F, O, ["sum", "max", "var"], at=PLAIN, option="three aggregations"),
    _case("PDNConv", F, O, DIM, 5, at=ATTRIBUTED),
    _case("GeneralConv", F, O, at=PLAIN),
    _case(
        "GeneralConv",
        F,
        O,
        DIM,
        at=ATTRIBUTED,
        option="attention over edge features",
        attention=True,
        heads=2,
    ),
    _two("GeneralConv", (F, F), O),
    _case("HGTConv", NODE_TYPES, O, METADATA, 2, at="x_dict edge_dict", flows=False),
    _case("HEATConv", F, O, 2, RELATIONS, 3, DIM, 3, 2, at="x edges node_type edge_type attr"),
    _case(
        "HeteroConv",
        lambda: {
            EDGE_TYPES[0]: conv.SAGEConv(F, O),
            EDGE_TYPES[1]: conv.GATConv((F, F), O, add_self_loops=False),
            EDGE_TYPES[2]: conv.GraphConv((F, F), O, aggr="max"),
        },
        at="x_dict edge_dict",
        flows=False,
    ),
    _case("HANConv", NODE_TYPES, O, METADATA, 2, at="x_dict edge_dict", flows=False),
    _case("LGConv", at=WEIGHTED),
    _case(
        "PointGNNConv",
        lambda: mlp(F, 3),
        lambda: mlp(F + 3, O, O),
        lambda: mlp(O, F),
        at="x pos edges",
    ),
    _case("GPSConv", F, lambda: conv.GINConv(mlp(F, O, F)), 2, at="x edges batch", flows=False),
    _case("AntiSymmetricConv", F, at=PLAIN, flows=False),
    _case("DirGNNConv", lambda: conv.SAGEConv(F, O), at=PLAIN, flows=False),
    _case("MixHopConv", F, O, at=WEIGHTED),
    _case("MeshCNNConv", F, O, at="x mesh", flows=False),
)
