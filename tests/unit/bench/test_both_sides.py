"""Training by both sides: who is accelerated when, and what counts as the same."""

from __future__ import annotations

import pytest

import edgeweave.pyg
from edgeweave.bench.both_sides import BothSides, Training, train_both


def both(stock: tuple[float, ...], ours: tuple[float, ...], noise: float = 0.02) -> BothSides:
    return BothSides("accuracy", stock, ours, 0.4, 0.1, noise)


def test_each_seed_is_trained_by_both_sides() -> None:
    seen = []

    def train(seed: int) -> Training:
        for epoch in range(2):
            seen.append((seed, epoch, edgeweave.pyg.is_accelerated()))
            yield
        return 10.0 * seed + edgeweave.pyg.is_accelerated()

    result = train_both(train, [3, 4], measure="points", noise=1.0, title="t", epochs=2)
    assert seen == [(s, e, on) for on in (False, True) for s in (3, 4) for e in (0, 1)]
    assert (result.stock, result.ours) == ((30.0, 40.0), (31.0, 41.0))
    assert result.difference == 1.0
    assert result.agrees
    assert not edgeweave.pyg.is_accelerated()
    assert result.stock_epoch_s > 0
    assert result.ours_epoch_s > 0


def test_the_first_epoch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 100.0, 100.0, 101.0, 101.0, 103.0, 103.0] * 2)
    monkeypatch.setattr("edgeweave.bench.both_sides.time.perf_counter", lambda: next(now))

    def train(seed: int) -> Training:
        yield
        yield
        yield
        return 0.0

    result = train_both(train, [0], measure="points", noise=1.0, title="t", epochs=3)
    assert result.stock_epoch_s == result.ours_epoch_s == 1.5


def test_what_agrees() -> None:
    assert both((0.8, 0.7), (0.81, 0.72)).agrees
    assert not both((0.8, 0.7), (0.83, 0.72)).agrees
    assert not both((0.83, 0.72), (0.8, 0.7)).agrees
    assert not both((0.8,), (float("nan"),)).agrees
    assert "DISAGREE: difference +0.0250, noise 0.02; 4.00x" in str(both((0.8, 0.7), (0.83, 0.72)))
    assert "stock PyG    accuracy 0.800, 400.0 ms/epoch" in str(both((0.8,), (0.8,)))


def test_an_error_ends_the_acceleration() -> None:
    def train(seed: int) -> Training:
        yield
        if edgeweave.pyg.is_accelerated():
            raise RuntimeError("stopped")
        return 0.0

    with pytest.raises(RuntimeError, match="stopped"):
        train_both(train, [0], measure="points", noise=1.0, title="t", epochs=1)
    assert not edgeweave.pyg.is_accelerated()


def test_no_seed_is_an_error() -> None:
    with pytest.raises(ValueError, match="seeds must be at least one"):
        train_both(lambda seed: iter(()), [], measure="", noise=0.0, title="", epochs=1)
