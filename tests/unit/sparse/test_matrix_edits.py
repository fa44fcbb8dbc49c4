"""Matrices whose indices are edited between two products."""

import numpy as np
import pytest
import scipy.sparse
import torch

from edgeweave import sparse

NODES = 300


def torch_csr(per_row: int) -> torch.Tensor:
    """The same number of entries in every row, at columns 0, 1, 2 ..."""
    ptr = torch.arange(NODES + 1) * per_row
    col = torch.arange(per_row).repeat(NODES)
    shape = (NODES, max(NODES, per_row))
    return torch.sparse_csr_tensor(ptr, col, torch.rand(len(col)), shape, check_invariants=False)


@pytest.mark.parametrize("per_row", [5, 400], ids=["small", "sampled"])  # 1,500 and 120,000 entries
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_edit_of_the_columns_in_place_is_noticed(per_row):
    A = torch_csr(per_row)
    x = torch.randn(A.shape[1], 3)
    torch.testing.assert_close(sparse.mm(A, x), A.to_dense() @ x, atol=1e-4, rtol=1e-4)
    A.col_indices()[7] = A.shape[1] - 1 if per_row < A.shape[1] else 0
    A.values()[7] = 1000.0
    dense = torch.zeros(A.shape)
    rows = torch.arange(NODES).repeat_interleave(per_row)
    dense.index_put_((rows, A.col_indices()), A.values(), accumulate=True)
    torch.testing.assert_close(sparse.mm(A, x), dense @ x, atol=1e-3, rtol=1e-4)


def test_scipy_indices_sorted_in_place_are_noticed():
    rng = np.random.default_rng(0)
    A = scipy.sparse.random_array((2000, 2000), density=0.03, format="csr", rng=rng)
    assert A.nnz >= 100_000
    start, stop = A.indptr[1000], A.indptr[1001]
    A.indices[start:stop] = A.indices[start:stop][::-1].copy()
    A.data[start:stop] = A.data[start:stop][::-1].copy()
    A.has_sorted_indices = False
    x = torch.randn(2000, 3, dtype=torch.float64)
    before = sparse.mm(A, x)
    A.sort_indices()
    # The same matrix: the same product, up to the order of a row's sum.
    torch.testing.assert_close(sparse.mm(A, x), before, atol=1e-12, rtol=1e-12)


def test_read_only_scipy_arrays_are_accepted():
    A = scipy.sparse.csr_array(np.eye(4))
    for part in (A.indptr, A.indices, A.data):
        part.flags.writeable = False
    x = torch.randn(4, 2, dtype=torch.float64)
    assert torch.equal(sparse.mm(A, x), x)
