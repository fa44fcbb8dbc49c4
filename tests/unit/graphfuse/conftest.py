"""What the tests of graphfuse share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgeweave import graphfuse
from edgeweave.graphfuse import _measure


def distance(found: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest finite magnitude of the exact result."""
    exact = exact.double()
    assert found.shape == exact.shape
    assert torch.equal(found.isnan(), exact.isnan())
    scale = float(exact.nan_to_num(0, 0, 0).abs().max()) if exact.numel() else 1.0
    difference = (found.double() - exact).nan_to_num(0, 0, 0).abs()
    return float(difference.max() if exact.numel() else 0.0) / max(scale, 1e-30)


def assert_near(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    """As near to float64 as eager is, within four times for another order of summation."""
    # A few roundings are allowed where eager happens to be exact.
    limit = max(4 * distance(eager, exact), 32 * torch.finfo(torch.float32).eps)
    assert distance(found, exact) <= limit
    assert found.dtype == eager.dtype


@pytest.fixture
def assert_fused() -> Callable[..., graphfuse.FusedModule]:
    """Return a function that fuses a model, compares it with eager, and counts what was fused."""

    def check(
        model: nn.Module, *args: Any, fused: int | None = None, **settings: Any
    ) -> graphfuse.FusedModule:
        model = model.eval()
        made = graphfuse.fuse(model, args, keep="all", **settings)
        with torch.no_grad():
            eager = model(*args)
            wide = [
                a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
            ]
            model.double()
            exact = model(*wide)
            model.float()
        assert_near(made(*args), eager, exact)
        report = made.report()
        assert not report.eager_calls, report.eager_calls
        if fused is not None:
            nodes = sum(len(partition.nodes) for partition in report.partitions)
            assert nodes == fused, str(report)
        return made

    return check


class Call(nn.Module):
    """A module around a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@pytest.fixture
def call() -> type[Call]:
    return Call


@pytest.fixture
def assert_packed() -> Callable[..., graphfuse.FusedModule]:
    """Return a function that fuses a model, compares it with eager, and counts what was packed."""

    def check(model: nn.Module, *args: Tensor, packed: int) -> graphfuse.FusedModule:
        model = model.eval()
        made = graphfuse.fuse(model, args)
        with torch.no_grad():
            eager = model(*args)
            exact = model.double()(*(a.double() for a in args))
            model.float()
        assert_near(made(*args), eager, exact)
        assert made(*args).stride() == eager.stride()
        report = made.report()
        assert report.mode == "fused"
        assert sum(len(product.nodes) for product in report.packed) == packed, str(report)
        assert not report.eager_calls
        return made

    return check


def targets_of(made: graphfuse.FusedModule) -> list[str]:
    """What its first engine calls."""
    return [node.target for node in made._engines[0].nodes]


def run_all(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Have everything that can run in a way outside of partitions do so, whatever was measured."""

    def leave_out(fused: Any, eager: Any, options: Any) -> Any:
        own = {
            name: [option for option in found if option.how == how]
            for name, found in options.items()
        }
        names = {n for found in own.values() for o in found for n in _measure._covers(o)}
        names |= {n for nodes in fused if not names.isdisjoint(nodes) for n in nodes}
        chosen = {name: how for name, found in own.items() if found}
        return dict.fromkeys(names, "in this test"), chosen

    monkeypatch.setattr(_measure, "_leave_out", leave_out)
    monkeypatch.setattr(
        _measure, "time_sides", lambda sides, made=False: {n: 1.0 + (n == "eager") for n in sides}
    )
