"""`engine="auto"` measures: which candidates are timed when, and what is made of their times.

No test looks at a clock: times are given by hand, by the name of the candidate.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import edgeweave
from edgeweave.compile import _engine, _measured, _optimize, explain
from edgeweave.compile._reading import writes_to_inputs
from edgeweave.compile._record import GraphRecord, recording

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def times(monkeypatch):
    """Return a function that sets the milliseconds of candidates, and a list of who was timed."""
    known: dict[str, float] = {}
    asked: list[list[str]] = []

    def time_sides(sides):
        for side in sides.values():
            side()
        asked.append(list(sides))
        return {name: known[name] for name in sides}

    monkeypatch.setattr(_measured, "time_sides", time_sides)
    monkeypatch.setattr(_optimize, "time_sides", time_sides)

    def give(**ms: float) -> list[list[str]]:
        known.update({name.replace("passes", "passes + ATen"): value for name, value in ms.items()})
        return asked

    return give


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def sums(x, edges):
    return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]]).relu() + 1


def edges_and_features():
    return torch.randn(9, 5), torch.randint(0, 9, (2, 60))


def compiled_record(function, *inputs, **options) -> GraphRecord:
    compiled = torch.compile(function, backend="edgeweave", options=options)
    with torch.no_grad(), recording() as records:
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    (record,) = records
    record.settle()
    return record


# ---- graphs --------------------------------------------------------------------------------------


def test_onednn_that_gains_enough_is_not_compared_with_inductor(times) -> None:
    asked = times(onednn=1.0, eager=1.3)
    record = compiled_record(mlp(), torch.randn(4, 5))
    assert asked == [["onednn", "eager"]]
    assert record.engine == "onednn"
    assert record.reason.endswith("measured: onednn 1 ms, eager 1.3 ms")
    assert record.times_ms == {"onednn": 1.0, "eager": 1.3}


@pytest.mark.parametrize(
    ("onednn", "inductor", "engine"),
    [(1.0, 0.9, "inductor"), (1.0, 0.99, "onednn"), (1.2, 1.15, "eager")],
)
def test_where_onednn_gains_little_inductor_competes(times, onednn, inductor, engine) -> None:
    asked = times(onednn=onednn, inductor=inductor, eager=1.1)
    record = compiled_record(mlp(), torch.randn(4, 5))
    assert asked == [["onednn", "eager"], ["onednn", "inductor", "eager"]]
    assert record.engine == engine


def test_what_holds_no_chain_is_timed_with_inductor(times) -> None:
    asked = times(inductor=1.0, eager=1.0)
    record = compiled_record(torch.sin, torch.randn(4))
    assert asked == [["inductor", "eager"]]
    assert record.engine == "inductor"  # equal: the rule's preference stays


def test_rewritten_graphs_may_run_without_inductor(times) -> None:
    asked = times(inductor=2.0, passes=1.0, eager=5.0)
    record = compiled_record(sums, *edges_and_features())
    assert asked == [["inductor", "passes + ATen", "eager"]]
    assert record.engine == "eager"
    assert record.ops == {"edgeweave.mm": 1}
    assert 0 < record.share < 1


def test_a_graph_that_gains_nothing_runs_as_it_was_captured(times) -> None:
    times(inductor=2.0, passes=2.0, eager=1.0)
    record = compiled_record(sums, *edges_and_features())
    assert record.engine == "eager"
    assert record.reason == "measured: inductor 2 ms, passes + ATen 2 ms, eager 1 ms"
    assert (record.ops, record.rewrites) == ({}, ())
    assert record.calls_after == record.calls_before
    assert record.left.startswith("engine eager: measured: ")
    assert record.share == 0.0


def test_without_a_compiler_the_passes_still_compete(times, monkeypatch) -> None:
    monkeypatch.setattr(_measured, "has_compiler", lambda device: False)
    monkeypatch.setattr(_engine, "has_compiler", lambda device: False)
    monkeypatch.setattr(_engine, "_said", set())
    asked = times(passes=1.0, eager=2.0)
    with pytest.warns(edgeweave.EdgeweaveWarning, match=r"no C\+\+ compiler"):
        record = compiled_record(sums, *edges_and_features())
    assert asked == [["passes + ATen", "eager"]]
    assert record.ops == {"edgeweave.mm": 1}


@pytest.mark.parametrize("engine", ["onednn", "inductor", "eager"])
def test_what_was_asked_for_is_not_timed(times, engine) -> None:
    asked = times()
    record = compiled_record(mlp(), torch.randn(4, 5), engine=engine)
    assert asked == []
    assert record.engine == engine
    assert record.times_ms == {}


def test_training_is_not_timed(times) -> None:
    asked = times()
    compiled = torch.compile(mlp(), backend="edgeweave")
    compiled(torch.randn(4, 5)).sum().backward()
    assert asked == []


def test_sizes_that_change_are_timed_with_those_of_the_call(times) -> None:
    asked = times(onednn=1.0, eager=2.0)
    model = mlp()
    compiled = torch.compile(model, backend="edgeweave")
    with torch.no_grad():
        for rows in (4, 6, 7):
            x = torch.randn(rows, 5)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(asked) == 2  # the first size, and all others


def test_errors_of_the_inputs_come_from_the_call(times) -> None:
    times(inductor=1.0, passes=1.0, eager=1.0)
    x, edges = torch.randn(9, 5), torch.full((2, 4), 9)
    with recording() as records, torch.no_grad(), pytest.raises(IndexError, match="9"):
        torch.compile(sums, backend="edgeweave")(x, edges)
    assert records[0].engine == "inductor"
    assert "not measured, since a call raises" in records[0].reason


def test_random_numbers_are_drawn_as_often_as_without_measuring(times) -> None:
    times(inductor=1.0, eager=0.5)
    compiled = torch.compile(lambda x: F.dropout(x, 0.5) + 1, backend="edgeweave")
    x = torch.ones(64)
    with torch.no_grad():
        torch.manual_seed(3)
        expected = F.dropout(x, 0.5) + 1, torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(compiled(x), expected[0])
        assert torch.equal(torch.rand(1), expected[1])


# ---- graphs that must not be run twice -----------------------------------------------------------


def add_to_input(x):
    return x.add_(1)


def write_a_view(x):
    x[0] = 1
    return x.sum()


def write_with_out(x):
    return torch.mul(x, 2, out=x)


def write_fresh(x):
    return torch.zeros_like(x).add_(x)


class Normalised(nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).train(training)

    def forward(self, x):
        return self.norm(x)


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (add_to_input, True),
        (write_a_view, True),
        (write_with_out, True),
        (write_fresh, False),
        (Normalised(training=True), True),
        (Normalised(training=False), False),
    ],
)
def test_writes_are_seen(function, written) -> None:
    found: list[bool] = []

    def backend(graph, example):
        found.append(writes_to_inputs(graph))
        return graph

    with torch.no_grad():
        torch.compile(function, backend=backend)(torch.randn(2, 3))
    assert found == [written]


def test_graphs_that_write_to_their_inputs_are_run_once(times) -> None:
    asked = times()
    x = torch.zeros(3)
    torch.compile(add_to_input, backend="edgeweave")(x)
    assert torch.equal(x, torch.ones(3))
    assert asked == []


def test_running_statistics_are_updated_once(times) -> None:
    asked = times()
    model = Normalised(training=True)
    with torch.no_grad():
        edgeweave.optimize(model)(torch.randn(4, 3))
    assert int(model.norm.num_batches_tracked) == 1
    assert asked == []


# ---- whole models --------------------------------------------------------------------------------


def calls_of(model: nn.Module) -> list[bool]:
    """Note at each call of the model whether Dynamo traces it."""
    seen: list[bool] = []
    model.register_forward_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    return seen


@pytest.mark.parametrize(("model_ms", "compiled"), [(0.9, False), (0.99, True), (2.0, True)])
def test_the_faster_of_model_and_compiled_model_runs(times, model_ms, compiled) -> None:
    times(onednn=1.0, eager=2.0, compiled=1.0, model=model_ms)
    model, x = mlp(), torch.randn(4, 5)
    optimized = edgeweave.optimize(model, (x,), training=False)
    assert optimized.decision == _optimize.Decision(compiled, 1.0, model_ms)
    seen = calls_of(model)
    torch.testing.assert_close(optimized(x), model(x))
    # The model itself calls the hook, and the call beside it; the compiled one captured anew.
    assert seen.count(False) == (1 if compiled else 2)


@pytest.mark.parametrize(("model_ms", "compiled"), [(1.0, False), (1.02, False), (1.1, True)])
def test_graphs_as_captured_must_be_faster_than_the_model(times, model_ms, compiled) -> None:
    times(onednn=2.0, inductor=2.0, eager=1.0, compiled=1.0, model=model_ms)
    optimized = edgeweave.optimize(mlp(), (torch.randn(4, 5),), training=False)
    assert optimized.decision is not None
    assert optimized.decision.compiled is compiled


def test_a_model_that_is_faster_in_inference_still_trains_compiled(times) -> None:
    times(onednn=1.0, eager=2.0, compiled=1.0, model=0.5)
    model, x = mlp(), torch.randn(4, 5)
    with torch.no_grad():
        optimized = edgeweave.optimize(model, (x,), engine="auto")
    with recording() as records:
        optimized(x).sum().backward()
    assert [record.records_gradients for record in records] == [True]


@pytest.mark.parametrize(("model_ms", "compiled"), [(0.9, False), (0.99, True), (2.0, True)])
def test_the_faster_one_trains(times, model_ms, compiled) -> None:
    asked = times(compiled=1.0, model=model_ms)
    model, x = mlp().train(), torch.randn(4, 5)
    optimized = edgeweave.optimize(model, (x,))
    assert asked == [["compiled", "model"]]
    assert optimized.decision == _optimize.Decision(compiled, 1.0, model_ms)
    assert all(p.grad is None for p in model.parameters())
    seen = calls_of(model)
    optimized(x).sum().backward()
    assert seen.count(False) == (0 if compiled else 1)
    assert all(p.grad is not None for p in model.parameters())


def test_what_trains_is_not_what_infers(times) -> None:
    times(onednn=1.0, eager=2.0, compiled=1.0, model=0.5)
    model, x = mlp().train(), torch.randn(4, 5)
    optimized = edgeweave.optimize(model, (x,))
    assert optimized.decision is not None
    assert not optimized.decision.compiled
    optimized.eval()
    with torch.no_grad(), recording() as records:
        optimized(x)
    assert len(records) == 1  # compiled, though the model itself trains


def test_training_is_timed_with_its_backward_pass_and_leaves_no_trace() -> None:
    net = Normalised(training=True)
    backwards = []
    net.norm.weight.register_hook(lambda grad: backwards.append(1))
    x = torch.randn(4, 3, requires_grad=True)
    torch.manual_seed(3)
    optimized = edgeweave.optimize(net, (x,))
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    assert optimized.decision is not None
    assert len(backwards) >= 8
    assert x.grad is None
    assert net.norm.weight.grad is None
    assert int(net.norm.num_batches_tracked) == 1


def test_eval_mode_with_gradients_is_neither(times) -> None:
    asked = times()
    optimized = edgeweave.optimize(mlp().eval(), (torch.randn(4, 5),))
    assert (optimized.decision, asked) == (None, [])


def test_without_examples_nothing_is_decided(times) -> None:
    asked = times(onednn=1.0, eager=2.0)
    optimized = edgeweave.optimize(mlp(), training=False)
    optimized(torch.randn(4, 5))
    assert optimized.decision is None
    assert asked == [["onednn", "eager"]]


@pytest.mark.parametrize("engine", ["inductor", "eager"])
def test_an_engine_that_was_asked_for_is_not_compared_with_the_model(times, engine) -> None:
    asked = times()
    optimized = edgeweave.optimize(mlp(), (torch.randn(4, 5),), training=False, engine=engine)
    assert (optimized.decision, asked) == (None, [])


def test_bfloat16_is_compared_with_bfloat16(times) -> None:
    times(onednn=1.0, inductor=1.0, eager=2.0, compiled=1.0, model=0.5)
    x = torch.randn(4, 5)
    optimized = edgeweave.optimize(mlp(), (x,), training=False, precision="bf16")
    assert optimized.decision is not None
    assert not optimized.decision.compiled
    assert optimized(x).dtype == torch.bfloat16


def test_reports_say_what_was_measured(times) -> None:
    times(onednn=1.0, eager=2.0, compiled=3.0, model=2.5)
    report = explain(mlp(), (torch.randn(4, 5),), training=False)
    text = str(report)
    assert "timed   onednn 1.000 ms, eager 2.000 ms" in text
    assert "optimize runs the model itself: 3.00 ms compiled, 2.50 ms not" in text
    assert report.record()["decision"]["compiled"] is False


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.linear(x) + self.calls


def test_deciding_leaves_buffers_as_after_one_call(times) -> None:
    times(compiled=1.0, model=1.0)
    net = Counting().eval()
    with torch.no_grad():
        edgeweave.optimize(net, (torch.randn(4, 5),), engine="auto")
    assert net.calls == 1


def of_torch(x, mean, var):
    return torch.batch_norm(x, None, None, mean, var, True, 0.5, 1e-5, False)


def of_aten(x, mean, var):
    return torch.ops.aten.native_batch_norm(x, None, None, mean, var, True, 0.5, 1e-5)[0]


@pytest.mark.parametrize("normalize", [of_torch, of_aten])
def test_statistics_by_position_are_written_to_once(times, normalize) -> None:
    assert times() == []
    x = torch.randn(6, 5)
    given, other = [(torch.zeros(5), torch.ones(5)) for _ in range(2)]
    normalize(x, *given)
    with torch.no_grad():
        torch.compile(normalize, backend="edgeweave")(x, *other)
    torch.testing.assert_close(other, given)
