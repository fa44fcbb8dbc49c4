"""The oracle must let rounding pass and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgeweave.jitfuser import _build, optimize
from edgeweave.jitfuser._capture import Capture, flatten
from edgeweave.jitfuser._oracle import Oracle, distance


class Deep(nn.Module):
    """Chaotic: each step triples a difference, so that two right fp32 results are far apart."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = 3.9 * x * (1 - x)
        return x


def oracle_of(
    model: nn.Module, inputs: Sequence[Tensor], keep_nan: bool = True
) -> tuple[Oracle, Capture]:
    tensors: list[Tensor] = []
    capture = Capture(model, flatten((tuple(inputs), {}), tensors, "inputs"))

    def eager(*given: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return capture(*given)  # type: ignore[no-any-return]

    return Oracle(capture, tensors, eager, keep_nan=keep_nan), capture


def test_sharing_memory_with_an_input_is_part_of_the_result() -> None:
    """Who writes into the result of an identity sees it in the input; a copy is another thing."""
    oracle, capture = oracle_of(nn.Identity(), [torch.randn(4, 6)])
    assert oracle.complaint(capture) is None
    assert "share memory" in str(oracle.complaint(lambda x: (x.clone(),)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda y: y, None),
        (lambda y: y * (1 + 2.0**-20), None),
        (lambda y: y * 1.001, "is off by"),
        (lambda y: y.double(), "is torch.float64 of shape"),
        (lambda y: y[:, :1], "in eager torch.float32 of shape"),
        (lambda y: y.nan_to_num(nan=0.0), "NaN inputs: result 0 has nan in 0 places"),
        (
            lambda y: torch.where(y.isinf(), math.nan, y),
            "infinite inputs: result 0 has nan in 1 places, in eager in 0",
        ),
    ],
)
def test_judgement(change: Callable[[Tensor], Tensor], complaint: str | None) -> None:
    oracle, capture = oracle_of(nn.Hardshrink(0.0), [torch.randn(4, 6)])
    found = oracle.complaint(lambda *given: tuple(change(y) for y in capture(*given)))
    if complaint is None:
        assert found is None
    else:
        assert complaint in str(found)


class Infinite(nn.Module):
    """An infinity that comes in makes a NaN within, which a fused ReLU loses."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x - x.sum(1, keepdim=True)) + x


@pytest.mark.parametrize("keep_nan", [False, True])
def test_nan_that_may_be_lost(keep_nan: bool) -> None:
    """With `nan="fast"` a network whose ReLUs lose NaN is right, as it is with the hand recipe."""
    oracle, capture = oracle_of(Infinite(), [torch.randn(4, 6)], keep_nan)

    def fused(x: Tensor) -> tuple[Tensor, ...]:
        return ((x - x.sum(1, keepdim=True)).nan_to_num(0, math.inf, -math.inf).relu() + x,)

    complaint = oracle.complaint(fused)
    assert (complaint is None) == (not keep_nan)
    # A NaN that eager does not have is wrong in both.
    worse = lambda x: tuple(torch.where(y.isinf(), math.nan, y) for y in capture(x))  # noqa: E731
    spoiled = lambda x: tuple(torch.where(y == y.max(), math.nan, y) for y in worse(x))  # noqa: E731
    assert "has nan in" in str(oracle.complaint(spoiled))


def test_integers_must_be_equal() -> None:
    class Sort(nn.Module):
        def forward(self, i: Tensor) -> Tensor:
            return i.sort().values

    oracle, capture = oracle_of(Sort(), [torch.arange(6)])
    assert oracle.complaint(capture) is None
    assert "other values" in str(oracle.complaint(lambda i: (i.clone(),)))


def test_a_candidate_as_close_to_float64_as_eager_is_right() -> None:
    """Far from eager, but no further from the truth than eager itself."""
    x = torch.rand(64, 8) * 0.5 + 0.2
    oracle, _ = oracle_of(Deep(), [x])
    exact = Deep()(x.double())
    eager = Deep()(x)
    mirrored = (2 * exact - eager.double()).float()
    assert distance(mirrored, eager) > 128 * torch.finfo(torch.float32).eps
    trial = lambda *given: (mirrored,) if given[0] is x else (Deep()(given[0]),)  # noqa: E731
    assert oracle.complaint(trial) is None
    further = (exact + 20 * (exact - eager.double())).float()
    worse = lambda *given: (further,) if given[0] is x else (Deep()(given[0]),)  # noqa: E731
    assert "is off by" in str(oracle.complaint(worse))


def test_what_the_model_refuses_is_no_trial() -> None:
    class Strict(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not bool(x.isfinite().all()):
                raise ValueError("finite numbers only")
            return x * 2

    oracle, capture = oracle_of(Strict(), [torch.ones(3)])
    assert oracle.complaint(capture) is None


def test_wrong_candidates_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge that is wrong in a way that no rule knows: each level is refused in turn."""
    monkeypatch.setattr(_build, "_medians", lambda sides: [1.0, *[0.5] * (len(sides) - 1)])
    real = _build.make_candidate

    def spoiled(*args: object, **kwargs: object) -> object:
        candidate = real(*args, **kwargs)  # type: ignore[arg-type]
        if candidate.level == "frozen":
            return candidate
        inner = candidate.function
        object.__setattr__(candidate, "function", lambda *x: tuple(y * 1.01 for y in inner(*x)))
        return candidate

    monkeypatch.setattr(_build, "make_candidate", spoiled)
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    fast = optimize(model, x)
    (shape,) = fast.report().shapes
    assert shape.state == "frozen"
    assert [
        "fused: example inputs" in r or "products: example inputs" in r for r in shape.reasons
    ] == [
        True,
        True,
    ]
    torch.testing.assert_close(fast(x), model(x).detach())


def test_roundings_of_bfloat16_are_allowed_on_other_integers_too() -> None:
    """Under autocast eager's own roundings are bfloat16's, though its results are float32."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(50, 64), nn.Linear(64, 64)
            self.norm = nn.LayerNorm(64)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.norm(self.linear(self.table(tokens)))  # type: ignore[no-any-return]

    tokens = torch.randint(0, 50, (4, 16))
    tensors: list[Tensor] = []
    capture = Capture(Tokens().eval(), flatten(((tokens,), {}), tensors, "inputs"))

    def eager(*given: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return capture(*given)  # type: ignore[no-any-return]

    oracle = Oracle(capture, tensors, eager, keep_nan=True)

    def noisy(factor: float) -> Any:
        def run(*given: Tensor) -> tuple[Tensor, ...]:
            return tuple(y + factor * 2.0**-8 * torch.randn_like(y) for y in eager(*given))

        return run

    assert oracle.complaint(noisy(0.5)) is None
    assert "example inputs: result 0 is off by" in str(oracle.complaint(noisy(500)))
    example = oracle._trials.pop(0)  # the integers alone
    assert oracle.complaint(noisy(0.5)) is None
    assert "integer inputs: result 0 is off by" in str(oracle.complaint(noisy(500)))
    assert example.name == "example"
