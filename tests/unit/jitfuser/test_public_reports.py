"""Models from public bug reports against torch's CPU fusion and freezing: ours answers as eager."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeweave.jitfuser import _build, fuser, optimize

# fp32 sums of some hundred to some thousand terms in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _fused_even_if_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "_medians", lambda sides: [1.0, *[0.5] * (len(sides) - 1)])


class ConvAttention(nn.Module):
    """Attention whose projections are 1x1 convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(x).reshape(b, 3, c, h * w).unbind(1)
        scores = (q.transpose(1, 2) @ k / c**0.5).softmax(-1)
        return self.out((v @ scores.transpose(1, 2)).reshape(b, c, h, w))


class CatOfDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(x), x.bfloat16()], 1)


class Addmm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def norms_of_batches() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.ReLU()
    )


MODELS: dict[str, tuple[Any, Tensor]] = {
    "one channel": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), torch.randn(2, 1, 9, 9)),
    "six channels": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.ReLU()), torch.randn(2, 6, 9, 9)),
    "attention on 2x2": (lambda: ConvAttention(4), torch.randn(2, 4, 2, 2)),
    "attention on 2x1": (lambda: ConvAttention(2), torch.randn(2, 2, 2, 1)),
    "conv3d of kernel 15": (lambda: nn.Conv3d(1, 2, 15), torch.randn(1, 1, 16, 16, 16)),
    "statistics of the batch": (norms_of_batches, torch.randn(4, 3, 8, 8)),
    "addmm": (Addmm, torch.randn(4, 8)),
    "cat of two dtypes": (CatOfDtypes, torch.randn(4, 8)),
    "transposed": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
        torch.randn(2, 3, 5, 5),
    ),
    # Folded, this norm over the sequence would need 5 weights of a layer with 8 outputs.
    "norm of another width": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5)),
        torch.randn(2, 5, 8),
    ),
}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_model(name: str, layout: str) -> None:
    make, x = MODELS[name]
    model = make().eval()
    if layout == "channels_last":
        if x.dim() != 4:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        else:
            x = x.contiguous(memory_format=torch.channels_last)
    fast = optimize(model, x)
    with torch.no_grad():
        for inputs in (x, x.flip(0), x):
            torch.testing.assert_close(fast(inputs), model(inputs), **CLOSE)
    assert fast.report().shapes[0].state != "eager", str(fast.report())


def test_invalid_output_padding_is_refused_as_in_eager() -> None:
    model, x = (
        nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=2).eval(),
        torch.randn(1, 3, 5, 5),
    )
    with pytest.raises(RuntimeError, match="output padding must be smaller"):
        model(x)
    with pytest.raises(RuntimeError, match="output padding must be smaller"):
        optimize(model, x)


def test_later_calls_with_another_dtype() -> None:
    model, x = nn.Sequential(nn.Hardtanh(), nn.Softsign()).eval(), torch.randn(4, 8)
    fast = optimize(model, x)
    for dtype in (torch.float64, torch.bfloat16, torch.float32, torch.float16):
        ours, eager = fast(x.to(dtype)), model(x.to(dtype))
        assert ours.dtype is dtype
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("sizes", [[(1, 3, 8, 8), (4, 3, 8, 8)], [(1, 3, 8, 8), (1, 3, 12, 10)]])
def test_second_call_with_another_size(sizes: list[tuple[int, ...]]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    fast = optimize(model, torch.randn(sizes[0]))
    with torch.no_grad():
        for size in (*sizes, *sizes):
            x = torch.randn(size)
            torch.testing.assert_close(fast(x), model(x), **CLOSE)


def test_memory_is_bounded_with_varying_sizes() -> None:
    """torch keeps memory of each function for good, so their number is bounded."""
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).eval()
    fast = optimize(model, torch.randn(1, 256), max_shapes=2, verify=False)

    def grow(rows: range) -> int:
        for n in rows:
            fast(torch.randn(n, 256))
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    before = grow(range(2, 30))
    after = grow(range(30, 90))
    # 60 more functions would keep 80 MiB; the allocator's own noise is a few.
    assert after - before < 24 << 20
    report = fast.report()
    assert (len(report.shapes), report.evicted) == (2, 6)
    assert report.overflowed == 88 - 7


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_keeps_stale_weights_after_freezing_and_ours_does_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(1, 3, 4, 4)
    fast = optimize(model, x)
    with torch.no_grad():
        with fuser("fuser3"):
            frozen = torch.jit.freeze(torch.jit.trace(model, x))
            for _ in range(3):
                before = frozen(x)
        model[0].weight.mul_(2.0)
        assert torch.equal(frozen(x), before)
        assert not torch.allclose(model(x), before)
        torch.testing.assert_close(fast(x), model(x), **CLOSE)


def test_scaled_dot_product_attention_stays_with_torch() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model, x = Attend().eval(), torch.randn(2, 5, 8)
    fast = optimize(model, x)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), **CLOSE)
    assert fast.report().shapes[0].left_out["scaled_dot_product_attention"] == 1
