"""Values of edges that go through a network of their own, and their reductions, tile by tile.

`pre[e] = p[dst] + q[src] + r[e] @ w'`, then any function of rows, then a reduction into the
destinations, or none. Tiles of edges stay in the cache; backward computes them again. Nothing is
kept per edge between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .._native import ops
from ._cache import plan_for_index
from ._composite import _ends, reduce_messages
from ._functions import PlanFunction, aliases, is_batched, plan_minmax, plan_sum
from ._gather import known_rows
from ._pair import pair_messages, plan_pair, sum_at
from ._plan import Plan
from ._tiles import EdgeTile, edge_tiles

__all__ = ["Network", "network_messages", "run_network", "tiled_backward", "tiled_forward"]

# Edges of a tile: [16384, 32] float32 is 2 MiB.
_MOST_EDGES = 16384
_TILE_WIDTH = 32
# A tile of fewer is mostly overhead.
_LEAST_EDGES = 1024


@dataclass(frozen=True)
class Network:
    """A value per edge: `rest(p[dst] + q[src] + r[edge] @ w.T, *tensors)`.

    Attributes:
        q: `[num_src, H]`, contiguous.
        rest: From `[edges, H]` to `[edges, O]`, row by row. A pure function: backward calls it
            again with the tensors of forward, whatever has become of the modules they came from.
        p: `[num_dst, H]`, contiguous, or None.
        r: `[E, D]` in input order, or None.
        w: `[H, D]`; None: r is `[E, H]` and taken as it is.
        tensors: What `rest` uses and may want gradients of; one entry per use.
        width: Numbers per edge at the widest place of `rest`, if that is far more than H: tiles
            have fewer edges then.
    """

    q: Tensor
    rest: Callable[..., Tensor]
    p: Tensor | None = None
    r: Tensor | None = None
    w: Tensor | None = None
    tensors: list[Tensor] = field(default_factory=list)
    width: int = 0

    @property
    def most_edges(self) -> int:
        """Edges of a tile."""
        if self.width <= _TILE_WIDTH:
            return _MOST_EDGES
        return min(_MOST_EDGES, max(_LEAST_EDGES, _MOST_EDGES * _TILE_WIDTH // self.width))


def run_network(plan: Plan, network: Network, reduce: str | None) -> Tensor:
    """The values of edges, reduced.

    Args:
        plan: The edges.
        network: What is computed of each.
        reduce: sum, mean, amax or amin; None: no reduction.

    Returns:
        `[num_dst, O]`, or `[E, O]` in input order without a reduction.
    """
    # What fits one tile is kept for backward rather than computed again: that costs no memory to
    # speak of, and small graphs live or die by the number of calls.
    # On a GPU tiles would be launches that fill none of it.
    if plan.num_edges <= network.most_edges or plan.on_device:
        return _at_once(plan, network, reduce)
    return cast(Tensor, _TiledNetwork.apply(plan, network, reduce, *_inputs(network)))


def _at_once(plan: Plan, network: Network, reduce: str | None) -> Tensor:
    """All edges in one piece, in input order, by differentiable operations."""
    if network.p is None:
        pre: Tensor = cast(Tensor, _SourceRows.apply(plan, network.q))
    else:
        pre = plan_pair(plan, network.p, network.q, "add")
    if network.r is not None and network.w is not None:
        pre = torch.addmm(pre, network.r, network.w.t())
    elif network.r is not None:
        pre = pre + network.r
    values = network.rest(pre, *network.tensors)
    if reduce is None:
        return values
    index = plan.memo("dst_index", lambda: plan.array("dst"))
    return _reduce(plan_for_index(index, plan.num_dst, op="mm"), values.contiguous(), reduce)


class _SourceRows(PlanFunction):
    """`q[src]` for each edge, in input order."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor) -> Tensor:
        ctx.plan = plan
        _, src = _ends(plan)
        return known_rows(q, src)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, sum_at(ctx.plan, grads[0], "src")


def _inputs(network: Network) -> list[Tensor | None]:
    return [network.p, network.q, network.r, network.w, *network.tensors]


def _begin(tile: EdgeTile, network: Network) -> Tensor:
    """What `rest` is given for the edges of a tile."""
    if network.p is None:
        pre: Tensor = ops.gather_rows(network.q, tile.sources)
    else:
        pre = ops.plan_pair(tile.edges.handle, network.p[tile.rows], network.q, 0)
    if network.r is not None:
        own = network.r.index_select(0, tile.position)
        if network.w is None:
            pre += own
        else:
            pre.addmm_(own, network.w.t())
    return pre


def _reduce(groups: Plan, values: Tensor, reduce: str | None) -> Tensor:
    if reduce is None:
        return values
    if reduce in ("sum", "mean"):
        return plan_sum(groups, values, mean=reduce == "mean")
    return plan_minmax(groups, values, None, is_max=reduce == "amax", ties="even")


class _TiledNetwork(PlanFunction):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, network: Network, reduce: str | None, *inputs: Tensor | None
    ) -> Tensor:
        ctx.plan, ctx.reduce, ctx.rest, ctx.width = plan, reduce, network.rest, network.width
        # Twice: as inputs, for derivatives of derivatives, and as they are now. A leaf that is
        # saved as an input is the leaf itself, whose `.data` somebody may exchange.
        ctx.save_for_backward(*inputs, *(None if t is None else t.detach() for t in inputs))
        return tiled_forward(plan, network, reduce)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        plan, reduce, grad = ctx.plan, ctx.reduce, grads[0]
        need = ctx.needs_input_grad[3:]
        # Somebody wants the derivative of this derivative, or many gradients at once.
        if torch.is_grad_enabled() or is_batched(grad):
            inputs = saved[: len(need)]
            return None, None, None, *_backward_again(plan, ctx.rest, inputs, reduce, grad, need)
        p, q, r, w, *tensors = saved[len(need) :]
        network = Network(q, ctx.rest, p, r, w, tensors, ctx.width)
        return None, None, None, *tiled_backward(plan, network, reduce, grad, need)


def tiled_forward(plan: Plan, network: Network, reduce: str | None) -> Tensor:
    """`run_network`, tile by tile; records no gradients if the caller does not."""
    out: Tensor | None = None
    for tile in edge_tiles(plan, network.most_edges).tiles:
        values = network.rest(_begin(tile, network), *network.tensors).contiguous()
        if out is None:
            rows = plan.num_edges if reduce is None else plan.num_dst
            out = cast(Tensor, ops.empty_rows(values, rows, values.size(1)))
        if reduce is None:
            out.index_copy_(0, tile.position, values)
        else:
            out[tile.rows] = _reduce(tile.groups, values, reduce)
    if out is None:  # no destination: only the width has to be found
        out = network.rest(network.q.new_empty(0, network.q.size(1)), *network.tensors)
    return out


class Pull(Protocol):
    """Derivatives of a tile's reduced values.

    Attributes:
        sums: What the gradient of each tensor that the network uses has come to, if it is needed.
    """

    sums: list[Tensor | None]

    def __call__(
        self, tile: EdgeTile, pre: Tensor, grad: Tensor, out: Tensor | None
    ) -> Tensor | None:
        """The gradient of `pre`, from that of what `_reduce` makes; adds to `sums`.

        Args:
            tile: The edges.
            pre: What the network is given for them; may be written over.
            grad: Of the tile's rows.
            out: Where the gradient may be written.
        """
        ...


class _PullByAutograd:
    def __init__(self, network: Network, reduce: str | None, need: Sequence[bool]) -> None:
        self.rest, self.reduce = network.rest, reduce
        # Aliases: the engine must see neither the users' tensors, whose hooks it would call for
        # every tile, nor that two of these are the same.
        pairs = zip(network.tensors, need, strict=True)
        self.used = [t.detach().requires_grad_(n) for t, n in pairs]
        self.wanted = [k for k, n in enumerate(need) if n]
        self.sums: list[Tensor | None] = [None] * len(need)

    def __call__(
        self, tile: EdgeTile, pre: Tensor, grad: Tensor, out: Tensor | None
    ) -> Tensor | None:
        leaf = pre.requires_grad_()
        with torch.enable_grad():
            reduced = _reduce(tile.groups, self.rest(leaf, *self.used).contiguous(), self.reduce)
        wanted = [self.used[k] for k in self.wanted]
        made, *more = torch.autograd.grad(reduced, [leaf, *wanted], grad, allow_unused=True)
        for k, part in zip(self.wanted, more, strict=True):
            before = self.sums[k]
            self.sums[k] = part if before is None or part is None else before.add_(part)
        return made


def tiled_backward(
    plan: Plan,
    network: Network,
    reduce: str | None,
    grad: Tensor,
    need: Sequence[bool],
    pull: Pull | None = None,
    make_rows: Callable[[Tensor, int, int], Tensor] = ops.empty_rows,
) -> list[Tensor | None]:
    """Gradients of `tiled_forward` for p, q, r, w and each of the tensors, where they are needed.

    Args:
        plan: The edges.
        network: As in forward.
        reduce: As in forward.
        grad: Of the result.
        need: Whether each gradient is needed.
        pull: Derivatives of a tile; None: by autograd.
        make_rows: Makes the one tensor of `[E, H]`, uninitialised, from a tensor of its dtype and
            its two sizes.
    """
    p, q, r, w = network.p, network.q, network.r, network.w
    tiles = edge_tiles(plan, network.most_edges)
    pull = pull or _PullByAutograd(network, reduce, need[4:])
    dp = torch.empty_like(p) if p is not None and need[0] else None
    dr = torch.empty_like(r) if r is not None and need[2] else None
    dw = torch.zeros_like(w) if w is not None and need[3] else None
    # The gradients of `pre`, to be added up by source when all are there.
    kept = make_rows(q, plan.num_edges, q.size(1)) if need[1] else None
    for tile in tiles.tiles:
        pre = _begin(tile, network)
        own = grad[tile.rows] if reduce is not None else grad.index_select(0, tile.position)
        place = None if kept is None else kept[tile.span]
        d_pre = pull(tile, pre, own, place)
        d_pre = torch.zeros_like(pre) if d_pre is None else d_pre.contiguous()
        if dp is not None:
            dp[tile.rows] = plan_sum(tile.groups, d_pre)
        if dr is not None:
            dr.index_copy_(0, tile.position, d_pre if w is None else d_pre @ w)
        if dw is not None:
            assert r is not None, "w multiplies it"
            dw.addmm_(d_pre.t(), r.index_select(0, tile.position))
        if place is not None and d_pre.data_ptr() != place.data_ptr():
            place.copy_(d_pre)
    dq = None if kept is None else plan_sum(tiles.sources, kept)
    return [dp, dq, dr, dw, *(s if n else None for s, n in zip(pull.sums, need[4:], strict=True))]


def network_messages(
    network: Network, dst: Tensor, src: Tensor, num_dst: int, reduce: str | None
) -> Tensor:
    """`run_network` as plain torch operations, over all edges at once."""
    p, q, r, w = network.p, network.q, network.r, network.w
    pre = q.index_select(0, src) if p is None else pair_messages(p, q, dst, src, "add")
    if r is not None:
        pre = pre + (r if w is None else r @ w.t())
    out = network.rest(pre, *network.tensors)
    return out if reduce is None else reduce_messages(out, dst, num_dst, reduce, "even")


def _backward_again(
    plan: Plan,
    rest: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    reduce: str | None,
    grad: Tensor,
    need: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients as differentiable operations, over all edges at once."""
    dst, src = _ends(plan)
    with torch.enable_grad():
        p, q, r, w, *tensors = aliases(inputs)
        assert q is not None, "every network has one"
        network = Network(q, rest, p, r, w, cast("list[Tensor]", tensors))
        out = network_messages(network, dst, src, plan.num_dst, reduce)
        leaves = [v for v, n in zip((p, q, r, w, *tensors), need, strict=True) if n]
        found = iter(
            torch.autograd.grad(
                out, cast("list[Tensor]", leaves), grad, create_graph=True, allow_unused=True
            )
        )
    return [next(found) if n else None for n in need]
