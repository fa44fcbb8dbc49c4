"""`fuse` as a whole: arguments, results, weights, NaN, sizes, what is kept."""

from __future__ import annotations

import dataclasses
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from edgeweave import graphfuse
from edgeweave._fx import flatten, flatten_call
from edgeweave.graphfuse import _measure, _module
from edgeweave.graphfuse._segment import Segment


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


@dataclasses.dataclass
class Answer:
    hidden: Tensor
    label: str
    nested: dict[str, Any]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Many(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.make = make

    def forward(
        self, x: Tensor, *, scale: float = 1.0, extra: dict[str, Tensor] | None = None
    ) -> Any:
        y = torch.relu(self.layer(x)) * scale
        return self.make(y, y + extra["bias"] if extra else y)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: {"a": a, "b": b},
        lambda a, b: (a, [b, None, 3]),
        lambda a, b: Answer(a, "text", {"b": b}),
        Pair,
    ],
)
def test_containers_of_results(make: Any) -> None:
    model = Many(make).eval()
    x, extra = torch.randn(3, 8), {"bias": torch.randn(8)}
    made = graphfuse.fuse(model, {"x": x, "scale": 0.5, "extra": extra}, keep="all")
    found, expected = made(x=x, scale=0.5, extra=extra), model(x, scale=0.5, extra=extra)
    assert type(found) is type(expected)
    for ours, theirs in zip(flatten(found)[0], flatten(expected)[0], strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours == theirs
    assert made.report().partitions


def test_a_plain_value_may_not_change_unless_it_is_captured_again() -> None:
    model = Many(Pair).eval()
    x = torch.randn(3, 8)
    made = graphfuse.fuse(model, {"x": x, "scale": 0.5}, keep="all", dynamic=False)
    with pytest.raises(ValueError, match=r"input 1 must be 0\.5 as in the example, got 0.25"):
        made(x=x, scale=0.25)
    open_ = graphfuse.fuse(model, {"x": x, "scale": 0.5}, keep="all")
    torch.testing.assert_close(open_(x=x, scale=0.25).first, model(x, scale=0.25).first)


def test_fuse_from_several_threads() -> None:
    models = [_mlp() for _ in range(4)]
    x = torch.randn(3, 8)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda model: graphfuse.fuse(model, x, keep="all"), models))
    for model, fused in zip(models, made, strict=True):
        torch.testing.assert_close(fused(x), model(x))


def _slices() -> list[Tensor]:
    return [
        torch.randn(1, 64, 8)[:, :5],  # contiguous, with a stride of 512 over one row
        torch.randn(3, 9, 16)[:, :5, :8],
        torch.randn(1, 5, 1).expand(1, 5, 8),
        torch.randn(5, 8, 2).transpose(0, 2)[:1].transpose(1, 2),
    ]


@pytest.mark.parametrize("case", range(4))
def test_slices_of_other_sizes(case: int) -> None:
    model, x = _mlp(), _slices()[case]
    made = graphfuse.fuse(model, torch.randn(1, 4, 8), keep="all")
    for given in (x, x.clone(), x[:, :3], torch.randn(1, 7, 8)):
        torch.testing.assert_close(made(given), model(given))
    opened = graphfuse.fuse(model, x, keep="all", dynamic=True)
    for given in (x, x[:, :3], torch.randn(len(x), 7, 8)):
        torch.testing.assert_close(opened(given), model(given))
    assert made.report().eager_calls == opened.report().eager_calls == {}


def test_sizes_that_contradict_raise() -> None:
    made = graphfuse.fuse(_mlp(), torch.randn(3, 8), keep="all")
    with pytest.raises(
        ValueError, match=r"FusedModule: input 0 must have shape \[3, 8\], got \[3, 9\]"
    ):
        made(torch.randn(3, 9))
    fixed = graphfuse.fuse(_mlp(), torch.randn(3, 8), keep="all", dynamic=False)
    with pytest.raises(ValueError, match=r"must have shape \[3, 8\], got \[4, 8\]"):
        fixed(torch.randn(4, 8))
    with pytest.raises(ValueError, match="must nest as in the example"):
        fixed(torch.randn(3, 8), torch.randn(1))


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"nan": "drop"}, ValueError, "fuse: nan must be 'propagate' or 'fast', got 'drop'"),
        ({"keep": "none"}, ValueError, "fuse: keep must be 'measured' or 'all', got 'none'"),
        ({"dtype": torch.float16}, ValueError, r"fuse: dtype must be None, torch\.float32"),
    ],
)
def test_unknown_settings(settings: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        graphfuse.fuse(_mlp(), torch.randn(3, 8), **settings)


def test_wrong_models_and_examples() -> None:
    with pytest.raises(TypeError, match=r"fuse: model must be a torch.nn.Module, got "):
        graphfuse.fuse(torch.relu, torch.randn(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fuse: model must be in evaluation mode"):
        graphfuse.fuse(nn.Linear(2, 2), torch.randn(3, 2))
    with pytest.raises(TypeError, match="fuse: example_inputs must be a tuple"):
        graphfuse.fuse(_mlp(), 3)  # type: ignore[arg-type]
    for odd in (torch.randn(3, 8).to_sparse(), torch.randn(3, 8).to(torch.complex64)):
        with pytest.raises(
            TypeError, match="fuse: example input 0 must be a dense real CPU tensor"
        ):
            graphfuse.fuse(_mlp(), odd)


def test_a_model_that_cannot_be_captured() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(graphfuse.FuseError, match=r"torch\.export cannot capture Branch"):
        graphfuse.fuse(Branch().eval(), torch.randn(3))


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_capture_leaves_garbage_collection_as_it_was(collects: bool, fails: bool) -> None:
    seen = []

    class Seeing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(gc.isenabled())
            return x if fails and x.sum() > 0 else -x

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        if fails:
            with pytest.raises(graphfuse.FuseError):
                graphfuse.fuse(Seeing().eval(), torch.randn(3))
        else:
            graphfuse.fuse(Seeing().eval(), torch.randn(3), keep="all")
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16-math"])
def test_bf16_is_refused_where_it_would_be_emulated(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_module, "has_bf16", lambda: False)
    with pytest.raises(ValueError, match="needs avx512_bf16 or AMX; fuse it without dtype"):
        graphfuse.fuse(_mlp(), torch.randn(3, 8), dtype=dtype)


@pytest.mark.skipif(not _module.has_bf16(), reason="this processor has no bfloat16 products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16-math"])
def test_bf16(dtype: Any) -> None:
    model = _mlp()
    x = torch.randn(64, 8)
    made = graphfuse.fuse(model, x, dtype=dtype, keep="all")
    # bfloat16 has 8 bits: a product of 16 terms is within a few hundredths.
    torch.testing.assert_close(made(x).float(), model(x), rtol=0.05, atol=0.05)
    assert made.report().partitions


def test_gradients_are_refused_and_none_come_out() -> None:
    made = graphfuse.fuse(_mlp(), torch.randn(3, 8), keep="all")
    with pytest.raises(ValueError, match="input 0 must not require gradients"):
        made(torch.randn(3, 8, requires_grad=True))
    with torch.no_grad():
        made(torch.randn(3, 8, requires_grad=True))
    assert not made(torch.randn(3, 8)).requires_grad
    with pytest.raises(ValueError, match="mode must be False"):
        made.train()
    assert made.eval() is made


def test_in_inference_mode_and_on_inference_tensors() -> None:
    model = _mlp()
    made = graphfuse.fuse(model, torch.randn(3, 8), keep="all")
    with torch.inference_mode():
        x = torch.randn(3, 8)
        torch.testing.assert_close(made(x), model(x))
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x))


class TestWeights:
    def test_another_tensor_in_a_weights_place(self) -> None:
        model, x = _mlp(), torch.randn(3, 8)
        made = graphfuse.fuse(model, x, keep="all")
        model[0].weight = nn.Parameter(torch.randn(16, 8))
        torch.testing.assert_close(made(x), model(x))
        model.load_state_dict(_mlp().state_dict())
        torch.testing.assert_close(made(x), model(x))

    def test_an_edit_that_no_version_counts_needs_refresh(self) -> None:
        model, x = _mlp(), torch.randn(3, 8)
        made = graphfuse.fuse(model, x, keep="all")
        model[0].weight.data.mul_(3)
        made.refresh()
        torch.testing.assert_close(made(x), model(x))

    def test_statistics_of_a_folded_batch_norm(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
        x = torch.randn(2, 3, 6, 6)
        made = graphfuse.fuse(model, x, keep="all")
        model[1].running_mean.add_(2)
        torch.testing.assert_close(made(x), model(x))

    def test_memory_does_not_grow_with_edits(self) -> None:
        model = nn.Linear(512, 512).eval()
        x = torch.randn(64, 512)
        made = graphfuse.fuse(model, x, keep="all")
        before = _resident_mib()
        for _ in range(100):
            with torch.no_grad():
                model.weight.mul_(1.01)
            made(x)
        # 100 forgotten copies of the packed weight would be 100 MiB.
        assert _resident_mib() - before < 50


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) / 256


class TestNan:
    def _model(self) -> nn.Module:
        blocks = [m for _ in range(6) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
        return nn.Sequential(*blocks, nn.MaxPool2d(2)).eval()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, -1e20])
    def test_propagates_from_the_input(self, value: float) -> None:
        model, x = self._model(), torch.randn(1, 8, 8, 8)
        made = graphfuse.fuse(model, x, keep="all")
        x[0, 3, 2, 5] = value
        torch.testing.assert_close(made(x), model(x), equal_nan=True)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
    def test_propagates_from_a_weight(self, value: float) -> None:
        model, x = self._model(), torch.randn(1, 8, 8, 8)
        with torch.no_grad():
            model[4].weight[1, 2, 1, 1] = value
        made = graphfuse.fuse(model, x, keep="all")
        torch.testing.assert_close(made(x), model(x), equal_nan=True)

    def test_propagates_where_it_arises_inside(self) -> None:
        # Products of 1e30 and 1e10 overflow to infinities of both signs, and their sum is NaN.
        model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1)).eval()
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor([[1e10, -1e10]]))
        made = graphfuse.fuse(model, torch.randn(1, 2), keep="all")
        x = torch.full((1, 2), 1e30)
        assert model(x).isnan().all()
        assert made(x).isnan().all()
        assert sum(made.report().eager_calls.values()) == 1

    def test_looks_are_few(self) -> None:
        made = graphfuse.fuse(self._model(), torch.randn(1, 8, 8, 8), keep="all")
        assert made.report().guards == 1

    def test_a_long_chain_is_looked_at_again(self) -> None:
        layers = [m for _ in range(60) for m in (nn.Linear(64, 64), nn.ReLU())]
        model, x = nn.Sequential(*layers).eval(), torch.randn(4, 64)
        for layer in layers[::2]:
            nn.init.kaiming_normal_(layer.weight)
        made = graphfuse.fuse(model, x, keep="all")
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-5)
        # One decade and more a layer, 31 decades between two looks.
        assert 2 <= made.report().guards <= 8

    def test_fast_leaves_the_looks_out_and_says_so(self) -> None:
        made = graphfuse.fuse(self._model(), torch.randn(1, 8, 8, 8), keep="all", nan="fast")
        report = made.report()
        assert report.guards == 0
        assert "nan='fast'" in str(report)


class TestKeep:
    def test_what_is_slower_goes_back_to_aten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def leave_out(
            fused: Any, eager: Any, packed: Any
        ) -> tuple[dict[str, str], dict[str, bool]]:
            names = [name for nodes in fused for name in nodes if "1" in name]
            return dict.fromkeys(names, "slower than eager"), {}

        def sides(given: Any, made: bool = False) -> dict[str, float]:
            for side in given.values():
                side()
            return {name: {"fused": 1.0, "all": 2.0, "eager": 3.0}[name] for name in given}

        monkeypatch.setattr(_measure, "_leave_out", leave_out)
        monkeypatch.setattr(_measure, "time_sides", sides)
        model, x = _mlp(), torch.randn(3, 8)
        made = graphfuse.fuse(model, x)
        report = made.report()
        assert [p.nodes for p in report.partitions] == [("linear", "relu")]
        assert [(r.node, r.reason) for r in report.refused] == [("linear_1", "slower than eager")]
        torch.testing.assert_close(made(x), model(x))

    def test_a_model_that_gains_nothing_runs_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            _measure, "time_sides", lambda sides, made=False: dict.fromkeys(sides, 1.0)
        )
        model, x = _mlp(), torch.randn(3, 8)
        made = graphfuse.fuse(model, x)
        assert made.report().mode == "eager"
        assert made.report().reason == "no faster than eager on the example"
        assert torch.equal(made(x), model(x))

    @pytest.mark.parametrize(
        ("calls_ms", "parts_ms", "whole_ms", "once_ms", "compared"),
        [
            (10, 1, 2, 10, [{"fused", "eager"}]),
            (1000, 900, 920, 1000, [{"fused", "eager"}]),
            (1000, 500, 520, 990, [{"fused"}]),
            (1000, 500, 520, 5000, [{"fused"}]),
            (1000, 500, 900, 1000, [{"fused"}, {"eager"}]),  # parts that promised too much
            (1000, 500, 520, 530, [{"fused"}, {"eager"}]),  # a model that is faster than its graph
        ],
    )
    def test_eager_is_called_as_a_whole_only_where_that_could_tell(
        self,
        monkeypatch: pytest.MonkeyPatch,
        calls_ms: float,
        parts_ms: float,
        whole_ms: float,
        once_ms: float,
        compared: list[set[str]],
    ) -> None:
        run_nodes, found, eager_ms = _measure.run_nodes, list[set[str]](), 1.1 * calls_ms

        def timed(*args: Any, **kwargs: Any) -> Any:
            values, times, repeats = run_nodes(*args, **kwargs)
            return values, dict.fromkeys(times, 1e3 * calls_ms / len(times)), repeats

        def units(segments: Any, *_: Any) -> dict[tuple[str, ...], float]:
            parts = [nodes for segment in segments for nodes in _measure._partitions_of(segment)]
            return {nodes: 1e3 * parts_ms * len(nodes) / 3 for nodes in parts}

        def sides(given: Any, made: bool = False) -> dict[str, float]:
            found.append(set(given))
            return {name: whole_ms if name == "fused" else eager_ms for name in given}

        monkeypatch.setattr(_measure, "run_nodes", timed)
        monkeypatch.setattr(_measure, "time_units", units)
        monkeypatch.setattr(_measure, "_time", lambda _: once_ms)
        monkeypatch.setattr(_measure, "_time_packed", lambda *_: [])
        monkeypatch.setattr(_measure, "time_sides", sides)
        report = graphfuse.fuse(_mlp(), torch.randn(3, 8)).report()
        assert found == compared
        assert report.mode == "fused"
        assert report.fused_ms == pytest.approx(whole_ms)
        called = any("eager" in each for each in compared)
        assert report.eager_ms == pytest.approx(eager_ms if called else min(calls_ms, once_ms))

    def test_a_model_that_knows_a_shorter_way_runs_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_measure, "_BUDGET_S", 0.0)
        monkeypatch.setattr(_measure, "_CLOSE", 1e9)

        class Short(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(256, 256)

            def forward(self, x: Tensor) -> Tensor:
                steps = 40 if torch.compiler.is_exporting() else 0
                for _ in range(steps):
                    x = self.layer(x).relu()
                return x

        made = graphfuse.fuse(Short().eval(), torch.randn(64, 256))
        assert made.report().mode == "eager"

    def test_in_bf16_eager_is_the_same_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        dtypes = list[torch.dtype]()

        def sides(given: Any, made: bool = False) -> dict[str, float]:
            for _ in range(2):
                (result,) = given["eager"]()
                dtypes.append(result.dtype)
            return dict.fromkeys(given, 1.0)

        monkeypatch.setattr(_measure, "time_sides", sides)

        def eager_plan(engine: Any, symbols: Any) -> Any:
            plans.append(original(engine, symbols))
            return plans[-1]

        plans, original = list[Any](), _measure.Engine.eager_plan
        monkeypatch.setattr(_measure.Engine, "eager_plan", eager_plan)
        made = graphfuse.fuse(_mlp(), torch.randn(3, 8), dtype=torch.bfloat16)
        assert dtypes == [torch.bfloat16] * 2
        assert len(plans) == 1  # or each call that is timed would make one
        assert made(torch.randn(3, 8)).dtype == torch.bfloat16

    def test_parts_that_promised_too_much_do_not_stay(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def leave_out(fused: Any, eager: Any, options: Any) -> Any:
            return {"linear_1": "slower than eager"}, {}

        def sides(given: Any, made: bool = False) -> dict[str, float]:
            return {name: {"fused": 2.0, "all": 1.0, "eager": 3.0}[name] for name in given}

        monkeypatch.setattr(_measure, "_leave_out", leave_out)
        monkeypatch.setattr(_measure, "time_sides", sides)
        model, x = _mlp(), torch.randn(3, 8)
        made = graphfuse.fuse(model, x)
        assert made.report().refused == ()
        assert (made.report().fused_ms, made.report().eager_ms) == (1.0, 3.0)
        torch.testing.assert_close(made(x), model(x))

    @pytest.mark.parametrize("where", ["sides", "first"])
    def test_a_guard_that_trips_in_the_comparison_leaves_all_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        engines, plans = list[Any](), list[Any]()

        def leave_out(fused: Any, eager: Any, options: Any) -> Any:
            return {"linear_1": "slower than eager"}, {"linear_1": "inside"}

        def run(engine: Any, leaves: Any, symbols: Any) -> Any:
            engines.append(engine)
            plans.append(engine.plan(symbols))
            if where == "first" and engine.packed:
                raise _measure.GuardTripped("in this test")
            return original(engine, leaves, symbols)

        def sides(given: Any, made: bool = False) -> dict[str, float]:
            if "fused" in given:
                assert engines[-1].packed
                raise _measure.GuardTripped("in this test")
            return dict.fromkeys(given, 3.0)

        original = _measure.Engine.run
        monkeypatch.setattr(_measure.Engine, "run", run)
        monkeypatch.setattr(_measure, "_leave_out", leave_out)
        monkeypatch.setattr(_measure, "time_sides", sides)
        model, x = _mlp(), torch.randn(3, 8)
        made = graphfuse.fuse(model, x)
        assert len(plans) == 2
        assert plans[0] is not plans[1]
        assert (engines[0].forced, engines[0].packed) == ({}, {})
        assert engines[0].plan({}) is plans[0]
        assert made.report().refused == ()
        assert made.report().mode == "fused"
        torch.testing.assert_close(made(x), model(x))

    def test_times_are_reported(self) -> None:
        made = graphfuse.fuse(_mlp(), torch.randn(3, 8))
        report = made.report()
        assert report.fused_ms is not None
        assert report.fused_ms > 0
        assert report.eager_ms is not None
        assert report.record()["eager_ms"] == report.eager_ms


def test_what_does_not_compile_goes_back_to_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeweave.graphfuse import _segment

    class Ops:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        @staticmethod
        def onednn_program_create(code: list[int], constants: list[Tensor]) -> int:
            if any(constant.shape == (4, 16) for constant in constants):
                raise RuntimeError("oneDNN: partition_compile: unimplemented (status 3)")
            return int(real.onednn_program_create(code, constants))

    real = _segment.ops
    monkeypatch.setattr(_segment, "ops", Ops())
    model, x = _mlp(), torch.randn(3, 8)
    made = graphfuse.fuse(model, x, keep="all")
    torch.testing.assert_close(made(x), model(x))
    report = made.report()
    assert [p.nodes for p in report.partitions] == [("linear", "relu")]
    assert [r.reason for r in report.refused] == [
        "oneDNN: partition_compile: unimplemented (status 3)"
    ]


def test_verify_finds_every_partition_good() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).eval()
    made = graphfuse.fuse(model, torch.randn(2, 3, 9, 9), keep="all")
    lines = made.verify()
    assert all(line.good for line in lines), lines
    *parts, whole = lines
    assert {line.nodes for line in parts} == {p.nodes for p in made.report().partitions}
    assert {line.inputs for line in parts} == {"random", "large", "tiny", "zero"}
    assert whole.inputs == "whole"
    assert len(whole.nodes) == 5


def test_verify_finds_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    made = graphfuse.fuse(_mlp(), torch.randn(3, 8), keep="all")

    def doubled(segment: Segment, inputs: list[Tensor]) -> list[Tensor]:
        return [2 * value for value in original(segment, inputs)]

    original = Segment.run
    monkeypatch.setattr(Segment, "run", doubled)
    made._engines[0].drop_plans()  # what is compiled holds the function that was there
    lines = made.verify()
    # Of zeros the first layers give their bias alone, which is wrong too when doubled.
    assert lines
    assert not any(line.good for line in lines)


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_draw(tmp_path: Any, ending: str) -> None:
    made = graphfuse.fuse(_mlp(), torch.randn(3, 8), keep="all")
    path = tmp_path / f"graph{ending}"
    made.draw(path)
    content = path.read_bytes()
    if ending == ".png":
        assert content.startswith(b"\x89PNG")
    else:
        import xml.etree.ElementTree as ElementTree

        root = ElementTree.fromstring(content)
        titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
        assert titles == ["tensors_0", "linear", "relu", "linear_1"]
        fills = [e.get("fill") for e in root.iter("{http://www.w3.org/2000/svg}rect")]
        assert fills[2] == fills[3] != fills[4]
    with pytest.raises(ValueError, match=r"draw: path must end in .svg or .png"):
        made.draw(tmp_path / "graph.pdf")


def test_a_transformer_with_keyword_arguments_and_open_sizes() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128
    )
    model = BertModel(config).eval()

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 1000, (batch, length))
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0
        return {"input_ids": ids, "attention_mask": mask}

    made = graphfuse.fuse(model, inputs(2, 16), keep="all", dynamic=True)
    for batch, length in ((2, 16), (3, 24), (5, 7)):
        given = inputs(batch, length)
        found, expected = made(**given), model(**given)
        assert type(found) is type(expected)
        for name in ("last_hidden_state", "pooler_output"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    report = made.report()
    fused = sum(len(p.nodes) for p in report.partitions)
    assert fused >= 2 * 10
    assert not report.eager_calls


class TestWhatIsKeptBetweenCalls:
    def test_another_layout_after_the_first(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
        x = torch.randn(2, 3, 8, 8)
        made = graphfuse.fuse(model, x, keep="all")
        for given in (x, x.to(memory_format=torch.channels_last), x, x.transpose(2, 3)):
            torch.testing.assert_close(made(given), model(given))

    def test_sizes_in_turn(self) -> None:
        model, x = _mlp(), torch.randn(3, 8)
        made = graphfuse.fuse(model, x, keep="all", dynamic=True)
        for rows in (3, 5, 3, 1, 5, 0):
            given = torch.randn(rows, 8)
            torch.testing.assert_close(made(given), model(given))

    def test_an_edit_between_calls(self) -> None:
        model, x = _mlp(), torch.randn(3, 8)
        made = graphfuse.fuse(model, x, keep="all")
        made(x)
        with torch.no_grad():
            model[0].weight.mul_(2)
        torch.testing.assert_close(made(x), model(x))

    def test_a_call_during_a_refresh_waits_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, x = _mlp(), torch.randn(3, 8)
        made = graphfuse.fuse(model, x, keep="all")
        made(x)
        engine = made._engines[0]
        load, loaded, go_on = engine.weights.load, threading.Event(), threading.Event()

        def slow_load() -> None:
            load()
            loaded.set()
            assert go_on.wait(30)

        monkeypatch.setattr(engine.weights, "load", slow_load)
        with torch.no_grad():
            model[0].weight.mul_(2)
        results: list[Tensor] = []
        first = threading.Thread(target=lambda: results.append(made(x)))
        first.start()
        assert loaded.wait(30)
        second = threading.Thread(target=lambda: results.append(made(x)))
        second.start()
        second.join(0.5)  # it would be done by now, with the plan of before
        go_on.set()
        for thread in (first, second):
            thread.join(30)
        assert len(results) == 2
        for result in results:
            torch.testing.assert_close(result, model(x))

    @pytest.mark.parametrize("value", [[1, 2], (torch.ones(2),), nn.Parameter(torch.ones(2)), None])
    def test_the_structure_of_a_call_is_that_of_its_containers(self, value: Any) -> None:
        x = torch.ones(3)
        for args, kwargs in (
            ((x,), {}),
            ((x, x), {"y": x, "a": x}),
            ((), {"y": x}),
            ((x, value), {}),
            ((), {"y": value}),
        ):
            leaves, structure = flatten_call(args, kwargs)
            expected = flatten((args, kwargs))
            assert structure == expected[1]
            assert all(a is b for a, b in zip(leaves, expected[0], strict=True))
        assert flatten_call((x,), {"a": x, "b": x})[1] != flatten_call((x,), {"b": x, "a": x})[1]
