"""Run in a subprocess per instruction set: `isa_checks.py TIER`.

First asserts that the tier is active, then checks every kernel against float64 loops over all
widths around the vector length and at every misalignment, and that neither the number of threads
nor the rest of a batch changes a bit. Prints one line per block of checks.
"""

from __future__ import annotations

import sys

import _group_reference as groups
import _reference as ref
import numpy as np
import torch

import edgeweave
from edgeweave import sparse
from edgeweave.scatter import gather, logsumexp, multi_reduce, scatter_reduce, softmax
from edgeweave.sparse import sddmm

MM_REDUCES = ("sum", "mean", "amax", "amin")
WIDTHS = (
    *range(0, 20),
    23,
    24,
    25,
    31,
    32,
    33,
    47,
    48,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    200,
    256,
    300,
)
NUM_SRC, NUM_DST, NUM_EDGES = 11, 9, 60


def small_integers(*shape: int) -> torch.Tensor:
    """Return values whose sums and products are exact in every dtype's accumulator."""
    return torch.randint(-3, 4, shape)


def misaligned(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a copy that starts `offset` elements after an aligned address."""
    buffer = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
    view = buffer[offset:].view(tensor.shape)
    view.copy_(tensor)
    return view


def check_mm() -> int:
    edges = torch.stack(
        [torch.randint(0, NUM_SRC, (NUM_EDGES,)), torch.randint(0, NUM_DST - 1, (NUM_EDGES,))]
    )
    graph = sparse.Graph(edges, size=(NUM_SRC, NUM_DST))
    cases = 0
    for dtype in ref.FLOATS:
        for reduce in MM_REDUCES:
            for width in WIDTHS:
                x = small_integers(NUM_SRC, width).to(dtype).requires_grad_()
                weight = small_integers(NUM_EDGES).to(dtype).requires_grad_()
                for w in (None, weight):
                    out = sparse.mm(graph, x, reduce, weight=w)
                    expected = ref.mm(edges, x, NUM_DST, reduce, w)
                    what = f"mm {dtype} {reduce} F={width} weighted={w is not None}"
                    bound = ref.error_bound(expected, 1, dtype) if reduce == "mean" else 0
                    bound = np.broadcast_to(np.asarray(bound), expected.value.shape)
                    ref.assert_within(out, expected.value, bound, what)
                    cases += 1
                    if width % 3 and dtype != torch.float64:
                        continue  # gradients at every third width
                    upstream = small_integers(NUM_DST, width).to(dtype)
                    leaves = [x] if w is None else [x, w]
                    grads = torch.autograd.grad(out, leaves, upstream)
                    formulas = ref.mm_grad(edges, x, upstream, reduce, w)
                    for grad, formula in zip(grads, formulas, strict=False):
                        # Even shares (1/3) and means are not exact: a few roundings of terms
                        # that are at most 9 and at most 60 * 300 in number.
                        unit = ref.UNIT_ROUNDOFF[torch.float32 if dtype != torch.float64 else dtype]
                        limit = 60 * 4 * 9 * 9 * unit + ref.UNIT_ROUNDOFF[dtype] * np.abs(formula)
                        ref.assert_within(grad, formula, limit, what + " gradient")
    return cases


def check_heads() -> int:
    edges = torch.stack(
        [torch.randint(0, NUM_SRC, (NUM_EDGES,)), torch.randint(0, NUM_DST, (NUM_EDGES,))]
    )
    graph = sparse.Graph(edges, size=(NUM_SRC, NUM_DST))
    cases = 0
    for dtype in ref.FLOATS:
        for reduce in ("sum", "amax", "amin"):
            for heads, width in ((1, 8), (2, 3), (3, 16), (8, 8), (4, 33), (7, 1)):
                x = small_integers(NUM_SRC, heads, width).to(dtype)
                weight = small_integers(NUM_EDGES, heads).to(dtype)
                out = sparse.mm(graph, x, reduce, weight=weight)
                ref.assert_exact(out, ref.mm(edges, x, NUM_DST, reduce, weight).value, f"H={heads}")
                cases += 1
    return cases


def check_scatter_and_gather() -> int:
    index = torch.randint(0, NUM_DST - 1, (NUM_EDGES,))
    cases = 0
    for dtype in (*ref.FLOATS, torch.int32, torch.int64):
        for reduce in MM_REDUCES:
            if reduce == "mean" and not dtype.is_floating_point:
                continue
            for width in WIDTHS:
                src = small_integers(NUM_EDGES, width).to(dtype)
                what = f"scatter {dtype} {reduce} F={width}"
                expected = ref.scatter(src, index, 0, NUM_DST, reduce)
                bound = ref.error_bound(expected, 1, dtype) if reduce == "mean" else 0
                bound = np.broadcast_to(np.asarray(bound), expected.value.shape)
                out = scatter_reduce(src, index, 0, NUM_DST, reduce)
                ref.assert_within(out, expected.value, bound, what)
                turned = scatter_reduce(src.t().contiguous(), index, 1, NUM_DST, reduce)
                ref.assert_within(turned.t(), expected.value, bound, what + " dim=1")
                if reduce in ("amax", "amin"):
                    _, arg = scatter_reduce(src, index, 0, NUM_DST, reduce, return_arg=True)
                    assert arg.tolist() == expected.arg.tolist(), what
                cases += 1
        for width in WIDTHS:
            x = small_integers(NUM_DST, width).to(dtype)
            assert torch.equal(gather(x, index), x[index]), f"gather {dtype} F={width}"
            cases += 1
    return cases


def check_misalignment() -> int:
    """Every start within a vector, and nothing written beside the result."""
    edges = torch.stack(
        [torch.randint(0, NUM_SRC, (NUM_EDGES,)), torch.randint(0, NUM_DST, (NUM_EDGES,))]
    )
    cases = 0
    for dtype in ref.FLOATS:
        for width in (1, 7, 8, 16, 17, 33, 64):
            x, weight = torch.randn(NUM_SRC, width).to(dtype), torch.randn(NUM_EDGES).to(dtype)
            graph = sparse.Graph(edges, size=(NUM_SRC, NUM_DST))
            src = torch.randn(NUM_EDGES, width).to(dtype)
            for reduce in ("sum", "amax"):
                mm = sparse.mm(graph, x, reduce, weight=weight)
                scattered = scatter_reduce(src, edges[1], 0, NUM_DST, reduce)
                for offset in range(1, 17, 2):
                    moved = sparse.mm(graph, misaligned(x, offset), reduce,
                                      weight=misaligned(weight, offset))  # fmt: skip
                    assert torch.equal(moved, mm), (dtype, width, reduce, offset)
                    moved = scatter_reduce(misaligned(src, offset), edges[1], 0, NUM_DST, reduce)
                    assert torch.equal(moved, scattered), (dtype, width, reduce, offset)
                    cases += 1
    return cases


def check_bits() -> int:
    """Any number of threads, and other rows in the batch: the same bits."""
    edges = torch.randint(0, 300, (2, 30_000))
    edges[1, ::3] = 5  # one row of more than 10,000 edges, cut every 4,096
    others = torch.randint(300, 500, (2, 9_001))
    both = torch.cat([others, edges], 1)
    cases = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for width in (1, 17, 64):
            for reduce in MM_REDUCES:
                x = torch.randn(500, width).to(dtype)
                weight = torch.randn(39_001).to(dtype)
                src = torch.randn(39_001, width).to(dtype)
                first = None
                for num_threads in (1, 2, 4):
                    torch.set_num_threads(num_threads)
                    alone = sparse.mm(edges, x[:300], reduce, weight=weight[9001:])
                    batch = sparse.mm(both, x, reduce, weight=weight)[:300]
                    scattered = scatter_reduce(src[9001:], edges[1], 0, 300, reduce)
                    in_batch = scatter_reduce(src, both[1], 0, 500, reduce)[:300]
                    what = (dtype, width, reduce, num_threads)
                    assert torch.equal(alone, batch), what
                    assert torch.equal(scattered, in_batch), what
                    if first is not None:
                        assert torch.equal(alone, first[0]), what
                        assert torch.equal(scattered, first[1]), what
                    first = (alone, scattered)
                    cases += 1
    return cases


def check_family() -> int:
    """Softmax, logsumexp, products and moments, at all widths, and values per edge."""
    index = torch.randint(0, NUM_DST - 1, (NUM_EDGES,))
    at, cases = index.numpy(), 0
    close = torch.testing.assert_close
    for dtype in ref.FLOATS:
        for width in WIDTHS:
            src = (torch.randn(NUM_EDGES, width)).to(dtype).requires_grad_()
            x, what = ref.to_numpy(src), f"{dtype} F={width}"
            out = softmax(src, index, dim_size=NUM_DST)
            bound = groups.softmax_bound(x, at, NUM_DST, dtype)
            ref.assert_within(out, groups.softmax(x, at, NUM_DST), bound, f"softmax {what}")
            wide = src.detach().double().requires_grad_()
            tolerance = {"rtol": 4 * ref.UNIT_ROUNDOFF[dtype] + 2e-6, "atol": 1e-5}
            tolerance["atol"] += 8 * ref.UNIT_ROUNDOFF[dtype]
            for function in (
                lambda t: [softmax(t, index, dim_size=NUM_DST)],
                lambda t: [logsumexp(t, index, dim_size=NUM_DST)[: NUM_DST - 1]],
                lambda t: [scatter_reduce(t, index, 0, NUM_DST, "prod")],
                lambda t: multi_reduce(t, index, ("var", "sum", "amin", "std", "amax"), 0, NUM_DST),
            ):
                # Against the float64 kernels, whose own values the unit tests hold to loops.
                made, exact = function(src), function(wide)
                upstream = [torch.ones_like(e).cumsum(0) / 4 for e in exact]
                for m, e in zip(made, exact, strict=True):
                    close(m.double(), e, **tolerance)
                (grad,) = torch.autograd.grad(made, src, [u.to(dtype) for u in upstream])
                (expected,) = torch.autograd.grad(exact, wide, upstream)
                spread = {**tolerance, "atol": tolerance["atol"] * 60}
                close(grad.double(), expected, **spread)
                cases += 1
            a = small_integers(NUM_DST, width).to(dtype)
            b = small_integers(NUM_EDGES, width).to(dtype)
            edges = torch.stack([torch.arange(NUM_EDGES), index])
            for op in ("add", "sub", "mul"):
                assert torch.equal(sddmm(edges, a, b, op), getattr(torch, op)(a[index], b)), what
                cases += 1
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        src = torch.randint(1, 4, (NUM_EDGES, 7)).to(dtype)
        expected = groups.prod(src.numpy(), at, NUM_DST)
        assert (scatter_reduce(src, index, 0, NUM_DST, "prod").numpy() == expected).all(), dtype
        cases += 1
    return cases


def main(tier: str) -> None:
    assert edgeweave.active_isa() == tier, f"asked for {tier}, got {edgeweave.active_isa()}"
    torch.manual_seed(0)
    for check in (check_mm, check_heads, check_scatter_and_gather, check_misalignment, check_bits,
                  check_family):  # fmt: skip
        print(f"{tier} {check.__name__}: {check()} cases")
    assert edgeweave.active_isa() == tier


if __name__ == "__main__":
    main(sys.argv[1])
