"""`utils.scatter`, `utils.spmm` and the basic aggregations."""

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex, utils
from torch_geometric.nn import (
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MulAggregation,
    SumAggregation,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import base

import edgeweave.pyg

# torch says so once per process, in whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta")

AGGREGATIONS = [SumAggregation, MeanAggregation, MaxAggregation, MinAggregation]


def source(*shape: int) -> Tensor:
    # Ties, but none at 0, where torch counts the zero that its result starts from as one more.
    return ((torch.randn(*shape, dtype=torch.float64) * 2).round() + 0.5).requires_grad_()


@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "max", "min", "amax", "amin"])
@pytest.mark.parametrize("shape_dim", [((30,), 0), ((30, 4), 0), ((4, 30), -1), ((2, 30, 3), 1)])
@pytest.mark.parametrize("dim_size", [None, 12])
def test_scatter(reduce, shape_dim, dim_size, same_as_stock, only_fused):
    shape, dim = shape_dim
    src, index = source(*shape), torch.randint(0, 9, (30,))
    same_as_stock(lambda: utils.scatter(src, index, dim, dim_size, reduce), [src])
    only_fused("utils.scatter", 1)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_scatter_of_nothing(reduce, same_as_stock, only_fused):
    src, index = source(0, 4), torch.empty(0, dtype=torch.long)
    assert same_as_stock(lambda: utils.scatter(src, index, 0, 3, reduce), [src]).shape == (3, 4)
    assert same_as_stock(lambda: utils.scatter(src, index, 0, None, reduce), [src]).shape == (0, 4)
    only_fused("utils.scatter", 2)


@pytest.mark.parametrize(
    ("src", "index", "options", "reason"),
    [
        (source(5), torch.tensor([0, 1, 0, 1, 2]), {"reduce": "mul"}, "reduce='mul'"),
        (source(5).detach() > 0, torch.tensor([0, 1, 0, 1, 2]), {"reduce": "any"}, "reduce='any'"),
        (torch.arange(5), torch.tensor([0, 1, 0, 1, 2]), {}, "dtype torch.int64"),
        (source(5).detach().to(torch.complex64), torch.tensor([0, 1, 0, 1, 2]), {}, "complex64"),
    ],
)
def test_scatter_falls_back(src, index, options, reason, same_as_stock):
    same_as_stock(lambda: utils.scatter(src, index, **options))
    ((found, count),) = edgeweave.pyg.report()["utils.scatter"].reasons.items()
    assert reason in found
    assert count == 1


@pytest.mark.parametrize(
    ("index", "dim", "dim_size", "reduce"),
    [
        (torch.tensor([0, 1, 5]), 0, 3, "sum"),
        (torch.tensor([0, 1, -1]), 0, 3, "sum"),
        (torch.tensor([0, 1, 5]), 0, 3, "max"),
        (torch.tensor([[0, 1, 2]]), 0, 3, "sum"),
        (torch.tensor([0, 1]), 0, 3, "sum"),
        (torch.tensor([0, 1, 2]), 2, 3, "sum"),
        (torch.tensor([0, 1, 2]), -3, 3, "sum"),
        (torch.tensor([0, 1, 2]), 0, 3, "median"),
    ],
)
def test_scatter_raises_what_stock_raises(index, dim, dim_size, reduce):
    src = source(3, 2)
    errors = []
    for _ in range(2):
        with pytest.raises(Exception) as info:  # noqa: PT011 - whatever stock raises is expected
            utils.scatter(src, index, dim, dim_size, reduce)
        errors.append((info.type, str(info.value)))
        edgeweave.pyg.accelerate()
    assert errors[0] == errors[1]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dim_size", [None, 12])
@pytest.mark.parametrize("shape_dim", [((30, 4), 0), ((2, 30, 3), -2)])
def test_aggregations(aggregation, dim_size, shape_dim, same_as_stock, only_fused):
    shape, dim = shape_dim
    module, src, index = aggregation(), source(*shape), torch.randint(0, 9, (30,))
    same_as_stock(lambda: module(src, index, dim_size=dim_size, dim=dim), [src])
    only_fused(aggregation.__name__, 1)


def test_aggregation_without_index_is_one_group(same_as_stock, only_fused):
    src = source(30, 4)
    same_as_stock(lambda: MeanAggregation()(src), [src])
    only_fused("MeanAggregation", 1)


def test_aggregation_with_index_and_ptr(same_as_stock, only_fused):
    src, index = source(6, 4), torch.tensor([0, 0, 1, 1, 1, 3])
    ptr = torch.tensor([0, 2, 5, 5, 6])
    same_as_stock(lambda: SumAggregation()(src, index, ptr), [src])
    only_fused("SumAggregation", 1)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregation_with_ptr_only_falls_back(aggregation, same_as_stock):
    src, ptr = source(6, 4), torch.tensor([0, 2, 5, 6])
    same_as_stock(lambda: aggregation()(src, ptr=ptr), [src])
    entry = edgeweave.pyg.report()[aggregation.__name__]
    assert entry.reasons == {"ptr is given: PyG calls utils.segment": 1}


def test_deterministic_aggregation_with_ptr_falls_back(same_as_stock):
    module, src, index = SumAggregation(), source(6, 4), torch.tensor([0, 0, 1, 1, 1, 2])
    module._deterministic = True
    ptr = torch.tensor([0, 2, 5, 6])
    same_as_stock(lambda: module(src, index, ptr), [src])
    assert edgeweave.pyg.report()["SumAggregation"].fell_back == 1


def test_other_aggregation_falls_back(same_as_stock):
    src, index = source(6, 4), torch.tensor([0, 0, 1, 1, 1, 2])
    same_as_stock(lambda: MulAggregation()(src, index), [src])
    ((reason, _),) = edgeweave.pyg.report()["MulAggregation"].reasons.items()
    assert "reduce='mul'" in reason


def test_aggregation_raises_what_stock_raises():
    src, index = source(3, 2), torch.tensor([0, 1, 5])
    with edgeweave.pyg.accelerated(), pytest.raises(ValueError, match=r"expected >= '6'"):
        SumAggregation()(src, index, dim_size=3)


@pytest.mark.parametrize("pool", [global_mean_pool, global_max_pool])
def test_pools_reach_the_kernels(pool, same_as_stock, only_fused):
    src, batch = source(30, 4), torch.randint(0, 5, (30,)).sort().values
    same_as_stock(lambda: pool(src, batch), [src])
    only_fused("utils.scatter", 1)


def test_softmax_reaches_the_kernels(same_as_stock):
    src, index = source(30, 4), torch.randint(0, 9, (30,))
    same_as_stock(lambda: utils.softmax(src, index), [src])
    assert edgeweave.pyg.report()["utils.softmax"].fused == 1


def matrix(layout: str) -> Tensor:
    dense = torch.randn(12, 9, dtype=torch.float64) * (torch.rand(12, 9) < 0.4)
    return {
        "coo": dense.to_sparse_coo,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
    }[layout]()


@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR:UserWarning")
@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "max", "min"])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_spmm(layout, reduce, same_as_stock, only_fused):
    adj, other = matrix(layout), torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    same_as_stock(lambda: utils.spmm(adj, other, reduce), [other])
    only_fused("utils.spmm", 1)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_spmm_ties_go_to_the_first_as_in_stock_csr(reduce, same_as_stock, only_fused):
    adj = torch.ones(3, 4, dtype=torch.float64).to_sparse_csr()
    other = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    same_as_stock(lambda: utils.spmm(adj, other, reduce), [other])
    assert other.grad is not None
    assert other.grad[1:].eq(0).all()
    only_fused("utils.spmm", 1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_spmm_of_an_edge_index(reduce, same_as_stock, only_fused):
    edges = torch.randint(0, 9, (2, 40))
    adj = EdgeIndex(edges, sparse_size=(12, 9)).sort_by("row").values
    other = torch.randn(9, 5, requires_grad=True)
    stock = utils.spmm(adj, other, reduce)
    with edgeweave.pyg.accelerated():
        ours = utils.spmm(adj, other, reduce)
    # float32, since stock cannot multiply an EdgeIndex without values by float64.
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
    only_fused("utils.spmm", 1)


@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR:UserWarning")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda adj, x: (adj.requires_grad_(), x), "requires a gradient"),
        (lambda adj, x: (adj.float(), x.float().double()), "torch.float32"),
        (lambda adj, x: (adj, x[:, 0]), "not a matrix"),
        (lambda adj, x: (adj.to_dense(), x), "not a sparse matrix"),
        (
            lambda adj, x: (torch.sparse_coo_tensor([[0, 0], [1, 1]], x[0, :2], (12, 9)), x),
            "not coalesced",
        ),
    ],
)
def test_spmm_falls_back(change, reason):
    adj, other = change(matrix("csr"), torch.randn(9, 5, dtype=torch.float64))
    outcomes = []
    for _ in range(2):
        try:
            outcomes.append(utils.spmm(adj, other))
        except Exception as error:
            outcomes.append((type(error), str(error)))
        edgeweave.pyg.accelerate()
    if isinstance(outcomes[0], tuple):
        assert outcomes[1] == outcomes[0]
    else:
        torch.testing.assert_close(outcomes[1], outcomes[0])
    assert reason in next(iter(edgeweave.pyg.report()["utils.spmm"].reasons))


def test_names_imported_by_pyg_modules_are_replaced():
    original = utils.scatter
    with edgeweave.pyg.accelerated():
        assert base.scatter is utils.scatter is not original
    assert base.scatter is utils.scatter is original
