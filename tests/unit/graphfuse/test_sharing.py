"""Equal calls are made once."""

from __future__ import annotations

from typing import Any

import torch

from edgeweave import graphfuse


def test_equal_calls_are_made_once(assert_fused: Any, call: Any) -> None:
    made = assert_fused(
        call(lambda x: torch.tanh(x * 2) + torch.sigmoid(x * 2)), torch.randn(4, 6), fused=4
    )
    assert [node.target for node in made._engines[0].nodes].count("aten.mul.Tensor") == 1


def test_numbers_of_several_types_are_not_equal(call: Any) -> None:
    x = torch.arange(6).view(2, 3)
    model = call(lambda x: (x * 2, x * 2.0, x * True, x.sum(0), x.sum(0, keepdim=True))).eval()
    made = graphfuse.fuse(model, x)
    for found, expected in zip(made(x), model(x), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_results_stay_apart(call: Any) -> None:
    model = call(lambda x: (x.relu(), x.relu())).eval()
    made = graphfuse.fuse(model, torch.randn(4, 6), keep="all")
    first, second = made(torch.randn(4, 6))
    assert first.data_ptr() != second.data_ptr()
    first.zero_()
    assert second.abs().sum() > 0


def test_random_calls_are_not_shared(call: Any) -> None:
    model = call(lambda x: torch.rand_like(x) - torch.rand_like(x)).eval()
    made = graphfuse.fuse(model, torch.randn(40, 6))
    assert made(torch.randn(40, 6)).abs().sum() > 0
