"""Products of float32 by edgeweave's own kernels: against float64, and in fused models."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeweave import graphfuse
from edgeweave._native import ops
from edgeweave.graphfuse import _packed
from edgeweave.graphfuse._tile_ops import TiledWeight, has_vectors, tiled_linear

from .conftest import run_all
from .test_tiles import ACTIVATIONS, Layer

needs_vectors = pytest.mark.skipif(
    not has_vectors(), reason="the plain kernels are the only ones that this processor has"
)


def linear(x: Tensor, w: Tensor, b: Tensor | None, *rest: Any) -> Tensor:
    return tiled_linear(x, TiledWeight(w, b, torch.float32), *rest, True)


def assert_near(found: Tensor, exact: Tensor, inner: int) -> None:
    # Sums of `inner` terms of size 1 / sqrt(inner), and what the fitted activations are off by.
    limit = 3e-6 + 4 * 2.0**-24 * math.sqrt(inner)
    assert ((found.double() - exact).abs() / (1 + exact.abs())).max() <= limit


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (1, 33, 48),
        (3, 5, 49),
        (7, 1025, 16),
        (8, 64, 17),
        (9, 31, 95),
        (17, 2100, 33),
        (130, 300, 65),
        (300, 1030, 50),
        # Several parts of the rows, and of the inner dimension too.
        (300, 1024, 50),
        (600, 1030, 50),
    ],
)
def test_products(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x, w = torch.randn(m, k), torch.randn(n, k) / math.sqrt(k)
    for bias, combine in itertools.product((None, torch.randn(n)), (0, 1, 2)):
        other = torch.randn(m, n) if combine else None
        for number, activation in enumerate(ACTIVATIONS):
            found = linear(x, w, bias, other, number, combine)
            exact = x.double() @ w.double().t()
            exact = activation(exact if bias is None else exact + bias)
            if other is not None:
                exact = exact + other if combine == 1 else exact * other
            assert found.dtype == torch.float32
            assert_near(found, exact, k)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 100])
def test_any_number_of_threads_gives_the_same_bits(threads: int, rows: int) -> None:
    x, w = torch.randn(rows, 1200), torch.randn(530, 1200)
    before = torch.get_num_threads()
    expected = linear(x, w, None, None, 2, 0)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(x, w, None, None, 2, 0), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("number", range(len(ACTIVATIONS)))
def test_unusual_numbers(number: int) -> None:
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([nan, -nan, inf, -inf, 0.0, -0.0, 1e30, -1e30, 100.0, -100.0, 6.0, -6.0])
    found = linear(values[:, None], torch.ones(1, 1), None, None, number, 0)[:, 0]
    exact = ACTIVATIONS[number](values.double()).float()
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=2e-6, equal_nan=True)


def test_a_row_of_nan_stays_one() -> None:
    x = torch.ones(3, 5)
    x[1] = float("nan")
    found = linear(x, torch.ones(3, 5), None, None, 0, 0)
    assert found[1].isnan().all()
    assert found[[0, 2]].eq(5).all()


def test_gelu_keeps_the_sign() -> None:
    x = torch.linspace(-8, 0, 100_001)[:, None]
    assert (linear(x, torch.ones(1, 1), None, None, 2, 0) <= 0).all()


def test_weights_of_any_stride_and_empty_inputs() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    exact = x.double() @ w.double()
    assert_near(linear(x, w.t(), None, None, 0, 0), exact, 8)
    assert linear(torch.empty(0, 8), w.t(), None, None, 0, 0).shape == (0, 6)
    assert linear(torch.empty(2, 0, 8), w.t(), None, None, 0, 0).shape == (2, 0, 6)
    wide = torch.randn(4, 16)[:, ::2]
    assert_near(linear(wide, w.t(), None, None, 0, 0), wide.double() @ w.double(), 8)
    one = linear(x[0], w.t(), None, torch.ones(6).bfloat16(), 0, 1)
    assert_near(one, exact[0] + 1, 8)


def test_bad_calls_are_refused() -> None:
    gone = TiledWeight(torch.randn(6, 8), None, torch.float32).handle
    x = torch.randn(4, 8)
    packed = TiledWeight(torch.randn(6, 8), torch.randn(6), torch.float32)
    with pytest.raises(ValueError, match="no packed weight of float32 has handle"):
        ops.dense_linear_floats(x, gone, None, 0, 0)  # its owner is gone
    nine = torch.randn(1, 1, 1, 1, 1, 1, 1, 4, 8)
    with pytest.raises(ValueError, match="x must have 1 to 8 dimensions"):
        ops.dense_linear_floats(nine, packed.handle, None, 0, 0)
    for bad, text in (
        ((torch.randn(4, 7), packed.handle, None, 0, 0), "that of the weight"),
        ((x.double(), packed.handle, None, 0, 0), "must be float32, contiguous"),
        ((x.bfloat16(), packed.handle, None, 0, 0), "must be float32, contiguous"),
        ((x.t(), packed.handle, None, 0, 0), "must be float32, contiguous"),
        ((x, packed.handle, None, 7, 0), "must be known"),
        ((x, packed.handle, None, 0, 3), "must be known"),
        ((x, packed.handle, None, 0, 1), "other must be given"),
        ((x, packed.handle, torch.randn(4, 6), 0, 0), "other must be given"),
        ((x, packed.handle, torch.randn(4, 5), 0, 1), "shape of the result"),
        ((x, packed.handle, torch.randn(4, 6).bfloat16(), 0, 1), "other must be float32"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.dense_linear_floats(*bad)
    with pytest.raises(ValueError, match="float32 matrix"):
        ops.dense_pack_floats(torch.randn(3, 3).bfloat16(), None)
    with pytest.raises(ValueError, match="must not be empty"):
        ops.dense_pack_floats(torch.randn(3, 0), None)
    with pytest.raises(ValueError, match="bias must hold"):
        ops.dense_pack_floats(torch.randn(3, 3), torch.randn(4))


def test_weights_too_large_for_any_memory() -> None:
    for inner in (96_076_792_050_570_582, 2**58):  # bytes that a 64-bit number does not hold
        with pytest.raises(ValueError, match="a tensor is too large"):
            ops.dense_pack_floats(torch.zeros(1, 1).expand(1, inner), None)


def test_a_storage_that_is_gone() -> None:
    packed = TiledWeight(torch.randn(6, 8), None, torch.float32)
    x = torch.randn(4, 8)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage of a tensor must be as large as"):
        ops.dense_linear_floats(x, packed.handle, None, 0, 0)
    with pytest.raises(ValueError, match="storage of a tensor must be as large as"):
        ops.dense_pack_floats(x, None)
    assert ops.dense_linear_floats(x[:0], packed.handle, None, 0, 0).shape == (0, 6)


def test_packed_weights_have_one_owner() -> None:
    packed = TiledWeight(torch.ones(6, 8), None, torch.float32)
    copied = copy.deepcopy(packed)
    del packed
    assert tiled_linear(torch.ones(1, 8), copied, None, 0, 0, True).eq(8).all()
    with pytest.raises(TypeError, match="a packed weight cannot be pickled"):
        pickle.dumps(copied)


_CHILD = """
import sys
import pytest
from edgeweave.graphfuse._tile_ops import has_vectors
code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:logging", sys.argv[1], "-k",
                    "test_products or test_unusual or any_number or keeps_the_sign"])
print("vectors:", has_vectors())
sys.exit(code)
"""


@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_other_instruction_sets(isa: str, run_python: Any) -> None:
    run = run_python(_CHILD, args=(__file__,), env={"EDGEWEAVE_ISA": isa}, check=False)
    if "must be one of" in run.stdout + run.stderr or "must name" in run.stdout + run.stderr:
        pytest.skip(f"this processor or build has no {isa}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"vectors: {isa != 'baseline'}" in run.stdout
    assert re.search(r"\d\d passed", run.stdout)
    assert "skipped" not in run.stdout


@pytest.fixture
def all_on_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every product of float32 run on vectors, whatever was measured."""
    run_all(monkeypatch, "vectors")


@needs_vectors
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_layer(all_on_vectors: None, dynamic: bool | None) -> None:
    model = Layer().eval()
    x = torch.randn(2, 17, 64)
    made = graphfuse.fuse(model, x, dynamic=dynamic)
    report = made.report()
    assert {part.where for part in report.packed} == {"vectors"}
    found = sorted(" ".join(op.split(".")[1] for op in part.ops) for part in report.packed)
    # Queries, keys and values as one; the residuals at the end of their products.
    assert found == ["linear add", "linear add", "linear gelu", "linear linear linear"]
    assert "9 more on edgeweave's vectors, which was faster" in str(report)
    for rows in (17, 5) if dynamic else (17,):
        inputs = torch.randn(2, rows, 64)
        exact = model.double()(inputs.double())
        model.float()
        with torch.no_grad():
            assert (made(inputs) - exact).abs().max() < 1e-5


@needs_vectors
def test_edited_weights_are_packed_again_and_nan_comes_through(all_on_vectors: None) -> None:
    model = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 3)).eval()
    x = torch.randn(6, 40)
    made = graphfuse.fuse(model, x)
    assert {part.where for part in made.report().packed} == {"vectors"}
    with torch.no_grad():
        model[0].weight.mul_(2)
        torch.testing.assert_close(made(x), model(x), rtol=1e-5, atol=1e-5)
        x[2, 7] = float("nan")
        assert torch.equal(made(x).isnan(), model(x).isnan())
        assert made(x)[2].isnan().all()


@needs_vectors
def test_saved_choices_are_kept(all_on_vectors: None, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(40, 50), nn.GELU(), nn.Linear(50, 3)).eval()
    x = torch.randn(6, 40)
    graphfuse.fuse(model, x).save(tmp_path / "saved")
    loaded = graphfuse.load(tmp_path / "saved")
    assert {part.where for part in loaded.report().packed} == {"vectors"}
    with torch.no_grad():
        exact = F.gelu(x @ model[0].weight.t() + model[0].bias) @ model[2].weight.t()
        torch.testing.assert_close(loaded(x), exact + model[2].bias, rtol=1e-5, atol=1e-5)


@needs_vectors
def test_more_dimensions_than_a_kernel_takes() -> None:
    model = nn.Sequential(nn.Linear(40, 50), nn.LayerNorm(50)).eval()
    x = torch.randn(1, 1, 1, 1, 1, 1, 2, 3, 40)
    for dtype in (None, torch.bfloat16):
        made = graphfuse.fuse(model, x, dtype=dtype)
        limit = 2e-2 if dtype else 1e-5  # bfloat16 has 8 bits
        torch.testing.assert_close(made(x), model(x), rtol=limit, atol=limit, check_dtype=False)


class Mixed(nn.Module):
    """Products of one value, with and without a bias, as of Whisper's keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).view(2, 3, 2, 4) for f in (self.q, self.k))
        return (q @ k.transpose(-1, -2)).sum(-1)


@needs_vectors
def test_another_default_dtype(all_on_vectors: None) -> None:
    model, x = Mixed().eval(), torch.randn(2, 3, 8)
    torch.set_default_dtype(torch.float64)
    try:
        _packed.has_mkl.cache_clear()
        found = _packed.has_mkl()
        made = graphfuse.fuse(model, x)
        torch.testing.assert_close(made(x), model(x))
    finally:
        torch.set_default_dtype(torch.float32)
    _packed.has_mkl.cache_clear()
    assert found == _packed.has_mkl()


def test_handles_are_never_used_twice_and_a_fork_holds_no_lock(run_python: Any) -> None:
    code = """
import os, threading, time, torch
from edgeweave._native import ops
first = ops.dense_pack_floats(torch.ones(2, 8), None)
assert ops.dense_pack_floats(torch.ones(2, 8), None) == first + 1
stop = False
def work():
    x = torch.ones(1, 8)
    while not stop:
        ops.dense_linear_floats(x, first, None, 0, 0)
thread = threading.Thread(target=work)
thread.start()
for _ in range(200):
    child = os.fork()
    if child == 0:
        ops.dense_release_floats(first)
        os._exit(0)
    until = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.kill(child, 9)
            stop = True
            raise SystemExit("a child hangs")
        time.sleep(0.0005)
stop = True
thread.join()
print("done")
"""
    assert run_python(code).stdout.strip() == "done"
