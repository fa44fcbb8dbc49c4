"""Table-driven: torch's bridge as it is, eager, and ours."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from _jit_faults import FAULTS, IMAGE, LUCK, RAISES, WRONG, Body, Fault, X
from torch import Tensor

from edgeweave.jitfuser import _trace, fuser, optimize
from edgeweave.jitfuser._capture import Capture, flatten
from edgeweave.jitfuser._oracle import distance
from edgeweave.jitfuser._values import probe

ROWS = pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
# The faults are those of one release; others may have fewer.
TABLE_VERSION = "2.13"


def flat(results: Any) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    flatten(results, found, "results")
    return tuple(found)


def differs(ours: Sequence[Tensor], eager: Sequence[Tensor]) -> str | None:
    """Says how results differ from eager's: dtype, shape, NaN, infinities, values."""
    for a, b in zip(ours, eager, strict=True):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}"
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return "other integers"
            continue
        if not torch.equal(a.isnan(), b.isnan()):
            return f"NaN in {int(a.isnan().sum())} places for {int(b.isnan().sum())}"
        if not torch.equal(a.isinf() * a.sign(), b.isinf() * b.sign()):
            return "other infinities"
        # Sums of at most 27 terms in another order, and oneDNN's own exp and erf: a few roundings
        # each. The mildest wrong result of the table is off by 4e-4 (of half precision, eps 1e-3:
        # there bits are compared).
        limit = (
            0.0
            if a.dtype is torch.float16
            else 32 * max(torch.finfo(a.dtype).eps, torch.finfo(torch.float32).eps)
        )
        if not distance(a, b) <= limit:
            return f"off by {distance(a, b):.1e}"
    return None


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.raw != LUCK], ids=[f.name for f in FAULTS if f.raw != LUCK]
)
def test_torchs_bridge_has_the_fault(fault: Fault) -> None:
    if not torch.__version__.startswith(TABLE_VERSION):
        pytest.skip(f"the table is of torch {TABLE_VERSION}, this is {torch.__version__}")
    model = Body(fault.function).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probe_inputs = fault.probe or fault.inputs
        eager = flat(model(*(x.clone() for x in probe_inputs)))
        try:
            with fuser("fuser3"):
                traced = torch.jit.trace(model, fault.inputs, check_trace=False).eval()
                frozen = torch.jit.freeze(traced)
                for _ in range(3):
                    frozen(*fault.inputs)
                found = flat(frozen(*probe_inputs))
        except RuntimeError:
            assert fault.raw == RAISES
            return
    assert fault.raw == WRONG
    assert differs(found, eager) is not None


# torch.jit.freeze itself drops it, whatever the dtype; only the oracle can see that.
BEYOND_LINT = ("bool + 0",)


@pytest.mark.parametrize(
    "fault",
    [f for f in FAULTS if f.name not in BEYOND_LINT],
    ids=[f.name for f in FAULTS if f.name not in BEYOND_LINT],
)
def test_lint_alone_makes_it_as_eager(fault: Fault) -> None:
    """Without the oracle's way out into eager."""
    model = Body(fault.function).eval()
    candidate = candidate_of(model, fault.inputs)
    for inputs in filter(None, (fault.inputs, fault.probe)):
        with torch.no_grad():
            eager = flat(model(*(x.clone() for x in inputs)))
            ours = candidate.function(*inputs)
        assert differs(ours, eager) is None


@ROWS
def test_optimize_is_as_eager(fault: Fault) -> None:
    model = Body(fault.function).eval()
    fast = optimize(model, fault.inputs)
    for inputs in filter(None, (fault.inputs, fault.probe)):
        with torch.no_grad():
            eager = flat(model(*(x.clone() for x in inputs)))
        assert differs(flat(fast(*inputs)), eager) is None


def candidate_of(
    model: torch.nn.Module, inputs: Sequence[Tensor], *, keep_nan: bool = True
) -> _trace.Candidate:
    tensors: list[Tensor] = []
    capture = Capture(model, flatten((tuple(inputs), {}), tensors, "inputs")).eval()
    traced = _trace.trace(capture, tensors, None)
    return _trace.make_candidate(traced, tensors, "fused", keep_nan=keep_nan)


# What must still fuse: safety by fusing nothing would pass everything above.
@pytest.mark.parametrize(
    ("function", "inputs", "groups"),
    [
        (lambda m, x: m.linear(x), X, [("linear",)]),
        (lambda m, x: torch.nn.functional.gelu(m.linear(x)), X, [("linear", "gelu")]),
        (lambda m, x: m.linear(x) + x, X, [("linear", "add")]),
        (lambda m, x: m.linear(x) * 2, X, [("linear", "mul")]),
        (lambda m, x: 2 + m.linear(x), X, [("linear", "add")]),
        (lambda m, x: torch.nn.functional.linear(x, m.w) + m.b, X, [("linear",)]),
        (lambda m, x: torch.addmm(m.b, x, m.w), X, [("linear",)]),
        (lambda m, x: torch.nn.functional.elu(m.linear(x), 2), X, [("linear", "elu")]),
        (
            lambda m, x: torch.nn.functional.leaky_relu(m.linear(x), 1),
            X,
            [("linear", "leaky_relu")],
        ),
        (lambda m, x: m.conv(x), IMAGE, [("_convolution",)]),
        (
            lambda m, x: torch.nn.functional.silu(m.conv(x)),
            IMAGE,
            [("_convolution", "sigmoid", "mul")],
        ),
        (lambda m, x: torch.nn.functional.avg_pool2d(x, 2), IMAGE, [("avg_pool2d",)]),
        (lambda m, x: torch.nn.functional.layer_norm(x, (8,)), IMAGE, [("layer_norm",)]),
        (
            lambda m, x: torch.nn.functional.conv2d(x, m.kernel, padding="same"),
            IMAGE,
            [("_convolution",)],
        ),
    ],
)
def test_what_is_right_still_fuses(function: Any, inputs: Tensor, groups: list[Any]) -> None:
    found = candidate_of(Body(function).eval(), (inputs,)).groups
    assert list(found.values()) == groups


@pytest.mark.parametrize(
    ("function", "inputs", "groups"),
    [
        (lambda m, x: m.linear(x).relu(), X, [("linear", "relu")]),
        (lambda m, x: m.linear(x).clamp(-1, 1), X, [("linear", "clamp")]),
        (lambda m, x: m.conv(x).relu(), IMAGE, [("_convolution", "relu")]),
        (lambda m, x: torch.nn.functional.max_pool2d(x, 2), IMAGE, [("max_pool2d",)]),
    ],
)
def test_fast_nan_fuses_clamps(function: Any, inputs: Tensor, groups: list[Any]) -> None:
    model = Body(function).eval()
    candidate = candidate_of(model, (inputs,), keep_nan=False)
    assert list(candidate.groups.values()) == groups
    with torch.no_grad():
        assert differs(candidate.function(inputs), flat(model(inputs))) is None


def test_probe_knows_dtypes_shapes_and_strides() -> None:
    graph = torch._C.parse_ir(
        "graph(%x : Tensor):\n  %d : int = prim::Constant[value=0]()\n"
        "  %e : int = prim::Constant[value=1]()\n  %y : Tensor = aten::transpose(%x, %d, %e)\n"
        "  %z : Tensor = aten::isnan(%y)\n  return (%z)\n"
    )
    infos = probe(graph, [torch.zeros(2, 3)]).of(graph)
    x, y, z = (
        infos[v.unique()] for v in [*graph.inputs(), *(n.output() for n in list(graph.nodes())[2:])]
    )
    assert (x.shape, x.stride, x.dtype) == ((2, 3), (3, 1), torch.float32)
    assert (y.shape, y.stride, y.dtype, y.dense) == ((3, 2), (1, 3), torch.float32, True)
    assert (z.shape, z.dtype) == ((3, 2), torch.bool)


@pytest.mark.parametrize(
    ("dtype"), [torch.uint8, torch.bfloat16, torch.bool, torch.complex64, torch.float16]
)
def test_probe_knows_every_dtype(dtype: torch.dtype) -> None:
    graph = torch._C.parse_ir(
        "graph(%x : Tensor):\n  %y : Tensor = aten::alias(%x)\n  return (%y)\n"
    )
    infos = probe(graph, [torch.zeros(2).to(dtype)]).of(graph)
    assert infos[next(iter(graph.nodes())).output().unique()].dtype is dtype
