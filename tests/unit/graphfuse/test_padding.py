"""`pad` before a convolution, and padding given as a word, become the convolution's own padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeweave import graphfuse


class Padded(nn.Module):
    """A pad, a convolution, batch norm and ReLU6."""

    def __init__(
        self, amounts: list[int], rank: int = 2, value: Any = None, **options: Any
    ) -> None:
        super().__init__()
        kinds = {
            1: (nn.Conv1d, nn.BatchNorm1d),
            2: (nn.Conv2d, nn.BatchNorm2d),
            3: (nn.Conv3d, nn.BatchNorm3d),
        }
        conv, norm = kinds[rank]
        self.amounts, self.value = amounts, value
        self.conv, self.norm = conv(4, 8, 3, **options), norm(8)
        nn.init.uniform_(self.norm.weight, 0.5, 2)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.norm(self.conv(F.pad(x, self.amounts, value=self.value))))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("amounts", [[1, 1], [0, 1], [2, 0], [0, 0]])
@pytest.mark.parametrize("padding", [0, 1])
def test_zeros_before_a_convolution(
    assert_fused: Any, rank: int, amounts: list[int], padding: int
) -> None:
    model = Padded(amounts * rank, rank, stride=2, padding=padding)
    assert_fused(model, torch.randn(2, 4, *(9, 7, 6)[:rank]), fused=2)


def test_each_dimension_has_its_own_amounts(assert_fused: Any) -> None:
    assert_fused(Padded([0, 1, 2, 3]), torch.randn(2, 4, 9, 7), fused=2)
    assert_fused(Padded([1, 2]), torch.randn(2, 4, 9, 7), fused=2)  # the last dimension only
    assert_fused(Padded([1, 2, 0, 3, 0, 0]), torch.randn(2, 4, 9, 7), fused=2)  # and channels by 0


@pytest.mark.parametrize(
    ("amounts", "value"), [([1, 1, 1, 1], 0.5), ([-1, 0, 0, 0], None), ([1, 1, 0, 0, 1, 0], None)]
)
def test_other_pads_stay(assert_fused: Any, amounts: list[int], value: Any) -> None:
    x = torch.randn(2, 3 if len(amounts) == 6 else 4, 9, 7)
    made = assert_fused(Padded(amounts, value=value), x, fused=2)
    assert [r.op for r in made.report().refused] == ["aten.pad.default"]


def test_a_pad_that_others_read_stays(assert_fused: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            padded = F.pad(x, [0, 1, 0, 1])
            return self.conv(padded), padded.sum()

    model = Twice().eval()
    x = torch.randn(2, 4, 9, 7)
    made = graphfuse.fuse(model, x, keep="all")
    torch.testing.assert_close(made(x), model(x))
    assert "aten.pad.default" in [r.op for r in made.report().refused]


def test_two_convolutions_read_one_pad(assert_fused: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            padded = F.pad(x, [0, 1, 1, 1])
            return self.a(padded) + self.b(padded)

    made = assert_fused(Two(), torch.randn(2, 4, 9, 7), fused=3)
    assert made.report().refused == ()


def test_without_a_batch_it_stays(call: Any) -> None:
    model = Padded([0, 1, 0, 1]).eval()
    bare = call(lambda x: model.conv(F.pad(x, [0, 1, 0, 1])))
    bare.conv = model.conv
    bare.eval()
    x = torch.randn(4, 9, 7)
    made = graphfuse.fuse(bare, x, keep="all")
    torch.testing.assert_close(made(x), bare(x))


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("dilation", [1, 2])
def test_padding_as_a_word(assert_fused: Any, kernel: int, padding: str, dilation: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, kernel, padding=padding, dilation=dilation, bias=False),
        nn.BatchNorm2d(8),
        nn.SiLU(),
    )
    made = assert_fused(model, torch.randn(2, 4, 11, 9), fused=2)
    assert made.report().refused == ()


def test_in_aten_it_is_the_two_calls(assert_fused: Any) -> None:
    model = Padded([0, 1, 0, 1]).eval()
    made = graphfuse.fuse(model, torch.randn(2, 4, 9, 7), keep="all", nan="propagate")
    x = torch.randn(2, 4, 9, 7)
    x[0, 0, 0, 0] = float("nan")
    torch.testing.assert_close(made(x), model(x), equal_nan=True)
    engine = made._engines[0]
    engine.forced = {node.name: "for this test" for node in engine.nodes}
    engine.drop_plans()
    torch.testing.assert_close(made(x), model(x), equal_nan=True)
    assert made.report().partitions == ()


def test_sizes_may_change(assert_fused: Any) -> None:
    model = Padded([0, 1, 0, 1], stride=2).eval()
    made = graphfuse.fuse(model, torch.randn(2, 4, 9, 7), keep="all", dynamic=True)
    for shape in ((2, 4, 9, 7), (5, 4, 12, 6)):
        x = torch.randn(shape)
        torch.testing.assert_close(made(x), model(x))
    assert [r.op for r in made.report().refused] == []


def test_a_saved_graph_folds_it_again(tmp_path: Any) -> None:
    model, x = Padded([0, 1, 0, 1]).eval(), torch.randn(2, 4, 9, 7)
    graphfuse.fuse(model, x, keep="all").save(tmp_path)
    loaded = graphfuse.load(tmp_path)
    torch.testing.assert_close(loaded(x), model(x))
    assert len(loaded.report().partitions) == 1


class TestLayouts:
    """A value that is read permuted is written so that the permuted one is dense."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 16, 7, padding=3, groups=16)
            self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x).permute(0, 2, 3, 1))
            return x + self.linear(y).permute(0, 3, 1, 2)

    def test_one_program_and_the_same_numbers(self, assert_fused: Any) -> None:
        made = assert_fused(nn.Sequential(self.Block(), self.Block()), torch.randn(2, 16, 9, 7))
        report = made.report()
        assert report.refused == ()
        assert report.segments == 1
        (segment,) = made._engines[0].plan(made._settings["example_symbols"]).segments
        # [N, C, H, W] with the channels next to each other, and the view of it dense.
        written = {stride for stride in segment._layouts.values()}
        assert written == {(1008, 1, 112, 16), (1008, 112, 16, 1)}

    def test_a_result_keeps_the_strides_of_eager(self, call: Any) -> None:
        conv = nn.Conv2d(4, 8, 3)
        model = nn.ModuleList([conv])
        bare = call(lambda x: (model[0](x), model[0](x).permute(0, 2, 3, 1)))
        bare.model = model
        x = torch.randn(2, 4, 9, 7)
        made = graphfuse.fuse(bare.eval(), x, keep="all")
        for found, expected in zip(made(x), bare(x), strict=True):
            torch.testing.assert_close(found, expected)
            assert found.stride() == expected.stride()

    class Downsampled(nn.Module):
        def __init__(self, after: Any) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 4, 4), nn.Conv2d(16, 32, 2, 2)
            self.norm, self.linear, self.after = nn.LayerNorm(16), nn.Linear(16, 16), after

        def forward(self, x: Tensor) -> Tensor:
            y = self.after(self, self.a(x).permute(0, 2, 3, 1))
            return self.b(y.permute(0, 3, 1, 2))

    @pytest.mark.parametrize(
        "after",
        [
            lambda self, y: self.norm(y),
            lambda self, y: self.linear(y),
            lambda self, y: y.softmax(-1),
            lambda self, y: torch.relu(y * 2),
            lambda self, y: y + self.norm(y),
            lambda self, y: torch.relu(self.norm(y)),
            lambda self, y: self.norm(y.transpose(1, 2)).transpose(1, 2),
            lambda self, y: torch.cat([y[..., :8], y[..., 8:]], -1),
        ],
    )
    def test_permuted_and_back(self, assert_fused: Any, after: Any) -> None:
        # A layer norm that wrote its result permuted was off by all there is.
        made = assert_fused(self.Downsampled(after), torch.randn(2, 3, 32, 40))
        (whole,) = [line for line in made.verify() if line.inputs == "whole"]
        assert whole.good

    def test_verify_sees_what_partitions_hand_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from edgeweave.graphfuse import _segment

        monkeypatch.setattr(_segment, "_ANY_ORDER", _segment._ANY_ORDER | {"layer_norm"})
        model = self.Downsampled(lambda self, y: self.norm(y)).eval()
        made = graphfuse.fuse(model, torch.randn(2, 3, 32, 40), keep="all")
        if graphfuse.load_library().version != "3.2.0":
            pytest.skip("the fault that this looks for is one of oneDNN 3.2.0")
        assert [line.inputs for line in made.verify() if not line.good] == ["whole"]
