"""The small graph, with all that a layer may ask for, that every PyG layer is run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

NODES, OTHERS, EDGES, WIDTH, OUT = 24, 30, 96, 6, 8
RELATIONS = 3
DIM = 3
NODE_TYPES = {"a": WIDTH, "b": WIDTH}
EDGE_TYPES = [("a", "to", "a"), ("b", "to", "a"), ("a", "back", "b")]
METADATA = (list(NODE_TYPES), EDGE_TYPES)


@dataclass(frozen=True)
class Inputs:
    """A small graph with all that a layer may ask for, and a second kind of nodes.

    Edges repeat, some are loops, and some nodes have none.

    Attributes:
        x: Features of NODES nodes.
        x0: Other features of the same nodes.
        other: Features of the OTHERS nodes of the second kind.
        pos: Positions of the NODES nodes.
        other_pos: Positions of the OTHERS nodes.
        normal: Unit vectors of the NODES nodes.
        other_normal: Unit vectors of the OTHERS nodes.
        history: Features of each node in two earlier layers.
        attr: Features of the edges, between 0 and 1.
        weight: Positive weights of the edges.
        edges: EDGES edges between the NODES nodes.
        simple: The same without loops.
        negative: Edges to train attention against.
        across: EDGES edges from the OTHERS nodes to the NODES nodes.
        node_type: 0 or 1.
        edge_type: Relation of each edge.
        batch: Graph of each node.
        mesh: Four neighbours of each node, in order.
        colors: Integer colours of the nodes.
    """

    x: Tensor
    x0: Tensor
    other: Tensor
    pos: Tensor
    other_pos: Tensor
    normal: Tensor
    other_normal: Tensor
    history: Tensor
    attr: Tensor
    weight: Tensor
    edges: Tensor
    simple: Tensor
    negative: Tensor
    across: Tensor
    node_type: Tensor
    edge_type: Tensor
    batch: Tensor
    mesh: Tensor
    colors: Tensor

    @staticmethod
    def make(seed: int = 0, nodes: int = NODES, others: int = OTHERS, count: int = EDGES) -> Inputs:
        """Draw the inputs, features in float32."""
        g = torch.Generator().manual_seed(seed)
        connected = nodes - 4
        edges = torch.randint(connected, (2, count), generator=g)
        edges[:, :4] = torch.tensor([[3, 3, 7, 7], [3, 3, 9, 9]])  # loops and repeated edges
        shifted = (edges[0] + 1 + torch.randint(connected - 1, (count,), generator=g)) % connected
        across = torch.stack(
            [
                torch.randint(others - 3, (count,), generator=g),
                torch.randint(connected, (count,), generator=g),
            ]
        )

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=g)

        def whole(high: int, *size: int) -> Tensor:
            return torch.randint(high, size, generator=g)

        return Inputs(
            x=normal(nodes, WIDTH),
            x0=normal(nodes, WIDTH),
            other=normal(others, WIDTH),
            pos=normal(nodes, DIM),
            other_pos=normal(others, DIM),
            normal=nn.functional.normalize(normal(nodes, DIM), dim=1),
            other_normal=nn.functional.normalize(normal(others, DIM), dim=1),
            history=normal(nodes, 2, OUT),
            attr=torch.rand(count, DIM, generator=g),
            weight=torch.rand(count, generator=g) + 0.1,
            edges=edges,
            simple=torch.stack([edges[0], shifted]),
            negative=whole(nodes, 2, count // 2),
            across=across,
            node_type=whole(2, nodes),
            edge_type=whole(RELATIONS, count),
            batch=torch.arange(nodes) // (nodes // 2),
            mesh=torch.stack([whole(nodes, 4 * nodes), torch.arange(nodes).repeat_interleave(4)]),
            colors=whole(4, nodes),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return what a function makes of each tensor."""
        return Inputs(*(change(getattr(self, field.name)) for field in fields(self)))

    def to(self, device: str) -> Inputs:
        """Return the inputs on another device."""
        return self.map(lambda value: value.to(device))

    def detached(self) -> Inputs:
        """Return the same numbers, none of which wants a gradient."""
        return self.map(Tensor.detach)

    def leaves(self, dtype: torch.dtype) -> Inputs:
        """Return a copy whose features are leaves of a dtype that want a gradient."""

        def leaf(value: Tensor) -> Tensor:
            if value.is_floating_point():
                return value.to(dtype, copy=True).requires_grad_()
            return value.clone()

        return self.map(leaf)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Features of sources and destinations."""
        return self.other, self.x

    @property
    def members(self) -> Tensor:
        """Which of the NODES belong to which of the OTHERS, as hyperedges."""
        return self.across.flip(0)

    @property
    def x_dict(self) -> dict[str, Tensor]:
        """Features by kind of node."""
        return {"a": self.x, "b": self.other}

    @property
    def edge_dict(self) -> dict[tuple[str, str, str], Tensor]:
        """Edges by relation."""
        return dict(
            zip(
                EDGE_TYPES,
                (self.edges, self.across, self.across.flip(0)[:, : EDGES // 2]),
                strict=True,
            )
        )
