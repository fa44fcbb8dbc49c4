"""`compare`: what each layer gains, and that it leaves nothing behind."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import BatchNorm, GCNConv, GMMConv, SAGEConv

import edgeweave.pyg
from edgeweave.pyg import _compare, compare


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv(16, 32, aggr="max")
        self.norm = BatchNorm(32)
        self.second = GMMConv(32, 8, dim=3, kernel_size=2, aggr="add")

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> dict[str, Tensor]:
        x = nn.functional.dropout(self.norm(self.first(x, edge_index)).relu(), training=True)
        return {"out": self.second(x, edge_index, attr)}


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    # Without a gradient for x, stock keeps nothing of its messages either.
    x = torch.randn(300, 16, requires_grad=True)
    return x, torch.randint(0, 300, (2, 4000)), torch.randn(4000, 3)


def test_each_layer_is_told(inputs):
    found = compare(Model(), *inputs, repeat=2)
    first, second = found.layers
    assert (first.name, first.kind, first.fused, first.reasons) == (
        "first",
        "SAGEConv",
        ("SAGEConv",),
        (),
    )
    assert (second.name, second.kind) == ("second", "GMMConv")
    assert {"SumAggregation", "gather"} <= set(second.fused)
    assert second.reasons == ("GMMConv: message is not one that edgeweave knows",)
    # Stock keeps the index of every message's slot, [E, F]; ours the features and the results.
    assert first.stock_kept >= 4000 * 16 * 4
    assert 0 < first.ours_kept < first.stock_kept / 3
    assert min(first.stock_ms, first.ours_ms, found.stock_ms, found.ours_ms) > 0
    # The dropout was the same: else half of the numbers would differ.
    assert found.difference < 1e-4
    lines = str(found).splitlines()
    assert lines[0].split()[0] == "layer"
    assert "first (SAGEConv)" in lines[1]
    assert lines[1].endswith("fused")
    assert "message is not one that edgeweave knows" in lines[2]
    assert lines[3].startswith("whole pass: ")


def test_nothing_is_left_behind(inputs):
    model = Model()
    model.first.lin_l.weight.grad = torch.ones_like(model.first.lin_l.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    compare(model, *inputs, repeat=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not edgeweave.pyg.is_accelerated()
    assert inputs[0].grad is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(model.first.lin_l.weight.grad, torch.ones(32, 16))
    assert model.second.root.weight.grad is None
    assert "forward" not in model.first.__dict__


@pytest.mark.parametrize("process_wide", [False, True])
def test_stock_is_stock_whatever_is_on(process_wide, inputs):
    if process_wide:
        edgeweave.pyg.accelerate()
    found = compare(GCNConv(16, 8), inputs[0], inputs[1], repeat=1)
    assert edgeweave.pyg.is_accelerated() == process_wide
    (layer,) = found.layers
    assert layer.name == ""
    assert "GCNConv" in layer.fused
    assert layer.ours_kept < layer.stock_kept / 2
    assert "model (GCNConv)" in str(found)


def test_without_gradients(inputs):
    with torch.no_grad():
        found = compare(SAGEConv(16, 8), inputs[0], inputs[1], repeat=1)
    assert found.layers[0].stock_kept == found.layers[0].ours_kept == 0


def test_an_error_of_the_model_leaves_it_as_it_was(inputs):
    model = Model()
    with pytest.raises(RuntimeError):
        compare(model, inputs[0][:, :5], inputs[1], inputs[2])
    assert "forward" not in model.first.__dict__
    assert not edgeweave.pyg.is_accelerated()


def test_what_it_refuses(inputs):
    with pytest.raises(ValueError, match="compare: repeat must be at least 1, got 0"):
        compare(Model(), *inputs, repeat=0)
    message = "compare: model must hold a message-passing layer of PyG, got Linear without one"
    with pytest.raises(ValueError, match=message):
        compare(nn.Linear(2, 2), inputs[0])


class Counting(nn.Module):
    """Makes a buffer in its first pass, and fails in its third."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.norm, self.conv, self.fails, self.passes = BatchNorm(16), SAGEConv(-1, 8), fails, 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.register_buffer("degree", torch.bincount(edge_index[1]))
        self.passes += 1
        if self.fails and self.passes == 3:
            raise RuntimeError("no")
        return self.conv(self.norm(x), edge_index)


def test_lazy_layers_and_buffers_that_come_late(inputs):
    found = compare(Counting(False), inputs[0], inputs[1], repeat=1)
    assert found.layers[0].fused == ("SAGEConv",)


def test_running_statistics_are_restored_after_an_error(inputs):
    model = Counting(True)
    with pytest.raises(RuntimeError, match="no"):
        compare(model, inputs[0], inputs[1], repeat=2)
    # One pass is for the lazy layer.
    assert model.norm.module.num_batches_tracked == 1


def test_numbers_that_are_none_differ_from_all_others():
    one, inf, nan = (torch.tensor([v, 1.0]) for v in (1.0, float("inf"), float("nan")))
    for a in (one, inf, nan):
        for b in (one, inf, nan, -inf):
            same = a is b
            assert _compare._difference([a], [b]) == (0.0 if same else float("inf"))
    assert _compare._difference([one], [one + 1]) == 1.0
