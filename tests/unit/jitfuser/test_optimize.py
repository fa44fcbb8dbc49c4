"""`optimize`: structures, shapes, weights, threads, and what runs where."""

from __future__ import annotations

import re
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgeweave import EdgeweaveWarning
from edgeweave.jitfuser import OptimizedModel, _build, flags, optimize

Pair = namedtuple("Pair", "left right")


@pytest.fixture(autouse=True)
def _fused_even_if_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are no faster fused; these tests are about what is fused, not about speed."""
    monkeypatch.setattr(_build, "_medians", lambda sides: [1.0, *[0.5] * (len(sides) - 1)])


@dataclass
class Output:
    scores: Tensor
    hidden: tuple[Tensor, ...] | None = None
    scale: float = 1.0


class Net(nn.Module):
    """Two layers; what it returns is up to a function."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any] = lambda a, b: b) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.pack = pack

    def forward(self, x: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Any:
        hidden = nn.functional.gelu(self.first(x))
        scores = self.second(hidden) * scale
        return self.pack(hidden, scores if bias is None else scores + bias)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    ).eval()


# fp32 sums of at most 72 terms, three layers: some tens of roundings.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize(
    "pack",
    [
        lambda a, b: b,
        lambda a, b: (a, b),
        lambda a, b: [b, (a,), None],
        lambda a, b: {"scores": b, "hidden": {"first": a}, "n": 3},
        lambda a, b: Pair(a, b),
        lambda a, b: Output(b, (a, b), 2.0),
        lambda a, b: (b, b),
    ],
)
def test_results_have_the_models_structure(pack: Callable[..., Any]) -> None:
    model, x = Net(pack).eval(), torch.randn(5, 8)
    fast = optimize(model, x)
    ours, eager = fast(x), model(x)
    assert fast.report().shapes[0].state == "fused"
    assert type(ours) is type(eager)
    assert_same_structure(ours, eager)


def assert_same_structure(ours: Any, eager: Any) -> None:
    if isinstance(eager, Tensor):
        torch.testing.assert_close(ours, eager, **CLOSE)
    elif isinstance(eager, Output):
        assert_same_structure(vars(ours), vars(eager))
    elif isinstance(eager, dict):
        assert list(ours) == list(eager)
        for key in eager:
            assert_same_structure(ours[key], eager[key])
    elif isinstance(eager, tuple | list):
        assert type(ours) is type(eager)
        for a, b in zip(ours, eager, strict=True):
            assert_same_structure(a, b)
    else:
        assert ours == eager


def test_keyword_inputs_flags_and_missing_inputs_are_shapes_of_their_own() -> None:
    model, x, bias = Net().eval(), torch.randn(5, 8), torch.randn(4)
    fast = optimize(model, ((x,), {"bias": bias, "scale": 2.0}))
    for call in (
        {"bias": bias, "scale": 2.0},
        {"bias": bias, "scale": 3.0},
        {"scale": 3.0},
        {},
    ):
        torch.testing.assert_close(fast(x, **call), model(x, **call), **CLOSE)
    torch.testing.assert_close(fast(x=x, bias=bias), model(x, bias), **CLOSE)
    assert len(fast.report().shapes) == 5


@pytest.mark.parametrize("example", ["tensor", "tuple", "dict", "pair"])
def test_forms_of_example_inputs(example: str) -> None:
    x = torch.randn(5, 8)
    forms = {"tensor": x, "tuple": (x, None), "dict": {"x": x}, "pair": ((x,), {"scale": 1.0})}
    fast = optimize(Net().eval(), forms[example])
    assert [s.calls for s in fast.report().shapes] == [1]


def test_more_shapes_than_torch_fuses() -> None:
    """torch stops fusing after 12 shapes; here the 20th is fused as the first is."""
    model = Net().eval()
    fast = optimize(model, torch.randn(1, 8), max_shapes=20)
    for rows in range(1, 21):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), model(x), **CLOSE)
        fast(x)
    shapes = fast.report().shapes
    assert [s.state for s in shapes] == ["fused"] * 20
    assert [len(s.groups) for s in shapes] == [len(shapes[0].groups)] * 20
    assert [(s.calls, s.fused_calls) for s in shapes] == [(3, 3)] + [(2, 2)] * 19


def test_cache_is_bounded_and_the_least_recent_goes() -> None:
    fast = optimize(Net().eval(), torch.randn(1, 8), max_shapes=3)
    for rows in (2, 3, 1, 4):
        fast(torch.randn(rows, 8))
    report = fast.report()
    assert [s.shapes[0][0] for s in report.shapes] == [3, 1, 4]
    assert report.evicted == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.first.weight.mul_(2.0),
        lambda m: m.second.bias.add_(1.0),
        lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
        lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(16, 8))),
    ],
)
def test_edited_weights_are_noticed(edit: Callable[[Net], Any]) -> None:
    model, x = Net().eval(), torch.randn(5, 8)
    fast = optimize(model, x)
    with torch.no_grad():
        before = fast(x).clone()
        edit(model)
        torch.testing.assert_close(fast(x), model(x), **CLOSE)
    assert not torch.allclose(before, fast(x))
    assert fast.report().refreshed == 1


def test_edited_running_statistics_are_noticed() -> None:
    model, x = conv_net(), torch.randn(2, 3, 8, 8)
    fast = optimize(model, x)
    model[1].running_mean.add_(3.0)
    torch.testing.assert_close(fast(x), model(x), **CLOSE)


def test_refresh_is_for_edits_that_torch_cannot_see() -> None:
    model, x = conv_net(), torch.randn(2, 3, 8, 8)
    fast = optimize(model, x)
    model[0].weight.data.mul_(2.0)
    fast.refresh()
    torch.testing.assert_close(fast(x), model(x), **CLOSE)


def test_two_models_sharing_a_weight() -> None:
    one, two, x = Net().eval(), Net().eval(), torch.randn(5, 8)
    two.first.weight = one.first.weight
    fast_one, fast_two = optimize(one, x), optimize(two, x)
    with torch.no_grad():
        one.first.weight.mul_(3.0)
    torch.testing.assert_close(fast_one(x), one(x), **CLOSE)
    torch.testing.assert_close(fast_two(x), two(x), **CLOSE)


def test_four_threads() -> None:
    model = conv_net()
    inputs = [torch.randn(n, 3, 8, 8) for n in (1, 2, 1, 3)]
    fast = optimize(model, inputs[0])
    eager = [model(x) for x in inputs]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(20):
                torch.testing.assert_close(fast(inputs[number]), eager[number], **CLOSE)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(s.calls for s in fast.report().shapes) == 81


def test_thread_count_may_change_after_packing() -> None:
    model, x = conv_net(), torch.randn(2, 3, 8, 8)
    fast = optimize(model, x)
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        torch.testing.assert_close(fast(x), model(x), **CLOSE)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: torch.cat([x, x], 3)[:, :, :, ::2][:, :, :, :8].clone()[..., :],
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: x.clone().requires_grad_(),
        lambda x: x.as_strided(x.shape, (7, *x.stride()[1:])) if x.shape[0] == 1 else x,
    ],
)
def test_strides_and_gradients_are_no_shape_of_their_own(view: Callable[[Tensor], Tensor]) -> None:
    model, x = conv_net(), torch.randn(1, 3, 8, 8)
    fast = optimize(model, x)
    odd = view(x)
    ours = fast(odd)
    torch.testing.assert_close(ours, model(odd).detach(), **CLOSE)
    assert not ours.requires_grad
    assert [s.fused_calls for s in fast.report().shapes] == [2]


def test_modes_around_the_call() -> None:
    model, x = conv_net(), torch.randn(2, 3, 8, 8)
    fast, eager = optimize(model, x), model(x)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), eager, **CLOSE)
        torch.testing.assert_close(fast(torch.clone(x)), eager, **CLOSE)
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(x).dtype is torch.float32
    torch.testing.assert_close(fast(x), eager.detach(), **CLOSE)


def test_flags_do_not_leak() -> None:
    before, autocast = flags(), torch._C._jit_set_autocast_mode(True)
    optimize(conv_net(), torch.randn(2, 3, 8, 8))
    assert flags() == before
    assert torch._C._jit_set_autocast_mode(autocast) is True


def test_the_model_keeps_its_own_layout_and_weights() -> None:
    model = conv_net()
    before = {k: (v.clone(), v.stride(), v.data_ptr()) for k, v in model.state_dict().items()}
    optimize(model.train(), torch.randn(2, 3, 8, 8))
    assert not model.training
    for name, value in model.state_dict().items():
        old, stride, pointer = before[name]
        assert (value.stride(), value.data_ptr()) == (stride, pointer)
        assert torch.equal(value, old)


class Writes(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ x.t() + self.calls


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1).relu()


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x @ x.t(), 0.5, True)


class Branches(nn.Module):
    """Takes another way where there are NaN, which a trace does not see."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ x.t()
        return y * 0 if bool(x.isnan().any()) else y


class Cache:
    def __init__(self, held: Tensor) -> None:
        self.held = held


class ReturnsObject(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Cache(x @ x.t())


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Writes(), "changes its own buffers|another result each time"),
        (WritesInput(), "writes into its inputs"),
        (Random(), "another result each time"),
        (Branches(), "NaN inputs: result 0"),
        (ReturnsObject(), "result must be made of tensors.*got Cache"),
    ],
)
def test_what_cannot_be_right_runs_in_eager(model: nn.Module, why: str) -> None:
    fast = optimize(model, torch.ones(3, 3))
    (shape,) = fast.report().shapes
    assert shape.state == "eager"
    assert any(re.search(why, reason) for reason in shape.reasons)
    assert (shape.calls, shape.fused_calls) == (1, 0)
    assert f"why: {shape.reasons[0]}" in str(fast.report())


def test_eager_fallback_takes_the_users_tensors() -> None:
    example, x, wider = torch.ones(3, 3), torch.zeros(3, 3), torch.zeros(3, 4)
    fast = optimize(WritesInput(), example)
    assert torch.equal(example, torch.ones(3, 3)), "building must not write into the example"
    for given in (x, wider):
        fast(given)
        assert torch.equal(given, torch.ones_like(given)), "written once, as in eager"


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: x.to_mkldnn(),
        lambda x: x.to(torch.complex64),
        lambda x: x.to_sparse(),
    ],
)
def test_odd_inputs_answer_as_eager_does(odd: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Tanh()).eval()
    x = torch.randn(4, 4)
    fast = optimize(model, x)
    try:
        eager = model(odd(x))
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            fast(odd(x))
        return
    ours = fast(odd(x))
    assert ours.layout == eager.layout
    torch.testing.assert_close(ours.to_dense(), eager.to_dense())


def test_inputs_that_the_model_refuses_raise_its_own_error() -> None:
    fast = optimize(Net().eval(), torch.randn(5, 8))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fast(torch.randn(5, 9))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        fast(torch.randn(5, 8), colour=torch.ones(1))


def test_measured_slower_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "_medians", lambda sides: [1.0, *[1.5] * (len(sides) - 1)])
    fast = optimize(Net().eval(), torch.randn(5, 8))
    (shape,) = fast.report().shapes
    assert shape.state == "eager"
    assert "measured: eager 1e+03 ms" in shape.reasons[-1]


@pytest.mark.parametrize("faster", ["contiguous", "channels_last"])
def test_the_faster_layout_is_taken(monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    times = {"contiguous": [1.0, 0.5, 0.7], "channels_last": [1.0, 0.7, 0.5]}[faster]
    monkeypatch.setattr(_build, "_medians", lambda sides: times)
    model, x = conv_net(), torch.randn(2, 3, 8, 8)
    fast = optimize(model, x)
    assert fast.report().shapes[0].layout == faster
    torch.testing.assert_close(fast(x), model(x), **CLOSE)


def test_nan_fast_fuses_more_and_says_so() -> None:
    model, x = conv_net(), torch.randn(2, 3, 8, 8)
    safe, fast = optimize(model, x), optimize(model, x, nan="fast")
    assert "clamp_min" in safe.report().shapes[0].left_out
    assert "clamp_min" not in fast.report().shapes[0].left_out
    assert (safe.report().nan, fast.report().nan) == ("propagate", "fast")
    x[0, 0, 0, 0] = float("nan")
    assert torch.equal(safe(x).isnan(), model(x).isnan())


def test_bf16_without_instructions_says_so_and_computes_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgeweave.jitfuser._optimize.bf16_missing", lambda: "the processor is old")
    model, x = conv_net(), torch.randn(2, 3, 8, 8)
    with pytest.warns(EdgeweaveWarning, match="bf16 was asked for, but the processor is old"):
        fast = optimize(model, x, dtype=torch.bfloat16)
    assert fast(x).dtype is torch.float32
    assert "the processor is old" in str(fast.report())


def test_bf16_recipe_is_autocasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without instructions for it, the numbers are those of autocast."""
    monkeypatch.setattr("edgeweave.jitfuser._optimize.bf16_missing", lambda: None)
    model, x = conv_net(), torch.randn(2, 3, 8, 8)
    fast = optimize(model, x, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(x)
    ours = fast(x)
    assert ours.dtype is eager.dtype is torch.bfloat16
    # Three layers with a rounding to 8 bits each, of values of order 1.
    torch.testing.assert_close(ours, eager.detach(), rtol=0.03, atol=0.03)
    assert fast.report().dtype == "autocast torch.bfloat16"


def test_profile_times_every_group() -> None:
    fast = optimize(conv_net(), torch.randn(2, 3, 8, 8))
    groups = fast.report(profile=True).shapes[0].groups
    assert len(groups) == 2
    assert all(group.time_s is not None and group.time_s > 0 for group in groups)
    assert "ms  group 0: _convolution" in str(fast.report(profile=True))


def test_report_says_what_was_linted_and_left_out() -> None:
    fast = optimize(conv_net(), torch.randn(2, 3, 8, 8))
    (shape,) = fast.report().shapes
    assert shape.findings == {"relu: turns NaN into a number (kept out)": 1}
    assert shape.left_out == {"clamp_min": 1}
    assert shape.warm_ups == 2
    text = str(fast.report())
    for part in (
        "2x3x8x8: fused",
        "1 calls (1 fused)",
        "linted 1x relu",
        "one by one: 1x clamp_min",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: optimize(len, torch.ones(1)),
            TypeError,
            "optimize: model must be a torch.nn.Module",
        ),
        (lambda: optimize(Net(), 3), TypeError, "example_inputs must hold a tensor, got int 3"),
        (lambda: optimize(Net(), object()), TypeError, "example_inputs.*must be made of tensors"),
        (
            lambda: optimize(Net(), torch.ones(1, 8), nan="drop"),
            ValueError,
            "nan must be 'propagate'",
        ),
        (
            lambda: optimize(Net(), torch.ones(1, 8), max_shapes=0),
            ValueError,
            "max_shapes must be at least 1",
        ),
        (
            lambda: optimize(Net(), torch.ones(1, 8), dtype=torch.float16),
            ValueError,
            "dtype must be None, float32 or bfloat16, got torch.float16",
        ),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_type_of_the_result() -> None:
    assert isinstance(optimize(Net().eval(), torch.randn(1, 8)), OptimizedModel)
