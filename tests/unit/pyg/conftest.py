"""Fixtures of the drop-in's tests: a clean start, and a comparison with stock PyG."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import edgeweave.pyg

# torch_geometric scripts some of its own classes when it is first imported, which torch 2.13 calls
# deprecated; in this suite warnings are errors, and this one is not ours to mend.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch_geometric.nn  # noqa: F401


@pytest.fixture(autouse=True)
def _stock_pyg_before_and_after() -> Iterator[None]:
    edgeweave.pyg.restore()
    edgeweave.pyg.reset_report()
    torch.manual_seed(0)
    yield
    edgeweave.pyg.restore()


def _run(call: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Return the output of `call` and the gradients of `leaves` for a fixed cotangent."""
    for leaf in leaves:
        leaf.grad = None
    out = call()
    if out.requires_grad:
        cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        out.backward(cotangent)
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return [out.detach(), *grads]


# Sums of a few hundred float64 products in another order: a relative error of 1e-12 is far above
# what reordering gives and far below what a wrong edge, weight or tie would give.
_TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def same_as_stock() -> Callable[..., Tensor]:
    """Compare a call, and its gradients, accelerated and not; returns the accelerated output."""

    def compare(call: Callable[[], Tensor], leaves: list[Tensor] | None = None) -> Tensor:
        leaves = leaves or []
        # Dropout and the like must draw the same numbers in both runs.
        torch.manual_seed(1)
        stock = _run(call, leaves)
        torch.manual_seed(1)
        with edgeweave.pyg.accelerated():
            ours = _run(call, leaves)
        for index, (a, b) in enumerate(zip(ours, stock, strict=True)):
            what = "output" if index == 0 else f"gradient of leaf {index - 1}"
            torch.testing.assert_close(a, b, **_TOLERANCE, msg=lambda text, w=what: f"{w}: {text}")
        return ours[0]

    return compare


@pytest.fixture
def edge_index() -> Tensor:
    """40 nodes, 200 edges: duplicates, self-loops, and nodes 35 to 39 without any edge."""
    edges = torch.randint(0, 35, (2, 200))
    edges[:, :4] = torch.tensor([[3, 3, 7, 7], [3, 3, 7, 9]])
    return edges


@pytest.fixture
def only_fused() -> Callable[..., Any]:
    """Assert that a call site was fused a given number of times and never fell back."""

    def check(site: str, times: int) -> None:
        entry = edgeweave.pyg.report()[site]
        assert (entry.fused, dict(entry.reasons)) == (times, {})

    return check
