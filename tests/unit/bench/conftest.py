"""PyG is a peer in most of these tests, and must be stock PyG at the start of each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from edgeweave import pyg

# torch_geometric scripts some of its own classes when it is first imported, which torch 2.13 calls
# deprecated; in this suite warnings are errors, and this one is not ours to mend.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch_geometric.nn  # noqa: F401


@pytest.fixture(autouse=True)
def _stock_pyg_before_and_after() -> Iterator[None]:
    pyg.restore()
    pyg.reset_report()
    # Tiny inputs: a second thread only waits here, for long if the machine is busy.
    torch.set_num_threads(1)
    yield
    pyg.restore()
