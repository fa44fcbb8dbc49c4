"""What rewritten graphs do with values of edges that are never in memory, as registered ops.

`edge_multi` reduces the features at the other end of each edge in several ways at once; and
`edge_network` runs a network on tiles of edges, and reduces them at once. As in `_compiled`: the
ops take the edges, look the plan up inside, and return fresh tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._native import ops
from ._cache import plan_for_edges
from ._compiled import _TAGS, _fake, _impl, _library, _no_second_derivative, _rows_like
from ._edge_multi import multi_gradient
from ._edge_network import Network, tiled_backward, tiled_forward
from ._edge_program import Program, Scratch, load_program
from ._functions import accumulator_dtype, minmax_backward, plan_minmax, plan_sum
from ._multi import _WIDE_MEAN, _WIDE_STD, _bits, _results
from ._plan import Plan
from ._tiles import EdgeTile, edge_tiles

__all__ = ["make_rows_by", "registered"]

registered = ("edgeweave::edge_multi", "edgeweave::edge_network", "edgeweave::in_degree")
"""Names of the ops that importing this module registers."""

_EDGES = "Tensor edge_index, SymInt num_src, SymInt num_dst, bool flip"
_library.define(f"in_degree({_EDGES}, ScalarType dtype) -> Tensor", tags=_TAGS)
_library.define(
    "edge_multi(Tensor edge_index, Tensor x, SymInt num_dst, bool flip, str[] reduces,"
    " int correction) -> Tensor[]",
    tags=_TAGS,
)
_library.define(
    "edge_multi_backward(Tensor?[] grads, Tensor edge_index, Tensor x, Tensor[] results,"
    " SymInt num_dst, bool flip, str[] reduces, int correction) -> Tensor",
    tags=_TAGS,
)
_NETWORK = (
    "Tensor edge_index, Tensor? p, Tensor q, Tensor? r, Tensor? w, Tensor[] tensors,"
    " SymInt num_dst, bool flip, str reduce, str program, int width"
)
_library.define(f"edge_network({_NETWORK}) -> Tensor", tags=_TAGS)
_library.define(
    f"edge_network_backward(Tensor grad, {_NETWORK}, bool[] needs) -> Tensor[]", tags=_TAGS
)
_ops: Any = torch.ops.edgeweave
_REDUCES = ("sum", "mean", "amax", "amin")


_make_rows: Callable[[Tensor, int, int], Tensor] = ops.empty_rows


def make_rows_by(make: Callable[[Tensor, int, int], Tensor]) -> None:
    """Take the one large tensor of a backward pass from elsewhere than the C library.

    That hands a block of its size back to the kernel each time, and all its pages are faults.

    Args:
        make: From a tensor, and two sizes, to an uninitialised tensor of its dtype on the CPU.
    """
    global _make_rows
    _make_rows = make


def _plan_of(edge_index: Tensor, x: Tensor, num_dst: int, flip: bool) -> Plan:
    return plan_for_edges(edge_index, x.shape[0], num_dst, flip=flip, compiled=True)


# ---- degrees -------------------------------------------------------------------------------------


@_impl("in_degree")
def _in_degree(
    edge_index: Tensor, num_src: int, num_dst: int, flip: bool, dtype: torch.dtype
) -> Tensor:
    """Number of edges into each node, `[num_dst]`."""
    plan = plan_for_edges(edge_index, num_src, num_dst, flip=flip, op="in_degree", compiled=True)
    return plan.in_degree().to(dtype, copy=True)


@_fake("in_degree")
def _in_degree_fake(
    edge_index: Tensor, num_src: int, num_dst: int, flip: bool, dtype: torch.dtype
) -> Tensor:
    return edge_index.new_empty(num_dst, dtype=dtype)


# ---- several reductions --------------------------------------------------------------------------


@_impl("edge_multi")
def _edge_multi(
    edge_index: Tensor, x: Tensor, num_dst: int, flip: bool, reduces: list[str], correction: int
) -> list[Tensor]:
    """`scatter.multi_reduce` of `x[src]` into the destinations: `[num_dst, F]` each."""
    x = x.contiguous()
    plan = _plan_of(edge_index, x, num_dst, flip)
    return list(_results(plan.ops.plan_multi(plan.handle, x, _bits(reduces), correction), reduces))


@_fake("edge_multi")
def _edge_multi_fake(
    edge_index: Tensor, x: Tensor, num_dst: int, flip: bool, reduces: list[str], correction: int
) -> list[Tensor]:
    return [_rows_like(x, num_dst) for _ in reduces]


@_impl("edge_multi_backward")
def _edge_multi_backward(
    grads: list[Tensor | None],
    edge_index: Tensor,
    x: Tensor,
    results: list[Tensor],
    num_dst: int,
    flip: bool,
    reduces: list[str],
    correction: int,
) -> Tensor:
    x = x.contiguous()
    given = {n: g.contiguous() for n, g in zip(reduces, grads, strict=True) if g is not None}
    if not given:
        return torch.zeros_like(x)
    plan = _plan_of(edge_index, x, num_dst, flip)
    kept = {n: r.contiguous() for n, r in zip(reduces, results, strict=True)}
    needed = {"mean"} if "var" in given else set()
    needed |= {"mean", "std"} if "std" in given else set()
    if needed and (accumulator_dtype(x.dtype) != x.dtype or not needed <= set(kept)):
        bits = 1 << _WIDE_MEAN | 1 << _WIDE_STD
        anew = plan.ops.plan_multi(plan.handle, x, bits, correction)
        kept |= {"mean": anew[_WIDE_MEAN], "std": anew[_WIDE_STD]}
    made = multi_gradient(plan, x, given, kept, correction, x.dtype)
    return torch.zeros_like(x) if made is None else made


@_fake("edge_multi_backward")
def _edge_multi_backward_fake(
    grads: list[Tensor | None],
    edge_index: Tensor,
    x: Tensor,
    results: list[Tensor],
    num_dst: int,
    flip: bool,
    reduces: list[str],
    correction: int,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _edge_multi_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    edge_index, x, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(edge_index, x, *output)


def _edge_multi_grad(ctx: Any, grads: Any) -> tuple[Any, ...]:
    edge_index, x, *results = ctx.saved_tensors
    dx = _ops.edge_multi_backward(list(grads), edge_index, x, results, *ctx.options)
    return None, dx, None, None, None, None


torch.library.register_autograd(
    "edgeweave::edge_multi", _edge_multi_grad, setup_context=_edge_multi_setup, lib=_library
)


# ---- networks ------------------------------------------------------------------------------------


def _scratch(plan: Plan, network: Network) -> Scratch:
    tiles = edge_tiles(plan, network.most_edges).tiles
    return Scratch(max((t.span.stop - t.span.start for t in tiles), default=0))


def _network(
    p: Tensor | None,
    q: Tensor,
    r: Tensor | None,
    w: Tensor | None,
    tensors: Sequence[Tensor],
    program: str,
    width: int,
) -> Network:
    p, r = (None if t is None else t.contiguous() for t in (p, r))
    return Network(q.contiguous(), load_program(program), p, r, w, list(tensors), width)


@_impl("edge_network")
def _edge_network(
    edge_index: Tensor,
    p: Tensor | None,
    q: Tensor,
    r: Tensor | None,
    w: Tensor | None,
    tensors: list[Tensor],
    num_dst: int,
    flip: bool,
    reduce: str,
    program: str,
    width: int,
) -> Tensor:
    """`out[i] = reduce(program(p[i] + q[j] + w @ r[e]))` over the edges e from j to i."""
    if reduce not in _REDUCES:
        raise ValueError(
            f"edge_network: reduce must be one of {', '.join(_REDUCES)}, got {reduce!r}"
        )
    plan = _plan_of(edge_index, q, num_dst, flip)
    network = _network(p, q, r, w, tensors, program, width)
    loaded, scratch = load_program(program), _scratch(plan, network)

    def rest(rows: Tensor, *given: Tensor) -> Tensor:
        return loaded.values(rows, given, scratch)[-1]

    with torch.no_grad():
        return tiled_forward(plan, replace(network, rest=rest), reduce)


@_fake("edge_network")
def _edge_network_fake(
    edge_index: Tensor,
    p: Tensor | None,
    q: Tensor,
    r: Tensor | None,
    w: Tensor | None,
    tensors: list[Tensor],
    num_dst: int,
    flip: bool,
    reduce: str,
    program: str,
    width: int,
) -> Tensor:
    row = load_program(program)(q.new_empty(1, q.shape[1]), *tensors)
    return row.new_empty(num_dst, row.shape[1])


@_impl("edge_network_backward")
def _edge_network_backward(
    grad: Tensor,
    edge_index: Tensor,
    p: Tensor | None,
    q: Tensor,
    r: Tensor | None,
    w: Tensor | None,
    tensors: list[Tensor],
    num_dst: int,
    flip: bool,
    reduce: str,
    program: str,
    width: int,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients that are needed of p, q, r, w and the tensors, in this order."""
    network = _network(p, q, r, w, tensors, program, width)
    given = [p, q, r, w, *tensors]
    plan = _plan_of(edge_index, q, num_dst, flip)
    pull = _PullByProgram(
        network, load_program(program), reduce, needs[4:], _scratch(plan, network)
    )
    made = tiled_backward(plan, network, reduce, grad.contiguous(), needs, pull, _make_rows)
    wanted = [(g, t) for g, t, need in zip(made, given, needs, strict=True) if need]
    # A tensor that has no part in the result has a gradient of 0.
    return [torch.zeros_like(t) if g is None else g for g, t in wanted if t is not None]


class _PullByProgram:
    """Derivatives of a tile beneath autograd, where it records nothing."""

    def __init__(
        self,
        network: Network,
        program: Program,
        reduce: str,
        need: Sequence[bool],
        scratch: Scratch,
    ) -> None:
        self.tensors, self.program, self.reduce = network.tensors, program, reduce
        self.scratch = scratch
        pairs = zip(network.tensors, need, strict=True)
        self.sums = [torch.zeros_like(t) if n else None for t, n in pairs]

    def __call__(
        self, tile: EdgeTile, pre: Tensor, grad: Tensor, out: Tensor | None
    ) -> Tensor | None:
        values = self.program.values(pre, self.tensors, self.scratch)
        own = self._spread(tile, values[-1].contiguous(), grad.contiguous())
        return self.program.pull(values, self.tensors, own, self.sums, self.scratch, out)

    def _spread(self, tile: EdgeTile, out: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the values that are reduced."""
        if self.reduce in ("sum", "mean"):
            scale = None
            if self.reduce == "mean":
                scale = tile.groups.mean_scale(accumulator_dtype(grad.dtype))
            return plan_sum(tile.groups, grad, transpose=True, col_scale=scale)
        # Reduced again, and not compared with the result of forward: a product need not have the
        # same bits twice, and a winner that is not found would lose its gradient.
        best = plan_minmax(tile.groups, out, is_max=self.reduce == "amax")
        shared: Any = {"heads": 1, "ties": "even", "need_x": True, "need_weight": False}
        made, _ = minmax_backward(tile.groups, grad, out, None, best, **shared)
        assert made is not None, "it was asked for"
        return made


@_fake("edge_network_backward")
def _edge_network_backward_fake(
    grad: Tensor,
    edge_index: Tensor,
    p: Tensor | None,
    q: Tensor,
    r: Tensor | None,
    w: Tensor | None,
    tensors: list[Tensor],
    num_dst: int,
    flip: bool,
    reduce: str,
    program: str,
    width: int,
    needs: list[bool],
) -> list[Tensor]:
    given = zip((p, q, r, w, *tensors), needs, strict=True)
    kept = [t for t, need in given if need and t is not None]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in kept]


def _edge_network_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    edge_index, p, q, r, w, tensors, *ctx.options = inputs
    ctx.save_for_backward(edge_index, p, q, r, w, *tensors)


def _edge_network_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    edge_index, p, q, r, w, *tensors = ctx.saved_tensors
    _, *ends, inner, _, _, _, _, _ = ctx.needs_input_grad
    needs = [bool(n) for n in (*ends, *inner)]
    made = iter(
        _ops.edge_network_backward(grad, edge_index, p, q, r, w, list(tensors), *ctx.options, needs)
    )
    dp, dq, dr, dw, *rest = (next(made) if need else None for need in needs)
    return None, dp, dq, dr, dw, rest, None, None, None, None, None


torch.library.register_autograd(
    "edgeweave::edge_network", _edge_network_grad, setup_context=_edge_network_setup, lib=_library
)
for _name in ("edge_multi_backward", "edge_network_backward"):
    torch.library.register_autograd(f"edgeweave::{_name}", _no_second_derivative, lib=_library)
