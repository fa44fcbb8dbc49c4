"""Faults that people reported of other libraries: each of their inputs, through every operator.

An id or a docstring names the project and the number of a report; the value asserted is the right
one, not theirs. Where no tolerance is given, the value is exact.
"""

from __future__ import annotations

import functools
import itertools
import math

import _reference as ref
import numpy as np
import pytest
import torch
from _group_ops import BY_INDEX, OPS, TRAINABLE, check, small_integers, those, zeros

from edgeweave import scatter, sparse

INF = math.inf
HALVES = (torch.bfloat16, torch.float16)


# Low precision: torch `_segment_reduce` (1000 ones are 256), pyg (a mean is NaN), scatter 269


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("width", [1, 8, 33])
@pytest.mark.parametrize("name", those("sum"))
def test_torch_segment_reduce_sum_of_a_thousand_ones(name, width, dtype):
    out = OPS[name](torch.ones(1000, width, dtype=dtype), zeros(1000), 1)
    assert out.tolist() == [[1000.0] * width]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_thousand_ones_come_back_to_one_row_of_a_gather(dtype):
    x = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    scatter.gather(x, zeros(1000)).backward(torch.ones(1000, 3, dtype=dtype))
    assert x.grad.tolist() == [[1000.0] * 3, [0.0] * 3]


# What 70,000 fp16 entries give that are 1 throughout (for the moments 0 and 2 by turns; for the
# exponentials 0): more of them than fp16 can count.
SEVENTY_THOUSAND = {"mean": 1.0, "amax": 1.0, "prod": 1.0, "var": 1.0, "std": 1.0,
                    "softmax": 1 / 70_000, "logsumexp": math.log(70_000)}  # fmt: skip


@pytest.mark.parametrize("name", those(*SEVENTY_THOUSAND))
def test_pyg_fp16_of_seventy_thousand_entries(name):
    kind = name.split()[0]
    src = torch.ones(70_000, dtype=torch.float16)
    if kind in ("var", "std"):
        src = 2 * torch.arange(70_000).remainder(2).half()
    elif kind in ("softmax", "logsumexp"):
        src.zero_()
    src.requires_grad_()
    out = OPS[name](src, zeros(70_000), 1)
    # The unbiased variance is 1 + 1/69999 and rounds to 1.
    assert out.eq(torch.tensor(SEVENTY_THOUSAND[kind]).half()).all()
    out.backward(torch.ones_like(out))
    share = {"prod": 1.0, "var": 2 / 70_000, "std": 1 / 70_000, "softmax": 0.0}
    expected = torch.tensor(share.get(kind, 1 / 70_000)).half()
    # Half of the entries of a moment are below the mean.
    assert src.grad.abs().eq(expected).all()
    assert (src.grad < 0).sum() == (35_000 if kind in ("var", "std") else 0)


@pytest.mark.parametrize("name", [n for n in TRAINABLE if n not in those("prod")])
def test_scatter_269_a_million_fp16_values_in_one_bucket(name):
    """2^-5 a million times: 31250 exactly in float32, rounded once to fp16."""
    value, count = 2.0**-5, 1_000_000
    out = OPS[name](torch.full((count,), value, dtype=torch.float16), zeros(count), 1)
    expected = {"sum": 31250.0, "std": 0.0, "var": 0.0, "softmax": 1e-6,
                "logsumexp": math.log(count) + value}  # fmt: skip
    assert out.eq(torch.tensor(expected.get(name.split()[0], value)).half()).all()


def test_scatter_269_a_million_fp16_values_in_one_row_of_a_gather():
    x = torch.ones(1, dtype=torch.float16, requires_grad=True)
    scatter.gather(x, zeros(1_000_000)).backward(torch.full((1_000_000,), 2.0**-5).half())
    assert torch.equal(x.grad, torch.tensor([31250.0]).half())


# Extrema: torch 168358, pyg, scatter 472


def _with_out(reduce):
    def run(src, index, num_groups, dim=0):
        out = torch.zeros(num_groups, *src.shape[1:], dtype=src.dtype)
        return scatter.scatter_reduce(src, index, dim, reduce=reduce, out=out)

    return run


EXTREMA = {n: OPS[n] for n in those("amax", "amin")} | {
    f"{reduce} out": _with_out(reduce) for reduce in ("amax", "amin")
}


def extremum(name: str, values: list[float], dtype: torch.dtype, upstream: float = 1.0):
    """Return the extremum of one group and its gradient; for a minimum of the values negated."""
    sign = 1.0 if name.startswith("amax") else -1.0
    src = (sign * torch.tensor(values)).to(dtype).requires_grad_()
    out = EXTREMA[name](src, zeros(len(values)), 1)
    (grad,) = torch.autograd.grad(out, src, torch.full_like(out, upstream))
    return sign * out.item(), grad.tolist()


@pytest.mark.parametrize("name", EXTREMA)
@pytest.mark.parametrize(
    ("values", "best", "shares"),
    [
        pytest.param([0.0, -4.0, -1.0], 0.0, [1, 0, 0], id="torch-168358-maximum-is-0"),
        pytest.param([-4.0, -1.0, -2.0], -1.0, [0, 1, 0], id="scatter-472-all-negative"),
        pytest.param([0.0, -1.0, 0.0], 0.0, [1 / 2, 0, 1 / 2], id="two-zeros-share"),
        pytest.param([4.0, 4.0, 4.0], 4.0, [1 / 3] * 3, id="three-share"),
        pytest.param([INF, 1.0], INF, [1, 0], id="pyg-infinity-survives"),
        pytest.param([-INF, -INF], -INF, [1 / 2, 1 / 2], id="pyg-only-infinities-of-no-use"),
        pytest.param([-INF, 3.0], 3.0, [0, 1], id="pyg-infinity-loses"),
    ],
)
def test_extremum_and_its_gradient(name, values, best, shares):
    for dtype, upstream in itertools.product(ref.FLOATS, (1.0, -1.0)):
        expected = (upstream * torch.tensor(shares, dtype=torch.float64)).to(dtype).tolist()
        assert extremum(name, values, dtype, upstream) == (best, expected)


@pytest.mark.parametrize("name", EXTREMA)
def test_torch_168358_all_entries_into_one_slot_of_many(name):
    src = torch.zeros(1000, 3, requires_grad=True)
    out = EXTREMA[name](src, torch.full((1000,), 5), 10)
    (grad,) = torch.autograd.grad(out.sum(), src)
    assert out.eq(0).all()
    assert grad.eq(torch.tensor(1.0) / 1000).all()


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize("include_self", [False, True])
def test_scatter_472_out_with_negative_values(include_self, dtype):
    """Entries, old values and the slot without entries are all below 0; nothing turns to 0."""
    src, index = torch.tensor([-3.0, -5.0, -7.0], dtype=dtype), torch.tensor([0, 0, 1])
    start = torch.tensor([-4.0, -6.0, -8.0], dtype=dtype)
    for sign, reduce in ((1, "amax"), (-1, "amin")):
        out = sign * start
        made = scatter.scatter_reduce(sign * src, index, 0, None, reduce, include_self, out)
        assert made is out
        assert (sign * out).tolist() == [-3.0, -6.0 if include_self else -7.0, -8.0]


def test_infinities_in_exponentials_and_positions():
    """As `torch.logsumexp` and `torch.argmax` have it, and never 0."""
    src, index = torch.tensor([INF, 1.0, -INF, -INF]), torch.tensor([0, 0, 1, 1])
    assert scatter.logsumexp(src, index).tolist() == [INF, -INF]
    assert scatter.argmax(src, index).tolist() == [0, 2]
    assert scatter.argmin(src, index).tolist() == [1, 2]


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize("name", those("prod"))
def test_pyg_8726_product_of_zeros_and_large_values(name, dtype):
    """The product of the rest overflows each dtype; a zero makes it 0, not NaN, wherever it is."""
    large = float(torch.finfo(dtype).max) / 2
    for place in range(4):
        values = [large, large, -large]
        values.insert(place, 0.0)
        src = torch.tensor(values, dtype=dtype, requires_grad=True)
        out = OPS[name](src, zeros(4), 1)
        assert out.tolist() == [0.0]
        (grad,) = torch.autograd.grad(out, src)
        assert grad.tolist() == [-INF if k == place else 0.0 for k in range(4)]


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
def test_pyg_8726_products_of_examples_with_an_index_each(dtype):
    """`torch.vmap` over the index runs on torch operations, with the same value and gradient."""
    large = float(torch.finfo(dtype).max) / 2
    rows = [[large, 0.0, -large, large], [0.0, large, 0.0, 1.0], [2.0, -3.0, 1.0, INF],
            [INF, -2.0, INF, 1.0], [INF, 0.0, 1.0, 2.0], [-0.0, 2.0, 1.0, -2.0]]  # fmt: skip
    src, index = torch.tensor(rows, dtype=dtype), torch.zeros(6, 4, dtype=torch.int64)

    def product(x, i):
        return scatter.scatter_reduce(x, i, dim_size=1, reduce="prod")

    def slope(x, i):
        return torch.func.grad(lambda x: product(x, i).sum())(x)

    out, grad = torch.vmap(product)(src, index), torch.vmap(slope)(src, index)
    assert out[:2].eq(0).all()
    for made, run in ((out, product), (grad, slope)):
        alone = torch.stack([run(x, i) for x, i in zip(src, index, strict=True)])
        torch.testing.assert_close(made, alone, rtol=0, atol=0, equal_nan=True)


# Layouts: torch 129093, strided indices, int32 with F >= 16, narrow and batched features


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", ["rows", "turned", "every other", "column", "expanded"])
@pytest.mark.parametrize("dim", [0, 1])
def test_torch_129093_gather_from_x_that_is_not_contiguous(dim, kind, index_dtype):
    """Index of stride 1 along a dimension of size > 1; the entries and their gradient."""
    x = torch.arange(48.0).reshape(6, 8).t()[:, ::2].requires_grad_()  # [8, 3]
    size, other = x.shape[dim], x.shape[1 - dim]
    along = torch.randint(0, size, (11,), dtype=index_dtype)
    full = torch.randint(0, size, (11, other), dtype=index_dtype)
    index = {
        "rows": full,
        "turned": full.t().contiguous().t(),
        "every other": torch.stack([full, full + 99], 1)[:, 0],
        "column": along[:, None],
        "expanded": along[:, None].expand(11, other),
    }[kind]
    index = index if dim == 0 else index.t()
    out = scatter.gather(x, index, dim)
    whole = index.expand(11, other) if dim == 0 else index.expand(other, 11)
    picked = np.take_along_axis(x.detach().numpy(), whole.numpy(), dim)
    assert np.array_equal(out.detach().numpy(), picked)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    expected = np.zeros(x.shape)
    at = np.indices(whole.shape)
    np.add.at(expected, (whole.numpy(), at[1]) if dim == 0 else (at[0], whole.numpy()), 1)
    assert np.array_equal(grad.numpy(), expected)


@pytest.mark.parametrize("name", BY_INDEX)
def test_strided_index(name):
    """Columns of `[E, 2]` edges, in both widths of integers: the bits of a contiguous index."""
    edges = torch.randint(0, 9, (60, 2)).t()
    src = small_integers(60, 5).requires_grad_()
    for index in (edges[0], edges[1], edges.int()[1], torch.stack([edges[1]] * 3, 1)[:, 1]):
        assert index.stride(0) > 1 or index.dtype == torch.int32
        out, plain = (OPS[name](src, i, 9) for i in (index, index.long().contiguous()))
        assert torch.equal(out, plain)
        if name in TRAINABLE:
            (grad, expected) = (torch.autograd.grad(o.nan_to_num().sum(), src)[0]
                                for o in (out, plain))  # fmt: skip
            assert torch.equal(grad, expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_every_width_and_heads_with_either_integer(name, index_dtype):
    """torch refuses int32 with F >= 16; 1 to 8 features and `[E, H]` are slow elsewhere."""
    for features in ((), *((width,) for width in (*range(1, 9), 16, 17, 40)), (4, 3)):
        index = torch.randint(0, 8, (60,), dtype=index_dtype)
        check(name, small_integers(60, *features), index, 9)


@pytest.mark.parametrize("name", OPS)
def test_batched_layouts(name):
    """`[B, E, F]` along dim 1 is each example on its own, gradients included."""
    for shape, dim in (((2, 60, 3), 1), ((2, 60, 16), 1), ((5, 60), 1), ((2, 3, 60), -1)):
        src, index = small_integers(*shape).requires_grad_(), torch.randint(0, 8, (60,))
        check(name, src, index, 9, dim)
        if name not in TRAINABLE:
            continue
        out = OPS[name](src, index, 9, dim)
        upstream = torch.randint(-2, 3, out.shape).double()
        (grad,) = torch.autograd.grad(out, src, upstream)
        leaf = src.detach().movedim(dim, 0).reshape(60, -1).requires_grad_()
        flat = OPS[name](leaf, index, 9)
        (expected,) = torch.autograd.grad(flat, leaf, upstream.movedim(dim, 0).reshape(flat.shape))
        assert torch.equal(grad.movedim(dim, 0).reshape(60, -1), expected)


def test_ptr_of_a_softmax_along_dim_1():
    """PyG's `utils.softmax(ptr=..., dim=1)`: every segment of every row adds up to 1."""
    src, ptr = torch.randn(3, 10, dtype=torch.float64, requires_grad=True), [0, 4, 4, 9, 10]
    for dtype in (torch.int32, torch.int64):
        out = scatter.softmax(src, ptr=torch.tensor(ptr, dtype=dtype), dim=1)
        parts = [src[:, a:b].softmax(1) for a, b in itertools.pairwise(ptr)]
        upstream = torch.randn(3, 10, dtype=torch.float64)
        grads = [torch.autograd.grad(o, src, upstream, retain_graph=True)[0]
                 for o in (out, torch.cat(parts, 1))]  # fmt: skip
        torch.testing.assert_close(out, torch.cat(parts, 1))
        torch.testing.assert_close(*grads)


# Crashes: pyg 723, scatter 299, shapes without entries, groups or features, and a huge star


@pytest.mark.parametrize("value", [59, 60, 977, -1, -59, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", [*BY_INDEX, "gather", "index_sort"])
def test_pyg_723_index_beyond_the_nodes_and_negative(name, value):
    """pyg 723 is a segmentation fault; here an error with the value, its position and the bound.

    Twice each: the first failure must leave no plan behind.
    """
    index = torch.randint(0, 59, (30,))
    index[13] = value
    calls = []
    for i in (index, index.int()):
        for shape, dim in (((30,), 0), ((30, 16), 0), ((30, 0), 0), ((2, 30, 3), 1)):
            src = torch.ones(shape, requires_grad=True)
            x = torch.ones([59 if n == 30 else n for n in shape], requires_grad=True)
            if name == "index_sort":
                calls.append(lambda i=i: scatter.index_sort(i, 58))
            elif name == "gather":
                calls.append(lambda x=x, i=i, d=dim: scatter.gather(x, i, d))
            else:
                calls.append(lambda s=src, i=i, d=dim: OPS[name](s, i, 59, d))
    for call in calls * 2:
        with pytest.raises(IndexError, match=rf"\[0, 59\), got {value} at position 13"):
            call()


@pytest.mark.parametrize("name", BY_INDEX)
def test_pyg_723_examples_with_an_index_each(name):
    """The one bad index among those that `torch.vmap` runs over, along any dimension."""
    index = torch.randint(0, 5, (3, 8, 7))
    index[2, 6, 4] = 5

    def over(dims):
        def run(i):
            return OPS[name](torch.ones(7), i, 5)

        for dim in dims:
            run = torch.vmap(run, in_dims=dim)
        return run

    for dims, order in (((0, 0), (0, 1, 2)), ((1, 0), (0, 2, 1)), ((0, 2), (1, 2, 0))):
        with pytest.raises(IndexError, match=r"\[0, 5\), got 5 at position 4"):
            over(dims)(index.permute(order))


def test_pyg_723_examples_with_a_ptr_each():
    ptr = torch.tensor([[0, 3, 8], [0, 9, 8]])
    with pytest.raises(ValueError, match="ptr must not decrease, got 9 and then 8"):
        torch.vmap(lambda p: scatter.segment_reduce(torch.ones(8), p))(ptr)


@pytest.mark.parametrize("ptr", [[0, 3, 11], [0, 12, 10], [-1, 10], [0, -5, 10], [0, 9], [1, 10]])
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "prod", "softmax", "logsumexp"])
def test_pyg_723_ptr_beyond_the_entries(name, ptr):
    cuts = torch.tensor(ptr)
    for src, dim in ((torch.ones(10, 3), 0), (torch.ones(2, 10), 1)):
        if name in ("softmax", "logsumexp"):
            run = functools.partial(getattr(scatter, name), src, ptr=cuts, dim=dim)
        else:
            run = functools.partial(scatter.segment_reduce, src, cuts, name, dim)
        with pytest.raises(ValueError, match=r"ptr must (run from 0 to|not decrease)"):
            run()


def test_scatter_299_second_derivatives_of_segment_sums_are_not_empty():
    """y = sum of s^3 over the segments' sums s: dy/dx = 3 s^2, and d(sum dy/dx)/dx = 6 s n."""
    src = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64, requires_grad=True)
    index, ptr = torch.tensor([0, 0, 2]), torch.tensor([0, 2, 2, 3])
    for out in (scatter.segment_reduce(src, ptr), scatter.scatter_reduce(src, index),
                scatter.multi_reduce(src, index, ["amax", "sum"])[1]):  # fmt: skip
        (first,) = torch.autograd.grad(out.pow(3).sum(), src, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), src)
        assert first.tolist() == [[27.0], [27.0], [48.0]]
        assert second.tolist() == [[36.0], [36.0], [24.0]]


HARDLY_ANYTHING = (((0,), 0), ((0,), 3), ((0, 4), 0), ((0, 4), 3), ((6, 0), 3), ((0, 0), 0),
                   ((0, 3, 2), 2), ((1,), 1), ((1, 1), 1))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_no_entries_groups_or_features_and_one_node(name, dtype):
    kind = name.split()[0]
    for shape, num_groups in HARDLY_ANYTHING:
        src = torch.ones(shape, dtype=dtype, requires_grad=name in TRAINABLE)
        out = OPS[name](src, zeros(shape[0]), num_groups)
        assert out.shape == (shape[0] if kind == "softmax" else num_groups, *shape[1:])
        if shape[0] == 0:
            value = {"prod": 1.0, "logsumexp": -INF}.get(kind, 0)
        else:
            value = 0 if kind in ("std", "var", "argmax", "argmin") else 1
        assert out.eq(value).all()
        if name in TRAINABLE:
            (grad,) = torch.autograd.grad(out.sum(), src)
            assert grad.shape == src.shape
            assert grad.eq(0 if kind in ("var", "std", "softmax") else 1).all()


@pytest.mark.parametrize("name", OPS)
def test_a_star_with_a_million_leaves(name):
    """One group of 1e6 entries among a few small and empty ones, in no order.

    Entries of the star are 0 but one of 1 and one of -1: sums are exact.
    """
    count, hub = 1_000_000, 3
    index = torch.full((count + 4,), hub)
    index[[5, 70, 900_000, 900_001]] = torch.tensor([0, 1, 5, 5])
    src = torch.zeros(count + 4, dtype=torch.float64)
    src[[10, 999_999, 5]] = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    src.requires_grad_(name in TRAINABLE)
    out = OPS[name](src, index, 7)
    at = math.log(count - 2 + math.e + 1 / math.e)
    kind = name.split()[0]
    value = {"sum": 0.0, "mean": 0.0, "amax": 1.0, "amin": -1.0, "prod": 0.0, "logsumexp": at,
             "argmax": 10, "argmin": 999_999, "var": 2 / (count - 1),
             "std": math.sqrt(2 / (count - 1)), "softmax": math.exp(1 - at)}[kind]  # fmt: skip
    # A million float64 terms of at most e, added in pieces of 4,096: 1e-12 of them is ample.
    assert out[10 if kind == "softmax" else hub].item() == pytest.approx(value, rel=1e-11, abs=0)
    if kind not in ("softmax", "argmax", "argmin"):
        nothing = {"prod": 1.0, "logsumexp": -INF}.get(kind, 0.0)
        assert out[[2, 4, 6]].tolist() == [nothing] * 3
        assert out[0].item() == (0.0 if kind in ("var", "std") else 2.0)
    if name in TRAINABLE:
        (grad,) = torch.autograd.grad(out[out.isfinite()].sum(), src)
        share = {"sum": 1.0, "mean": 1 / count, "amax": 1.0, "logsumexp": math.exp(1 - at),
                 "var": 2 / (count - 1), "std": 1 / math.sqrt(2 * (count - 1))}  # fmt: skip
        # The softmax of a group adds up to 1 whatever its scores are, up to 1e6 roundings.
        assert grad[10].item() == pytest.approx(share.get(kind, 0.0), rel=1e-11, abs=1e-15)


@pytest.mark.parametrize("name", OPS)
def test_order_of_the_entries(name):
    """Sorted by group, backwards, in turns, in no order; with isolated groups at both ends."""
    index = torch.randint(1, 8, (60,))
    for order in (torch.arange(60), index.argsort(), index.argsort(descending=True),
                  torch.arange(60).view(3, 20).t().reshape(-1)):  # fmt: skip
        check(name, small_integers(60, 3), index[order], 10)


@pytest.mark.parametrize("name", OPS)
def test_groups_that_change_at_every_step(name):
    """Mini-batches: tensors die and their memory serves the next ones, of the same sizes."""
    for _ in range(20):
        check(name, small_integers(25, 2), torch.randint(0, 6, (25,)), 6)


# Compiling: without dim_size; fake kernels (torch 155240, scatter 440)


WITHOUT_SIZE = {
    "prod": lambda s, i: scatter.scatter_reduce(s, i, reduce="prod"),
    "softmax": scatter.softmax,
    "logsumexp": scatter.logsumexp,
    "std": scatter.std,
    "multi": lambda s, i: torch.cat(scatter.multi_reduce(s, i, ["mean", "amin"]), 1),
    "argmax": scatter.argmax,
}


@pytest.mark.parametrize("name", WITHOUT_SIZE)
def test_compiling_without_dim_size(name):
    """One graph, whatever the largest index is; a negative one is the error it is without."""
    torch._dynamo.reset()
    run = WITHOUT_SIZE[name]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for largest in (9, 4, 20):
        index = torch.randint(0, largest, (60,))
        index[3] = largest - 1
        src = small_integers(60, 3).requires_grad_(name != "argmax")
        out, expected = compiled(src, index), run(src, index)
        torch.testing.assert_close(out, expected)
        if name != "argmax":
            grads = [torch.autograd.grad(o.nan_to_num(neginf=0).sum(), src)[0]
                     for o in (out, expected)]  # fmt: skip
            torch.testing.assert_close(*grads)
    index[13] = -4
    for call in (run, compiled):
        with pytest.raises(IndexError, match="got -4 at position 13"):
            call(src, index)
    torch._dynamo.reset()


def test_every_op_that_a_compiler_meets_has_a_fake_kernel():
    """torch 155240, scatter 440. Native ops that take a plan are for the CPU: none is traced."""
    assert sparse.__name__ == "edgeweave.sparse"  # imported: its ops are registered
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("edgeweave::")]
    schemas = {n: torch._C._get_schema(n, "").arguments for n in names}
    of_tensors = [n for n, a in schemas.items() if a and "Tensor" in str(a[0].type)]

    def has(name, key):
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

    traced = {n.split("::")[1] for n in of_tensors if has(n, "CompositeExplicitAutograd")}
    assert traced >= {"softmax", "logsumexp", "scatter", "scatter_arg", "gather", "multi_reduce",
                      "mm", "segment_matmul", "checked_index"}  # fmt: skip
    assert [name for name in sorted(traced) if not has(f"edgeweave::{name}", "Meta")] == []
