"""Matrix products that are left to the oneDNN inside torch: right, chosen by time, never stale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeweave import graphfuse
from edgeweave._fx._simplify import operator_of as _fx_operator_of
from edgeweave.graphfuse import _measure, _packed
from edgeweave.graphfuse._tile_ops import OWN

MKL = pytest.param(
    "mkl", marks=pytest.mark.skipif(not _packed.has_mkl(), reason="torch without MKL's operators")
)
AFTER: dict[str, Callable[[Any], Any]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "relu": F.relu,
}


@pytest.fixture
def everything_packed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool | str], None]:
    """Return a function that has every product packed, its activation inside or apart, or MKL."""

    def choose(apart: bool | str) -> None:
        how = apart if isinstance(apart, str) else "apart" if apart else "inside"

        def leave_out(fused: Any, eager: Any, options: Any) -> Any:
            chosen = {}
            names = {name for nodes in fused for name in nodes}
            for product, found in options.items():
                in_torch = [option for option in found if option.how not in OWN]
                wanted = [option for option in in_torch if option.how == how] or in_torch
                if wanted:
                    chosen[product] = wanted[0].how
                    names.update(wanted[0].call.nodes)
            return dict.fromkeys(names, "not in this test"), chosen

        monkeypatch.setattr(_measure, "_leave_out", leave_out)
        monkeypatch.setattr(
            _measure,
            "time_sides",
            lambda sides, made=False: {n: 1.0 + (n == "eager") for n in sides},
        )

    return choose


def test_torch_has_the_operators_here() -> None:
    assert _packed.is_available(torch.float32)


@pytest.mark.parametrize("apart", [False, True, MKL])
@pytest.mark.parametrize("name", AFTER)
def test_what_follows_a_product(
    everything_packed: Any, assert_packed: Any, call: Any, name: str, apart: bool
) -> None:
    everything_packed(apart)
    model = nn.Sequential(nn.Linear(16, 24), call(AFTER[name]))
    assert_packed(model, torch.randn(5, 16), packed=2)


@pytest.mark.parametrize("apart", [False, MKL])
@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 5, 16), (2, 1, 4, 16)])
def test_shapes_and_no_bias(
    everything_packed: Any, assert_packed: Any, shape: tuple[int, ...], apart: Any
) -> None:
    everything_packed(apart)
    assert_packed(nn.Linear(16, 7, bias=False), torch.randn(shape), packed=1)


def test_an_input_in_any_layout(everything_packed: Any, assert_packed: Any, call: Any) -> None:
    everything_packed(False)
    model = nn.Sequential(call(lambda x: x.transpose(1, 2)), nn.Linear(6, 9))
    made = assert_packed(model, torch.randn(3, 6, 8), packed=1)
    x = torch.randn(3, 8, 6).transpose(1, 2)[:, :, ::1]
    torch.testing.assert_close(made(x), model(x))


@pytest.mark.parametrize("apart", [False, MKL])
def test_a_sum_and_a_product_after_it(
    everything_packed: Any, assert_packed: Any, call: Any, apart: Any
) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.b(x + self.a(x)) * y

    everything_packed(apart)
    assert_packed(Residual(), torch.randn(4, 8), torch.randn(4, 8), packed=4)


def test_an_operand_that_is_broadcast_stays_outside(
    everything_packed: Any, assert_packed: Any, call: Any
) -> None:
    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x) + y

    everything_packed(False)
    assert_packed(Broadcast(), torch.randn(4, 8), torch.randn(1, 8), packed=1)


def test_products_of_other_kinds(everything_packed: Any, assert_packed: Any) -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))
            self.other = nn.Parameter(torch.randn(6, 5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight).mm(self.other)

    everything_packed(False)
    assert_packed(Products(), torch.randn(4, 8), packed=2)


def test_scaled_products_are_left_alone(call: Any) -> None:
    weight, bias = torch.randn(8, 6), torch.randn(6)
    model = call(lambda x: torch.addmm(bias, x, weight, beta=0.5, alpha=2)).eval()
    made = graphfuse.fuse(model, torch.randn(4, 8))
    assert made.report().packed == ()
    x = torch.randn(4, 8)
    torch.testing.assert_close(made(x), model(x))


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("apart", [False, True, MKL])
def test_nan_comes_through(
    everything_packed: Any, assert_packed: Any, call: Any, name: str, apart: bool
) -> None:
    everything_packed(apart)
    model = nn.Sequential(nn.Linear(16, 24), call(AFTER[name])).eval()
    made = graphfuse.fuse(model, torch.randn(5, 16))
    assert made.report().packed
    x = torch.randn(5, 16)
    x[1, 3], x[2, 0] = float("nan"), float("inf")
    with torch.no_grad():
        eager = model(x)
        found = made(x)
        exact = model.double()(x.double()).float()
    assert exact.isnan().any()
    assert found[exact.isnan()].isnan().all()
    # ATen's GELU of float32 makes NaN of infinity, its own of float64 does not.
    torch.testing.assert_close(found, torch.where(found.isnan(), eager, exact), equal_nan=True)


@pytest.mark.parametrize("apart", [False, MKL])
def test_edited_weights_are_packed_again(
    everything_packed: Any, assert_packed: Any, apart: Any
) -> None:
    everything_packed(apart)
    model = nn.Linear(16, 24).eval()
    x = torch.randn(5, 16)
    made = graphfuse.fuse(model, x)
    before = made(x)
    with torch.no_grad():
        model.weight.mul_(2)
    torch.testing.assert_close(made(x), model(x))
    assert not torch.equal(made(x), before)
    model.weight.data.mul_(2)  # which torch does not see
    made.refresh()
    torch.testing.assert_close(made(x), model(x))


@pytest.mark.parametrize("apart", [False, MKL])
def test_other_sizes_use_the_same_weights(
    everything_packed: Any, assert_packed: Any, apart: Any
) -> None:
    everything_packed(apart)
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 3)).eval()
    made = graphfuse.fuse(model, torch.randn(5, 16), dynamic=True)
    for rows in (5, 2, 130):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(made(x), model(x))
    assert len(made.report().packed) == 2


def test_saved_choices_come_back(
    everything_packed: Any, assert_packed: Any, tmp_path: Path
) -> None:
    everything_packed(True)
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU()).eval()
    x = torch.randn(5, 16)
    made = graphfuse.fuse(model, x)
    made.save(tmp_path)
    loaded = graphfuse.load(tmp_path)
    assert [p.nodes for p in loaded.report().packed] == [("linear", "gelu")]
    assert torch.equal(loaded(x), made(x))


def test_each_way_is_timed_after_a_call_that_makes_its_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4)).eval()
    x = torch.randn(3, 8)
    engine = graphfuse.fuse(model, x, keep="all")._engines[0]
    kinds, calls = _measure._Kinds(engine, {}), list(engine.packed_calls({}).values())
    values, _, _ = _measure.run_nodes(engine, {}, [x], {"linear", "linear_1", "linear_2"})
    values.update(dict.fromkeys(engine.input_names(), x))
    events, now = list[Any](), [0.0]

    def packed(call: Any, how: str) -> Tensor:
        events.append("pack")
        return pack(call, how)

    def operator(target: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append(tuple(args[0].shape))
            now[0] += seconds
            return function(*args)

        function = _fx_operator_of(target)
        return call

    pack = engine.packed_weight
    monkeypatch.setattr(engine, "packed_weight", packed)
    monkeypatch.setattr(_measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(_measure, "operator_of", operator)
    for call in calls:
        assert call.weight
    calls = [replace(call, variants=("inside",)) for call in calls]
    one = (3, 8)
    for repeats, seconds, expected in (
        (2, 1e-3, ["pack", one] * 4 * 3),
        # All packed first, and one of each kind run: the last, for no reason.
        (1, 1e-3, ["pack", "pack", "pack", one, "pack", one, *["pack", one] * 4]),
        # Beside a fifth of a second making a kernel is nothing.
        (1, 0.25, ["pack", "pack", "pack", one, "pack", one, *["pack", one] * 2]),
    ):
        events.clear()
        found = _measure._time_packed(engine, kinds, calls, values, repeats)
        assert events == expected
        assert [option.us for option in found] == pytest.approx([1e6 * seconds] * 4)


def option(how: str, us: float, nodes: tuple[str, ...], **more: Any) -> _measure.Option:
    call = _packed.PackedCall(nodes[0], nodes, None, "weight", False, (how,), **more)  # type: ignore[arg-type]
    return _measure.Option(call, how, us)


def test_the_faster_side_is_taken() -> None:
    fused = {("linear", "gelu"): 100.0, ("relu",): 10.0}
    eager = {"linear": 90.0, "gelu": 30.0, "relu": 50.0}
    nodes = ("linear", "gelu")
    slow = option("inside", 99.0, nodes)
    fast = option("apart", 60.0, nodes)
    reasons, packed = _measure._leave_out(fused, eager, {"linear": [slow, fast]})
    assert packed == {"linear": "apart"}
    assert reasons == dict.fromkeys(nodes, "faster in torch's own oneDNN: 60 us against 100 us")
    assert _measure._leave_out(fused, eager, {"linear": [slow]}) == ({}, {})


def test_what_a_call_covers_beyond_its_partition_counts() -> None:
    fused = {("cast",): 10.0, ("linear",): 50.0}
    eager = {"cast": 12.0, "linear": 80.0, "add": 20.0}
    tiles = option("tiles", 60.0, ("linear", "add"), spares=("cast",))
    reasons, packed = _measure._leave_out(fused, eager, {"linear": [tiles]})
    assert packed == {"linear": "tiles"}
    text = "faster on AMX tiles: 60 us against 80 us"
    assert reasons == dict.fromkeys(("cast", "linear", "add"), text)


def test_what_no_comparison_could_tell_is_not_tried() -> None:
    fused, eager = {("linear",): 100.0, ("conv",): 9_000.0}, {"linear": 90.0, "conv": 20_000.0}
    assert _measure._leave_out(fused, eager, {}) == ({}, {})
    reasons, _ = _measure._leave_out({**fused, ("linear",): 200.0}, eager, {})
    assert reasons == {"linear": "slower than eager on the example: 200 us against 90 us"}


def test_what_was_decided_is_put_back_with_its_plans() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(3, 8)
    made = graphfuse.fuse(model, x, keep="all")
    engine, expected = made._engines[0], made(x)
    plan, decided, refused = engine.plan({}), engine.decided(), dict(engine.refused)
    engine.forced = {"linear": "in this test"}
    engine.drop_plans()
    assert engine.plan({}) is not plan
    assert engine.refused != refused
    engine.restore(decided)
    assert engine.plan({}) is plan
    assert (engine.forced, engine.packed, engine.refused) == ({}, {}, refused)
    assert torch.equal(made(x), expected)


def test_products_of_one_group_are_chosen_together() -> None:
    fused = {("q", "k"): 100.0}
    eager = {"q": 80.0, "k": 80.0}
    both = option("tiles", 50.0, ("q", "k"))
    alone = [option("inside", 40.0, ("k",))]
    _, packed = _measure._leave_out(fused, eager, {"q": [both], "k": alone})
    assert packed == {"q": "tiles"}


class TestKinds:
    @pytest.fixture
    def kinds(self) -> _measure._Kinds:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)), nn.Linear(8, 4)).eval()
        made = graphfuse.fuse(model, torch.randn(3, 8), keep="all")
        return _measure._Kinds(made._engines[0], {})

    @pytest.fixture
    def names(self) -> list[str]:
        return ["linear", *(f"linear_{index}" for index in range(1, 10))]

    def test_some_of_each_are_timed(
        self, kinds: _measure._Kinds, names: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert kinds.some(names, lambda name: [(name,)]) == names  # all of them lie in caches
        taken = 4 * (4 * (64 + 8 + 2 * 24) + 32 + 4 + 24 + 12)
        monkeypatch.setattr(_measure, "_COLD_BYTES", taken + 1)
        assert kinds.some(names, lambda name: [(name,)]) == names
        monkeypatch.setattr(_measure, "_COLD_BYTES", taken)
        some = kinds.some(names, lambda name: [(name,)])
        assert some == ["linear", "linear_2", "linear_4", "linear_6", "linear_9"]
        pairs = kinds.some(names, lambda name: [(name,), ("linear_9",)])
        assert pairs == some

    def test_few_are_timed_where_one_takes_long(
        self, kinds: _measure._Kinds, names: list[str]
    ) -> None:
        def enough(ms: float) -> list[str]:
            return kinds.enough(names, lambda name: [(name,)], dict.fromkeys(names, 1e3 * ms))

        assert enough(0.0) == enough(60 / 9) == names
        assert enough(20.0) == ["linear", "linear_3", "linear_6", "linear_9"]
        assert enough(500.0) == ["linear", "linear_4", "linear_9"]  # one call is no kind's time
        assert kinds.first(names, lambda name: [(name,)]) == ["linear", "linear_9"]

    def test_equal_calls_share_their_times(self, kinds: _measure._Kinds, names: list[str]) -> None:
        timed = {("linear",): 1.0, ("linear_2",): 2.0, ("linear_4",): 9.0}
        found = kinds.spread(timed, [(name,) for name in names])
        assert found == {(name,): 2.0 for name in names[:-1]}

    def test_equal_calls_can_run_in_the_same_ways(
        self, kinds: _measure._Kinds, names: list[str]
    ) -> None:
        timed = [option("inside", us, (name,)) for name, us in zip(names, (7, 8, 30), strict=False)]
        timed += [option("mkl", 5.0, (names[1],)), option("mkl", 3.0, (names[9],))]
        calls = [option("inside", 0.0, (name,)).call for name in names]
        both = replace(calls[3], variants=("inside", "mkl"))
        found = kinds.offer(timed, [*calls[:3], both, *calls[4:]])
        assert [found[name] for name in names[:3]] == [
            [_measure.Option(call, "inside", 8)] for call in calls[:3]
        ]
        assert [(o.how, o.us) for o in found[names[3]]] == [("inside", 8), ("mkl", 5.0)]
        assert found[names[9]] == []


def test_measuring_keeps_only_what_it_reads() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(3, 8)
    engine = graphfuse.fuse(model, x, keep="all")._engines[0]
    values, times, repeats = _measure.run_nodes(engine, {}, [x], {"relu"})
    assert values.keys() - engine.weights.tensors.keys() == {"relu"}
    assert times.keys() == {"linear", "relu", "linear_1"}
    assert 1 <= repeats <= 15
    torch.testing.assert_close(values["relu"], model[:2](x))


class TestRunNodes:
    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[str]]]:
        """Return a function that runs calls of which each takes so many seconds, by the round."""
        layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
        model, x = nn.Sequential(*layers).eval(), torch.randn(3, 8)
        engine = graphfuse.fuse(model, x, keep="all")._engines[0]
        now, calls = [0.0], list[str]()

        def run(*rounds: float, **more: Any) -> tuple[Any, list[str]]:
            def operator(target: str) -> Callable[..., Any]:
                def call(*args: Any) -> Any:
                    now[0] += rounds[min(len(calls) // 3, len(rounds) - 1)]
                    calls.append(target)
                    return function(*args)

                function = _fx_operator_of(target)
                return call

            calls.clear()
            monkeypatch.setattr(_measure.time, "perf_counter", lambda: now[0])
            monkeypatch.setattr(_measure, "operator_of", operator)
            return _measure.run_nodes(engine, {}, [x], **more), calls

        self.expected = model[0](x)
        return run

    @pytest.mark.parametrize(
        ("seconds", "repeats", "rounds"),
        [(1e-4, 15, 15), (0.018, 5, 5), (0.05, 3, 3), (0.2, 1, 2), (0.4, 1, 1)],
    )
    def test_long_calls_run_less_often(
        self, ran: Any, seconds: float, repeats: int, rounds: int
    ) -> None:
        (_, times, found), calls = ran(seconds, keep=set())
        assert found == repeats
        assert len(calls) == 3 * rounds
        assert times == pytest.approx(dict.fromkeys(("linear", "relu", "linear_1"), 1e6 * seconds))

    def test_a_first_time_that_makes_kernels_is_no_time(self, ran: Any) -> None:
        (_, times, repeats), calls = ran(0.25, 0.2, keep=set())
        assert times["linear"] == pytest.approx(2e5)
        assert (repeats, len(calls)) == (1, 6)
        (_, times, repeats), calls = ran(0.2, 0.018, keep=set())
        assert times["linear"] == pytest.approx(18e3)
        assert (repeats, len(calls)) == (5, 15)

    def test_a_disturbed_time_changes_no_count(self, ran: Any) -> None:
        (_, times, repeats), calls = ran(0.018, 0.018, 0.7, 0.018, keep=set())
        assert times["linear"] == pytest.approx(18e3)
        assert (repeats, len(calls)) == (5, 15)

    def test_alone_runs_what_is_needed(self, ran: Any) -> None:
        (values, _, repeats), calls = ran(1e-4, keep={"linear"}, alone=True)
        assert calls == ["aten.linear.default"]
        assert repeats == 1
        torch.testing.assert_close(values["linear"], self.expected)


class TestSides:
    @staticmethod
    def _sides(
        monkeypatch: pytest.MonkeyPatch,
        seconds: dict[str, float],
        *,
        made: bool = True,
        first: Mapping[str, float] | None = None,
    ) -> tuple[dict[str, float], Counter[str]]:
        now, calls = [0.0], Counter[str]()
        monkeypatch.setattr(_measure.time, "perf_counter", lambda: now[0])

        def side(name: str) -> Callable[[], None]:
            def run() -> None:
                calls[name] += 1
                extra = (first or {}).get(name, 0.0) if calls[name] == 1 else 0.0
                now[0] += seconds[name] + extra

            return run

        return _measure.time_sides({n: side(n) for n in seconds}, made=made), calls

    def test_long_calls_that_differ_are_timed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for made in (False, True):  # with one that may compile before, or twice
            found, calls = self._sides(monkeypatch, {"fused": 2.0, "eager": 3.0}, made=made)
            assert found == pytest.approx({"fused": 2000.0, "eager": 3000.0})
            assert calls == {"fused": 2, "eager": 2}

    def test_only_close_ones_go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = {"fused": 2.0, "all": 2.1, "eager": 3.0}
        found, calls = self._sides(monkeypatch, seconds, made=False)
        assert found == pytest.approx({name: 1e3 * each for name, each in seconds.items()})
        assert calls == {"fused": 3, "all": 3, "eager": 2}

    @pytest.mark.parametrize("slow", ["fused", "eager"])
    @pytest.mark.parametrize("seconds", [(0.15, 0.1), (0.1, 0.15), (2.0, 2.1), (2.1, 2.0)])
    def test_no_side_loses_by_its_first_call(
        self, monkeypatch: pytest.MonkeyPatch, slow: str, seconds: tuple[float, float]
    ) -> None:
        # One that reads weights from a disk, or that a model compiles something in.
        sides = dict(zip(("fused", "eager"), seconds, strict=True))
        found, calls = self._sides(monkeypatch, sides, first={slow: 3.0})
        assert found == pytest.approx({name: 1e3 * each for name, each in sides.items()})
        assert max(calls.values()) <= 4

    def test_one_alone_is_timed_to_be_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self._sides(monkeypatch, {"fused": 0.01}) == (
            pytest.approx({"fused": 10.0}),
            {"fused": 6},
        )
        assert self._sides(monkeypatch, {"fused": 2.0}) == (
            pytest.approx({"fused": 2000.0}),
            {"fused": 1},
        )

    def test_short_calls_take_turns_to_begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, calls = self._sides(monkeypatch, {"fused": 0.01, "eager": 0.015})
        assert calls["fused"] == calls["eager"] >= 20

    def test_short_calls_that_are_far_apart_soon_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, calls = self._sides(monkeypatch, {"fused": 0.01, "eager": 0.05})
        assert calls == {"fused": 8, "eager": 8}

    def test_what_first_calls_compile_is_not_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = {"compiled": 0.01, "model": 0.011}
        first = {"compiled": 9.0, "model": 0.0}
        found, calls = self._sides(monkeypatch, seconds, first=first, made=False)
        assert found == pytest.approx({name: 1e3 * each for name, each in seconds.items()})
        assert calls["compiled"] == calls["model"] >= 20


def test_without_torch_operators_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packed, "is_available", lambda _: False)
    model, x = nn.Linear(16, 24).eval(), torch.randn(5, 16)
    made = graphfuse.fuse(model, x)
    assert made.report().packed == ()
    torch.testing.assert_close(made(x), model(x))


def test_keep_all_leaves_products_to_the_partitions() -> None:
    made = graphfuse.fuse(nn.Linear(16, 24).eval(), torch.randn(5, 16), keep="all")
    assert made.report().packed == ()
    assert len(made.report().partitions) == 1


@pytest.mark.parametrize("apart", [False, True, MKL])
def test_a_bias_with_strides(everything_packed: Any, apart: Any, call: Any) -> None:
    # torch's packed product would read past the end of the expanded one.
    everything_packed(apart)
    x, weight = torch.randn(5, 16), torch.randn(24, 16)
    for bias in (torch.randn(24, 3)[:, 0], torch.randn(1).expand(24)):
        model = call(lambda x, bias=bias: F.gelu(F.linear(x, weight, bias))).eval()
        torch.testing.assert_close(graphfuse.fuse(model, x)(x), model(x))


@pytest.mark.skipif(not _packed.has_mkl(), reason="torch without MKL's operators")
def test_a_saved_choice_that_is_not_there(
    everything_packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_packed("mkl")
    model, x = nn.Sequential(nn.Linear(16, 24), nn.GELU()).eval(), torch.randn(5, 16)
    graphfuse.fuse(model, x).save(tmp_path)
    monkeypatch.setattr(_packed, "has_mkl", lambda: False)
    loaded = graphfuse.load(tmp_path)
    torch.testing.assert_close(loaded(x), model(x))
    assert [part.where for part in loaded.report().packed] == ["torch"]


@pytest.mark.skipif(not _packed.has_mkl(), reason="torch without MKL's operators")
def test_the_report_names_mkl(everything_packed: Any) -> None:
    everything_packed("mkl")
    report = graphfuse.fuse(nn.Linear(16, 24).eval(), torch.randn(5, 16)).report()
    assert "1 more with packed weights in torch's MKL" in str(report)
    assert "us  aten.linear.default, MKL" in str(report)
    assert [part.where for part in report.packed] == ["mkl"]


def test_the_report_counts_them(everything_packed: Any, assert_packed: Any) -> None:
    everything_packed(False)
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU()).eval()
    report = graphfuse.fuse(model, torch.randn(5, 16)).report()
    assert "0 of 2 calls in 0 partitions" in str(report)
    assert "2 more with packed weights in torch's own oneDNN" in str(report)
    assert "us  aten.linear.default + aten.gelu.default, packed" in str(report)
    (product,) = report.packed
    assert product.fused_us is not None
    assert product.eager_us is not None
