"""Every refusal of `sparse.mm` and `Graph`: type, argument, what was expected, what came."""

from __future__ import annotations

import pytest
import torch

from edgeweave import sparse

EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
X = torch.ones(4, 2)


def naming(*words: object) -> str:
    """Return a pattern that needs all of `words` in any order, numbers as whole numbers."""
    return "".join(rf"(?=[\s\S]*(?<![\w-]){word}(?!\w))" for word in words)


def edges_with(value: int, position: int, row: int, num_edges: int = 30) -> torch.Tensor:
    edges = torch.zeros(2, num_edges, dtype=torch.int64)
    edges[row, position] = value
    return edges


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("row", [0, 1], ids=["source", "destination"])
@pytest.mark.parametrize("value", [977, 59, -4, 2**31 - 1, -(2**31)])
def test_index_out_of_range_names_value_position_and_bound(value, row, index_dtype):
    edges = edges_with(value, 13, row).to(index_dtype)
    with pytest.raises(IndexError, match=naming(value, 13, 59)):
        sparse.mm(edges, torch.ones(59, 2))
    with pytest.raises(IndexError, match=naming(value, 13, 59)):
        sparse.Graph(edges, size=(59, 59))


@pytest.mark.parametrize("value", [2**31, 2**32, 2**32 + 1, 2**62, -(2**32), -(2**63)])
@pytest.mark.parametrize("row", [0, 1], ids=["source", "destination"])
def test_large_int64_values_are_not_cut_to_32_bits(value, row):
    """2^32 + 1 cut to int32 would be the valid node 1."""
    with pytest.raises(IndexError, match=naming(value, 13, 59)):
        sparse.mm(edges_with(value, 13, row), torch.ones(59, 2))


def test_bound_is_that_of_the_row():
    with pytest.raises(IndexError, match=naming(41, 7, 41)):
        sparse.Graph(edges_with(41, 7, row=0), size=(41, 83))
    with pytest.raises(IndexError, match=naming(83, 7, 83)):
        sparse.Graph(edges_with(83, 7, row=1), size=(41, 83))
    assert sparse.Graph(edges_with(41, 7, row=1), size=(41, 83)).num_edges == 30


@pytest.mark.parametrize("row", [0, 1], ids=["source", "destination"])
def test_the_first_of_several_bad_entries_is_named(row):
    """Many threads look at once; which one finds its entry first must not matter."""
    edges = torch.zeros(2, 400_000, dtype=torch.int64)
    edges[row, [150_001, 150_002, 399_999]] = torch.tensor([977, 978, 979])
    for _ in range(3):
        with pytest.raises(IndexError, match=naming(977, 150001, 59)):
            sparse.Graph(edges, size=(59, 59))


def test_a_refused_index_is_refused_again():
    edges = edges_with(977, 13, 1)
    for _ in range(2):
        with pytest.raises(IndexError, match="977"):
            sparse.mm(edges, torch.ones(59, 2))
    edges[1, 13] = 5
    assert sparse.mm(edges, torch.ones(59, 2))[5].tolist() == [1.0, 1.0]


def test_any_index_is_out_of_range_where_there_is_no_node():
    with pytest.raises(IndexError, match=naming(0)):
        sparse.mm(torch.zeros(2, 3, dtype=torch.int64), torch.ones(0, 2))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bool, torch.uint8, torch.complex64, torch.int16], ids=str
)
def test_index_dtype(dtype):
    with pytest.raises(TypeError, match=rf"mm: .*int32.*int64.*{dtype}"):
        sparse.mm(torch.zeros(2, 3).to(dtype), X)
    with pytest.raises(TypeError, match=rf"edge_index.*int32.*int64.*{dtype}"):
        sparse.Graph(torch.zeros(2, 3).to(dtype), size=(4, 4))


@pytest.mark.parametrize("shape", [(3, 5), (5,), (1, 5), (2, 5, 1), ()], ids=str)
def test_index_shape(shape):
    with pytest.raises(ValueError, match=r"mm: .*\[2, E\].*" + _shown(shape)):
        sparse.mm(torch.zeros(shape, dtype=torch.int64), X)
    with pytest.raises(ValueError, match=r"edge_index.*\[2, E\].*" + _shown(shape)):
        sparse.Graph(torch.zeros(shape, dtype=torch.int64), size=(4, 4))


def _shown(shape: tuple[int, ...]) -> str:
    return r"[\[(]" + ", ?".join(str(size) for size in shape) + r",?[\])]"


@pytest.mark.parametrize("bad", [None, [[0], [1]], "edges", 3])
def test_graph_argument_type(bad):
    with pytest.raises(TypeError, match=rf"mm: A must .*{type(bad).__name__}"):
        sparse.mm(bad, X)


@pytest.mark.parametrize("bad", [None, [[1.0]], 3.0])
def test_feature_argument_type(bad):
    with pytest.raises(TypeError, match=rf"mm: x must .*{type(bad).__name__}"):
        sparse.mm(EDGES, bad)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool], ids=str)
def test_feature_dtype(dtype):
    with pytest.raises(TypeError, match=rf"mm: x must .*{dtype}"):
        sparse.mm(EDGES, X.to(dtype))


def test_features_need_a_node_dimension():
    with pytest.raises(ValueError, match=r"mm: x must .*dim"):
        sparse.mm(EDGES, torch.tensor(1.0))


@pytest.mark.parametrize("num_rows", [0, 3, 5])
def test_features_must_have_one_row_per_source(num_rows):
    graph = sparse.Graph(EDGES, size=(4, 6))
    with pytest.raises(ValueError, match=rf"mm: x must .*\b4\b.*\b{num_rows}\b"):
        sparse.mm(graph, torch.ones(num_rows, 2))


def test_turned_round_features_must_have_one_row_per_destination():
    graph = sparse.Graph(EDGES, size=(4, 6))
    assert sparse.mm(graph, torch.ones(6, 2), flow="target_to_source").shape == (4, 2)
    with pytest.raises(ValueError, match=r"mm: x must .*\b6\b.*\b4\b"):
        sparse.mm(graph, torch.ones(4, 2), flow="target_to_source")


@pytest.mark.parametrize("shape", [(3,), (5,), (4, 3), (1,), (), (4, 1, 1), (2, 4)], ids=str)
def test_weight_shape(shape):
    with pytest.raises(ValueError, match=r"mm: weight must .*" + _shown(shape)):
        sparse.mm(EDGES, X, weight=torch.ones(shape))


@pytest.mark.parametrize("shape", [(4, 2), (4, 5), (3, 3), (4, 3, 5)], ids=str)
def test_weight_shape_with_heads(shape):
    with pytest.raises(ValueError, match=r"mm: weight must .*" + _shown(shape)):
        sparse.mm(EDGES, torch.ones(4, 3, 5), weight=torch.ones(shape))


@pytest.mark.parametrize("bad", [1.0, [1.0] * 4])
def test_weight_type(bad):
    with pytest.raises(TypeError, match=rf"mm: weight must .*{type(bad).__name__}"):
        sparse.mm(EDGES, X, weight=bad)


def test_weight_dtype():
    with pytest.raises(TypeError, match=r"mm: weight must .*torch\.complex64"):
        sparse.mm(EDGES, X, weight=torch.ones(4, dtype=torch.complex64))


@pytest.mark.parametrize("bad", ["summ", "", "SUM", "median", None, 1])
def test_reduce_name(bad):
    with pytest.raises((ValueError, TypeError), match=r"mm: reduce must .*sum.*mean.*amax.*amin"):
        sparse.mm(EDGES, X, bad)


@pytest.mark.parametrize("bad", ["last", "", None])
def test_ties_name(bad):
    with pytest.raises((ValueError, TypeError), match=r"mm: ties must .*even.*first"):
        sparse.mm(EDGES, X, "amax", ties=bad)


def test_flow_name():
    with pytest.raises(ValueError, match=r"mm: flow must .*source_to_target.*target_to_source"):
        sparse.mm(EDGES, X, flow="sideways")


@pytest.mark.parametrize(
    ("size", "error"),
    [((4,), ValueError), ((4, 4, 4), ValueError), ((-1, 4), ValueError), ((4, 2.5), TypeError),
     (4, (TypeError, ValueError))],
    ids=str,
)  # fmt: skip
def test_graph_size(size, error):
    with pytest.raises(error, match="size must"):
        sparse.Graph(EDGES, size=size)


@pytest.mark.parametrize("bad", [None, [[0], [1]], "edges"])
def test_graph_edge_index_type(bad):
    with pytest.raises(TypeError, match=rf"edge_index must .*{type(bad).__name__}"):
        sparse.Graph(bad, size=(4, 4))


def test_devices_must_agree():
    for call in (
        lambda: sparse.mm(EDGES.to("meta"), X),
        lambda: sparse.mm(EDGES, X, weight=torch.ones(4, device="meta")),
    ):
        with pytest.raises(ValueError, match=r"mm: .*device.*(cpu.*meta|meta.*cpu)"):
            call()


def test_sparse_features_are_refused():
    with pytest.raises(TypeError, match=r"mm: x must .*sparse_coo.*to_dense"):
        sparse.mm(EDGES, X.to_sparse())


def test_cache_limit():
    with pytest.raises(ValueError, match=r"max_bytes must .*-1"):
        sparse.set_cache_limit(-1)
