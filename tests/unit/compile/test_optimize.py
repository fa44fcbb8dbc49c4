"""`edgeweave.optimize`: arguments, checkpoints, modes, precision, verification."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import edgeweave
from edgeweave import EdgeweaveWarning
from edgeweave.compile import OptimizedModel, VerificationError, _passes
from edgeweave.compile._record import recording


class Sums(nn.Module):
    """A layer by hand, as one would write it in plain torch."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, edges):
        h = self.linear(x)
        return torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]]).relu()


def inputs(nodes: int = 9, edges: int = 60):
    return torch.randn(nodes, 5), torch.randint(0, nodes, (2, edges))


def test_it_is_exported_at_the_top() -> None:
    assert edgeweave.optimize is edgeweave.compile.optimize


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"engine": "fast"},
            ValueError,
            "engine must be one of auto, onednn, inductor, eager, got",
        ),
        ({"precision": "fp8"}, ValueError, "precision must be one of fp32, bf16, got 'fp8'"),
        ({"training": 1}, TypeError, "training must be True, False or None, got int 1"),
        ({"dynamic": "yes"}, TypeError, "dynamic must be True, False or None, got str 'yes'"),
        ({"verify": True}, ValueError, "example_inputs must be given for verify=True, got None"),
        (
            {"training": True, "engine": "onednn"},
            ValueError,
            "engine must not be 'onednn' with training=True",
        ),
        (
            {"example_inputs": torch.zeros(2)},
            TypeError,
            "example_inputs must be a tuple of arguments, got a torch.float32 tensor",
        ),
    ],
)
def test_wrong_arguments(arguments, error, message) -> None:
    with pytest.raises(error, match=f"optimize: {message}"):
        edgeweave.optimize(Sums(), **arguments)


def test_a_function_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"optimize: model must be a torch\.nn\.Module, got "):
        edgeweave.optimize(torch.relu)  # type: ignore[arg-type]


def test_the_wrapper_is_the_model() -> None:
    model = Sums()
    compiled = edgeweave.optimize(model, engine="eager")
    assert list(compiled.state_dict()) == list(model.state_dict())
    other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    compiled.load_state_dict(other)
    assert torch.equal(model.linear.weight, other["linear.weight"])
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in model.parameters()}
    assert compiled.linear is model.linear
    compiled.eval()
    assert not model.training
    assert not compiled.training
    with pytest.raises(AttributeError, match="nothing"):
        getattr(compiled, "nothing")  # noqa: B009 - a plain access is no statement
    again = edgeweave.optimize(compiled, engine="eager")
    assert again.original is model
    x, edges = inputs()
    torch.testing.assert_close(compiled(x, edges), model(x, edges))


def test_a_copy_has_weights_of_its_own() -> None:
    compiled = edgeweave.optimize(Sums(), engine="eager")
    x, edges = inputs()
    before = compiled(x, edges)
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        twin.original.linear.weight.zero_()
        twin.original.linear.bias.zero_()
    assert torch.equal(compiled(x, edges), before)
    assert not twin(x, edges).any()


def test_examples_compile_at_once() -> None:
    with recording() as records:
        compiled = edgeweave.optimize(Sums(), inputs(), engine="eager")
        assert len(records) == 1
        compiled(*inputs())
    assert len(records) == 1


def test_examples_with_verification_compile_what_trains() -> None:
    with recording() as records:
        compiled = edgeweave.optimize(Sums(), inputs(), engine="eager", verify=True)
        compiled(*inputs()).sum().backward()
    assert [record.records_gradients for record in records] == [True]


# dynamo looks at `.grad` of what one compiled model hands to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_calls_within_calls() -> None:
    """A compiled model beside another, and an error inside, leave the settings as they were."""
    inner = edgeweave.optimize(Sums(), engine="eager")
    outer = edgeweave.optimize(nn.Sequential(nn.Linear(5, 5)), engine="eager")
    x, edges = inputs()
    config = torch._dynamo.config
    with config.patch(capture_scalar_outputs=False):
        for _ in range(2):
            inner(outer(x), edges)
            with pytest.raises(IndexError, match=r"mm: .*[0-9]+"):
                inner(x, edges + 9)
        assert config.capture_scalar_outputs is False


def test_training_false_records_nothing_and_wants_eval_mode() -> None:
    compiled = edgeweave.optimize(Sums(), training=False, engine="eager")
    with pytest.raises(ValueError, match="the model must be in eval mode after training=False"):
        compiled(*inputs())
    assert not compiled.eval()(*inputs()).requires_grad


@pytest.mark.parametrize("dynamic", [None, True])
def test_at_most_two_compilations(dynamic) -> None:
    model = Sums()
    compiled = edgeweave.optimize(model, dynamic=dynamic, engine="eager")
    with recording() as records:
        for nodes, edges in ((9, 60), (17, 90), (30, 35), (12, 200)):
            batch = inputs(nodes, edges)
            torch.testing.assert_close(compiled(*batch), model(*batch))
    assert len(records) <= (1 if dynamic else 2)
    assert all(record.ops == {"edgeweave.mm": 1} for record in records)


def test_bf16_is_autocast() -> None:
    model = Sums()
    compiled = edgeweave.optimize(model, precision="bf16", engine="eager")
    x, edges = inputs()
    with recording() as records:
        out = compiled(x, edges)
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(x, edges)
    assert out.dtype is eager.dtype is torch.bfloat16
    assert records[0].ops == {"edgeweave.mm": 1}
    # Sums of some ten terms; eager rounds each partial sum to 8 bits, the kernel the last one.
    torch.testing.assert_close(out.float(), eager.float(), rtol=0.05, atol=0.05)
    assert model.linear.weight.dtype is torch.float32


def test_verify_passes_what_is_right() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU())
    before = model[1].running_mean.clone()
    edgeweave.optimize(model, (torch.randn(8, 5),), engine="eager", verify=True)
    assert torch.equal(model[1].running_mean, before)
    edgeweave.optimize(Sums(), inputs(), engine="eager", verify=True, precision="bf16")


def test_verify_finds_what_is_wrong(monkeypatch) -> None:
    def double_it(module: torch.fx.GraphModule) -> list[object]:
        for node in module.graph.nodes:
            if node.op == "output":
                (result,) = node.args[0]
                with module.graph.inserting_before(node):
                    node.args = ((module.graph.call_method("mul", (result, 2)),),)
        module.recompile()
        return []

    wrong = (_passes.Pass("double", 1, double_it),)  # type: ignore[arg-type]
    monkeypatch.setattr(_passes, "PASSES", wrong)
    with pytest.raises(VerificationError, match=r"result 0 must be within .* of float64"):
        edgeweave.optimize(Sums(), inputs(), engine="eager", verify=True)


def test_it_is_a_module() -> None:
    assert isinstance(edgeweave.optimize(Sums()), OptimizedModel)
    assert isinstance(edgeweave.optimize(Sums()), nn.Module)


# ---- what torch cannot capture in one graph ------------------------------------------------------


def test_sizes_that_torch_refuses_become_graph_breaks_which_is_said_once() -> None:
    from torch_geometric.nn import SortAggregation

    x, batch = torch.randn(9, 5), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    # It looks at sizes that depend on values and does not return them, which AOTAutograd of torch
    # 2.13 refuses.
    model = SortAggregation(2)
    compiled = edgeweave.optimize(model, engine="eager")
    with pytest.warns(EdgeweaveWarning, match="optimize: torch could not compile SortAggregation"):
        out = compiled(x.requires_grad_(), batch)
    torch.testing.assert_close(out, model(x, batch))
    with recording() as records:
        torch.testing.assert_close(compiled(x, batch), out)
    assert records == []  # nothing is tried again


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sparse :UserWarning")
def test_where_open_sizes_are_too_much_for_torch_they_are_fixed() -> None:
    from torch_geometric.nn import GraphUNet

    model = GraphUNet(4, 4, 4, depth=2).eval()
    x, edges = torch.randn(20, 4), torch.randint(0, 20, (2, 60))
    compiled = edgeweave.optimize(model, engine="eager", training=False)
    with pytest.warns(EdgeweaveWarning, match="and compiles for each size anew"):
        out = compiled(x, edges)
    torch.testing.assert_close(out, model(x, edges))


def test_errors_of_kernels_are_not_tried_again() -> None:
    calls = []

    class Counts(Sums):
        @torch._dynamo.disable
        def count(self):
            calls.append(1)

        def forward(self, x, edges):
            self.count()
            return super().forward(x, edges)

    compiled = edgeweave.optimize(Counts(), engine="eager")
    x, edges = inputs()
    with pytest.raises(IndexError):
        compiled(x, edges + 9)
    assert calls == [1]


def test_what_fails_in_any_case_raises_what_it_raised() -> None:
    compiled = edgeweave.optimize(Sums(), engine="eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        compiled(torch.randn(9, 4), torch.randint(0, 9, (2, 60)))
    x, edges = inputs()
    with recording() as records:
        torch.testing.assert_close(compiled(x, edges), compiled.original(x, edges))
    assert records[0].ops == {"edgeweave.mm": 1}
    assert compiled._captures  # a wrong call has not changed how good ones are captured
