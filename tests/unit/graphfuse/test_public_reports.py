"""Inputs on which other fusers were reported to fail."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeweave import graphfuse


@pytest.mark.parametrize("channels", [1, 6])
def test_few_input_channels_in_channels_last(assert_fused: Any, channels: int) -> None:
    x = torch.randn(2, channels, 10, 10).to(memory_format=torch.channels_last)
    assert_fused(nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU()), x, fused=2)


def test_attention_out_of_pointwise_convolutions_on_axes_of_two(assert_fused: Any) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Conv2d(8, 8, 1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (f(x).flatten(2) for f in (self.q, self.k, self.v))
            weights = (q.transpose(1, 2) @ k / 8**0.5).softmax(-1)
            return (v @ weights.transpose(1, 2)).view_as(x)

    made = assert_fused(Attention(), torch.randn(2, 8, 2, 2))
    assert len(made.report().partitions) >= 4


def test_invalid_output_padding_is_no_silent_success() -> None:
    model = nn.ConvTranspose2d(4, 4, 3, stride=1, output_padding=2).eval()
    x = torch.randn(1, 4, 5, 5)
    with pytest.raises(RuntimeError, match="output padding must be smaller"):
        model(x)
    with pytest.raises(ValueError, match="output_padding must be smaller than stride"):
        graphfuse.fuse(model, x, keep="all")


def test_conv3d_with_a_large_kernel(assert_fused: Any) -> None:
    assert_fused(nn.Conv3d(1, 2, 15, padding=7), torch.randn(1, 1, 8, 8, 8), fused=1)


def test_batch_norm_with_the_statistics_of_the_batch(assert_fused: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    assert_fused(model, torch.randn(4, 3, 8, 8), fused=1)


def test_linear_with_a_batch_norm_of_another_size() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5)).eval()
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError):
        model(x)
    with pytest.raises(graphfuse.FuseError, match="cannot capture Sequential"):
        graphfuse.fuse(model, x, keep="all")


def test_linear_before_a_batch_norm_over_another_dimension(assert_fused: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    nn.init.uniform_(model[1].running_var, 0.5, 2)
    assert_fused(model, torch.randn(3, 4, 8), fused=1)


def test_called_under_autocast_it_keeps_its_own_precision() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    x = torch.randn(4, 8)
    made = graphfuse.fuse(model, x, keep="all")
    expected = made(x)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            found = made(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_cat_of_two_dtypes(assert_fused: Any, call: Any) -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3).bfloat16()
    made = graphfuse.fuse(call(lambda x, y: torch.cat([x, y], 1)).eval(), (x, y), keep="all")
    assert torch.equal(made(x, y), torch.cat([x, y], 1))


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.ReLU6()
    ).eval()


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_second_forward_with_another_batch(dynamic: bool | None) -> None:
    model = _convolutional()
    made = graphfuse.fuse(model, torch.randn(4, 3, 12, 12), keep="all", dynamic=dynamic)
    for batch in (4, 7, 1, 4, 2):
        x = torch.randn(batch, 3, 12, 12)
        torch.testing.assert_close(made(x), model(x))
    assert not made.report().eager_calls


def test_memory_is_bounded_over_many_sizes() -> None:
    model = _convolutional()
    made = graphfuse.fuse(model, torch.randn(2, 3, 12, 12), keep="all", dynamic=True)
    for size in range(8, 60):
        made(torch.randn(2, 3, size, size + 1))
    (engine,) = made._engines
    assert len(engine._plans) <= 16


def test_variable_sequence_length() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)).eval()
    made = graphfuse.fuse(model, torch.randn(2, 5, 16), keep="all", dynamic=True)
    for length in (3, 9, 64, 5):
        x = torch.randn(2, length, 16)
        torch.testing.assert_close(made(x), model(x))
    # One graph with one set of partitions serves every length.
    assert len(made._engines) == 1
    cuts = {id(plan.cut) for plan in made._engines[0]._plans.values()}
    assert len(cuts) == 1


def test_the_number_of_threads_may_change() -> None:
    model = _convolutional()
    x = torch.randn(2, 3, 20, 20)
    made = graphfuse.fuse(model, x, keep="all")
    expected = model(x)
    for threads in (1, 2, 1, 3):
        torch.set_num_threads(threads)
        torch.testing.assert_close(made(x), expected)


def test_two_models_share_a_weight() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    first, second = nn.Linear(8, 8).eval(), nn.Linear(8, 8, bias=False).eval()
    first.weight = second.weight = weight
    x = torch.randn(4, 8)
    fused = [graphfuse.fuse(model, x, keep="all") for model in (first, second)]
    for _ in range(2):
        for model, made in zip((first, second), fused, strict=True):
            torch.testing.assert_close(made(x), model(x))
        with torch.no_grad():
            weight.add_(1)


def test_one_model_in_four_threads() -> None:
    model = _convolutional()
    xs = [torch.randn(2, 3, 16, 16) for _ in range(4)]
    made = graphfuse.fuse(model, xs[0], keep="all")
    with torch.no_grad():
        expected = [model(x) for x in xs]
    faults: list[str] = []

    def work(index: int) -> None:
        for _ in range(25):
            found = made(xs[index])
            # Threads may split the work otherwise than the main thread does.
            if not torch.allclose(found, expected[index], atol=1e-5, rtol=1e-5):
                faults.append(f"thread {index} is wrong by {(found - expected[index]).abs().max()}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_results_are_not_overwritten_by_the_next_call() -> None:
    model = _convolutional()
    made = graphfuse.fuse(model, torch.randn(2, 3, 16, 16), keep="all")
    x, y = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
    first = made(x)
    kept = first.clone()
    made(y)
    assert torch.equal(first, kept)


def test_dropout_and_functional_calls(assert_fused: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(F.dropout(self.layer(x), 0.5, self.training), inplace=True)

    assert_fused(Model(), torch.randn(4, 8), fused=2)
