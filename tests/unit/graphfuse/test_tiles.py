"""Kernels on AMX tiles: against float64 for every shape, and what graphfuse makes of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeweave import graphfuse
from edgeweave._native import ops
from edgeweave.graphfuse import _tiles
from edgeweave.graphfuse._tile_ops import ACTIVATIONS as ACTIVATION_NUMBERS
from edgeweave.graphfuse._tile_ops import activate

from .conftest import run_all

needs_amx = pytest.mark.skipif(
    not _tiles.is_available(), reason="this processor has no AMX, or the system does not permit it"
)

ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    torch.relu,
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.silu,
    torch.sigmoid,
    torch.tanh,
]
# One rounding of a bfloat16 result; of a float32 one, the fitted normal distribution and exp.
TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float32: 3e-6}


def linear(x: Tensor, w: Tensor, b: Tensor | None, *rest: Any) -> Tensor:
    packed = _tiles.TiledWeight(w, b)
    return _tiles.tiled_linear(x, packed, *rest)


def assert_near(found: Tensor, exact: Tensor) -> None:
    error = (found.double() - exact).abs() / (1 + exact.abs())
    assert error.max() <= TOLERANCE[found.dtype]


@needs_amx
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (1, 32, 32),
        (5, 33, 70),
        (16, 64, 33),
        (17, 31, 16),
        (130, 300, 65),
        (2, 4096, 40),
    ],
)
def test_products(shape: tuple[int, int, int], dtype: torch.dtype, wide: bool) -> None:
    m, k, n = shape
    x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).bfloat16() / math.sqrt(k)
    for bias, combine in itertools.product((None, torch.randn(n)), (0, 1, 2)):
        for other_dtype in (torch.float32, torch.bfloat16):
            other = torch.randn(m, n).to(other_dtype) if combine else None
            for number, activation in enumerate(ACTIVATIONS):
                found = linear(x, w, bias, other, number, combine, wide)
                exact = x.bfloat16().double() @ w.double().t()
                exact = activation(exact if bias is None else exact + bias)
                if other is not None:
                    exact = exact + other if combine == 1 else exact * other
                assert found.dtype == (torch.float32 if wide else torch.bfloat16)
                assert_near(found, exact)


@needs_amx
@pytest.mark.parametrize(
    "shape",
    [
        (2100, 200, 1056),  # past the caches
        (2085, 192, 1056),  # the same, rows that end within a tile
        (1100, 220, 1040),  # in float32 the same with a last block that is not whole; else not
        (2100, 192, 1030),  # not past them: rows do not begin with a cache line
        (3000, 64, 70),  # rows are multiplied where they are
        (1000, 416, 320),  # the same
    ],
)
def test_many_rows(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    w, bias = torch.randn(n, k).bfloat16() / math.sqrt(k), torch.randn(n)
    apart = torch.randn(m, k + 7).bfloat16()[:, 3:-4]
    for x in (torch.randn(m, k), apart.contiguous(), apart):
        exact = F.gelu(x.bfloat16().double() @ w.double().t() + bias)
        for wide in (False, True):
            for other in (None, torch.randn(m, n), torch.randn(m, n).bfloat16()):
                found = linear(x, w, bias, other, 2, int(other is not None), wide)
                assert_near(found, exact if other is None else exact + other)


@needs_amx
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    x, w = torch.randn(100, 200), torch.randn(150, 200)
    before = torch.get_num_threads()
    expected = linear(x, w, None, None, 2, 0, True)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(x, w, None, None, 2, 0, True), expected)
    finally:
        torch.set_num_threads(before)


@needs_amx
@pytest.mark.parametrize("number", range(len(ACTIVATIONS)))
def test_unusual_numbers(number: int) -> None:
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([nan, -nan, inf, -inf, 0.0, -0.0, 1e30, -1e30, 100.0, -100.0, 6.0, -6.0])
    found = linear(values[:, None], torch.ones(1, 1), None, None, number, 0, True)[:, 0]
    exact = ACTIVATIONS[number](values.bfloat16().double()).float()
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=2e-6, equal_nan=True)


@needs_amx
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATION_NUMBERS)
def test_activations_in_place(name: str, dtype: torch.dtype) -> None:
    activation = ACTIVATIONS[ACTIVATION_NUMBERS[name]]
    for shape in ((), (0,), (1,), (17,), (3, 70001)):
        x = (torch.randn(shape) * 3).to(dtype)
        exact = activation(x.double())
        assert activate(x, name) is x
        if x.numel():
            assert_near(x, exact)
    x = torch.linspace(-30, 30, 200_001)
    eager = float((activation(x) - activation(x.double())).abs().max())
    error = float((activate(x.clone(), name) - activation(x.double())).abs().max())
    assert error <= max(8 * eager, 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        activate(torch.randn(4, 4).t()[:2], name)


@needs_amx
def test_padding_multiplies_nothing() -> None:
    w = torch.full((3, 5), float("inf"))
    assert linear(torch.ones(2, 5), w, None, None, 0, 0, True).eq(float("inf")).all()
    x = torch.ones(3, 5)
    x[1] = float("nan")
    found = linear(x, torch.ones(3, 5), None, None, 0, 0, True)
    assert found[1].isnan().all()
    assert found[[0, 2]].eq(5).all()


@needs_amx
def test_weights_of_any_stride_and_empty_inputs() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    expected = x.bfloat16().double() @ w.bfloat16().double()
    assert_near(linear(x, w.t(), None, None, 0, 0, True), expected)
    assert linear(torch.empty(0, 8), w.t(), None, None, 0, 0, True).shape == (0, 6)
    wide = torch.randn(4, 16)[:, ::2]
    assert_near(
        linear(wide, w.t(), None, None, 0, 0, True),
        wide.bfloat16().double() @ w.bfloat16().double(),
    )


@needs_amx
def test_bad_calls_are_refused() -> None:
    handle = _tiles.TiledWeight(torch.randn(6, 8), None).handle
    x = torch.randn(4, 8)
    packed = _tiles.TiledWeight(torch.randn(6, 8), torch.randn(6))
    with pytest.raises(ValueError, match="no packed weight has handle"):
        ops.dense_linear(x, handle, None, 0, 0, True)  # its owner is gone
    for bad, text in (
        ((torch.randn(4, 7), packed.handle, None, 0, 0, True), "that of the weight"),
        ((x.double(), packed.handle, None, 0, 0, True), "float32 or bfloat16"),
        ((x.t(), packed.handle, None, 0, 0, True), "contiguous"),
        ((x, packed.handle, None, 7, 0, True), "must be known"),
        ((x, packed.handle, None, -1, 0, True), "must be known"),
        ((x, packed.handle, None, 0, 1, True), "other must be given"),
        ((x, packed.handle, torch.randn(4, 5), 0, 1, True), "shape of the result"),
        ((x, packed.handle, torch.randn(4, 6).double(), 0, 1, True), "other must be float32"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.dense_linear(*bad)
    with pytest.raises(ValueError, match="bfloat16 matrix"):
        ops.dense_pack(torch.randn(3, 3), None)
    with pytest.raises(ValueError, match="must not be empty"):
        ops.dense_pack(torch.randn(3, 0).bfloat16(), None)
    with pytest.raises(ValueError, match="bias must hold"):
        ops.dense_pack(torch.randn(3, 3).bfloat16(), torch.randn(4))


MASKS: dict[str, Callable[[int, int, int, int], Tensor | None]] = {
    "none": lambda b, h, q, k: None,
    "bool": lambda b, h, q, k: (torch.rand(b, 1, q, k) > 0.4).index_fill_(3, torch.tensor(0), True),
    "turned": lambda b, h, q, k: torch.rand(k, q).t()[None, None] > 0.5,
    "float": lambda b, h, q, k: torch.randn(1, h, q, k),
    "bfloat16": lambda b, h, q, k: torch.randn(b, 1, 1, k).bfloat16(),
    "some rows": lambda b, h, q, k: (torch.arange(q) % 2 == 0)[None, None, :, None].expand(
        b, 1, q, k
    ),
    "infinite": lambda b, h, q, k: torch.zeros(b, h, q, k).masked_fill(
        torch.rand(b, h, q, k) > 0.7, -float("inf")
    ),
}


@needs_amx
@pytest.mark.parametrize("mask", [*MASKS, "causal"])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 128, 128, 64),
        (2, 3, 33, 70, 40),
        (1, 1, 1, 1, 8),
        (2, 4, 65, 65, 96),
        (1, 2, 7, 300, 33),
    ],
)
def test_attention(sizes: tuple[int, ...], mask: str) -> None:
    b, h, tq, tk, width = sizes
    for turned in (False, True):
        q, k, v = (
            torch.randn(b, t, h, width).bfloat16().transpose(1, 2)
            if turned
            else torch.randn(b, h, t, width).bfloat16()
            for t in (tq, tk, tk)
        )
        causal = mask == "causal"
        added = None if causal else MASKS[mask](b, h, tq, tk)
        found = _tiles.tiled_attention(q, k, v, added, causal, width**-0.5)
        wide = added if added is None or added.dtype == torch.bool else added.double()
        parts = (q.double(), k.double(), v.double())
        exact = F.scaled_dot_product_attention(*parts, attn_mask=wide, is_causal=causal)
        # The weights are rounded to bfloat16, as those of torch are, and the result again.
        assert (found.double() - exact).abs().max() <= 2 * 2.0**-8 * (1 + v.abs().max())
        assert found.stride() == torch.empty(b, tq, h, width).transpose(1, 2).stride()


@needs_amx
def test_attention_with_nan_and_on_many_threads() -> None:
    q, k, v = (torch.randn(1, 2, 70, 32).bfloat16() for _ in range(3))
    expected = _tiles.tiled_attention(q, k, v, None, False, 0.2)
    before = torch.get_num_threads()
    torch.set_num_threads(5)  # more than heads: each is split
    try:
        assert torch.equal(_tiles.tiled_attention(q, k, v, None, False, 0.2), expected)
    finally:
        torch.set_num_threads(before)
    ones = torch.ones(1, 1, 2, 32).bfloat16()
    infinite = _tiles.tiled_attention(ones, -ones, ones, None, False, float("inf"))
    assert torch.equal(infinite, torch.zeros_like(ones))  # as in eager
    for scale in (-0.3, 0.0):
        found = _tiles.tiled_attention(q, k, v, None, False, scale)
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
        assert (found - exact).abs().max() <= 2 * 2.0**-8 * (1 + v.abs().max())
    for number in range(3):
        parts = [q.clone(), k.clone(), v.clone()]
        parts[number][0, 1, 3, 4] = float("nan")
        found = _tiles.tiled_attention(*parts, None, False, 0.2)
        stock = F.scaled_dot_product_attention(*parts, scale=0.2)
        assert torch.equal(found.isnan(), stock.isnan())


@needs_amx
def test_bad_attention_is_refused() -> None:
    q = torch.randn(1, 2, 5, 8).bfloat16()
    for bad, text in (
        ((q.float(), q, q, None, False, 1.0), "q must be bfloat16"),
        ((q[0], q, q, None, False, 1.0), "q must be bfloat16"),
        ((q, q[:, :1], q, None, False, 1.0), "k and v must have"),
        ((q, q, q[:, :, :3], None, False, 1.0), "k and v must have"),
        ((q, q, q.transpose(2, 3), None, False, 1.0), "v must be bfloat16"),
        ((q, q, q, torch.ones(1, 2, 4, 5), False, 1.0), "broadcast to the scores"),
        ((q, q, q, torch.ones(5, 5), False, 1.0), "four dimensions"),
        ((q, q, q, torch.ones(1, 1, 5, 5).long(), False, 1.0), "bool, float32 or bfloat16"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.dense_attention(*bad, True)


@needs_amx
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 768), (3, 5, 33), (1, 1), (7, 100), (0, 4), (2, 65)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3 + 50).to(dtype)
    weight, bias = torch.randn(shape[-1]), torch.randn(shape[-1])
    for affine in ((None, None), (weight, None), (weight, bias)):
        for wide in (False, True):
            found = _tiles.tiled_norm(x, *affine, 1e-5, wide)
            double = [None if p is None else p.double() for p in affine]
            exact = F.layer_norm(x.double(), shape[-1:], *double, 1e-5)
            eager = F.layer_norm(x.float(), shape[-1:], *affine, 1e-5)
            limit = (
                2.0**-8
                if not wide
                else 1e-6 + 2 * float((eager - exact).abs().max() if x.numel() else 0)
            )
            if x.numel():
                assert ((found - exact).abs() / (1 + exact.abs())).max() <= limit
            assert found.shape == x.shape


@pytest.fixture
def all_on_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have everything that tiles can do run there, whatever was measured."""
    run_all(monkeypatch, "tiles")


class Layer(nn.Module):
    """A layer of a transformer that normalises after its residuals."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = (
            layer(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        x = self.second(x)
        return x + self.down(F.gelu(self.up(x)))


@needs_amx
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_layer(all_on_tiles: None, dynamic: bool | None) -> None:
    model = Layer().eval()
    x = torch.randn(2, 17, 64)
    made = graphfuse.fuse(model, x, dtype=torch.bfloat16, dynamic=dynamic)
    report = made.report()
    found = sorted(" ".join(op.split(".")[1] for op in part.ops) for part in report.packed)
    assert found == sorted(
        [
            *("layer_norm", "linear linear linear", "scaled_dot_product_attention"),
            *("linear add", "layer_norm", "linear gelu", "linear add"),
        ]
    )
    assert not report.partitions  # conversions are gone with the products that read them
    for rows in (2, 5) if dynamic else (2,):
        x = torch.randn(rows, 17, 64)
        with torch.no_grad():
            exact = model.double()(x.double())
            model.float()
            with torch.autocast("cpu", torch.bfloat16):
                eager = model(x)
        limit = 2 * float((eager.double() - exact).abs().max())
        assert float((made(x).double() - exact).abs().max()) <= limit
        assert made(x).dtype == eager.dtype


@needs_amx
def test_edits_are_noticed_and_choices_saved(all_on_tiles: None, tmp_path: Path) -> None:
    model = Layer().eval()
    x = torch.randn(2, 17, 64)
    made = graphfuse.fuse(model, x, dtype=torch.bfloat16)
    before = made(x)
    with torch.no_grad():
        model.k.weight.mul_(3)
        model.down.bias.add_(1)
    after = made(x)
    assert not torch.equal(before, after)
    fresh = graphfuse.fuse(model, x, dtype=torch.bfloat16)
    assert torch.equal(fresh(x), after)
    fresh.save(tmp_path)
    loaded = graphfuse.load(tmp_path)
    assert torch.equal(loaded(x), after)
    assert len(loaded.report().packed) == 7


@needs_amx
def test_without_tiles_a_saved_model_still_runs(
    all_on_tiles: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Layer().eval()
    x = torch.randn(2, 17, 64)
    made = graphfuse.fuse(model, x, dtype=torch.bfloat16)
    made.save(tmp_path)
    monkeypatch.setattr(_tiles, "is_available", lambda: False)
    loaded = graphfuse.load(tmp_path)
    assert all("add" not in " ".join(part.ops) for part in loaded.report().packed)
    torch.testing.assert_close(loaded(x), made(x), rtol=0.05, atol=0.05)


@needs_amx
def test_float32_products_only_where_bf16_math_is_asked_for(all_on_tiles: None) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU()).eval()
    x = torch.randn(8, 64)
    assert not graphfuse.fuse(model, x).report().packed
    made = graphfuse.fuse(model, x, dtype="bf16-math")
    assert [part.ops for part in made.report().packed] == [
        ("aten.linear.default", "aten.gelu.default")
    ]
    with torch.no_grad():
        assert (made(x) - model(x)).abs().max() < 0.02
    assert made(x).dtype == torch.float32


@needs_amx
def test_a_constant_for_each_column_goes_into_the_weight(all_on_tiles: None) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(64, 48), nn.Parameter(torch.randn(48))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return y + self.scale * self.linear(x)

    model, x, y = Scaled().eval(), torch.randn(8, 64), torch.randn(8, 48)
    made = graphfuse.fuse(model, (x, y), dtype=torch.bfloat16)
    (call,) = made.report().packed
    assert call.ops == ("aten.linear.default", "aten.mul.Tensor", "aten.add.Tensor")
    for _ in range(2):
        with torch.no_grad():
            assert (made(x, y) - model(x, y)).abs().max() < 0.05
            model.scale.mul_(2)  # noticed, as any weight


@needs_amx
def test_what_tiles_leave_alone(all_on_tiles: None, call: Any) -> None:
    weight = torch.randn(64, 64)
    broadcast = torch.randn(1, 64)
    cases = {
        "a row that is added to all": lambda x: F.linear(x, weight) + broadcast.bfloat16(),
        "a scaled sum": lambda x: torch.add(F.linear(x, weight), x.bfloat16(), alpha=2),
        "another activation": lambda x: F.elu(F.linear(x, weight)),
    }
    for name, function in cases.items():
        made = graphfuse.fuse(call(function).eval(), torch.randn(8, 64), dtype=torch.bfloat16)
        assert [part.ops for part in made.report().packed] == [("aten.linear.default",)], name


@needs_amx
def test_attention_that_torch_keeps(all_on_tiles: None, call: Any) -> None:
    def grouped(x: Tensor) -> Tensor:
        q = x.bfloat16()
        return F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True)

    x = torch.randn(1, 2, 8, 16)
    made = graphfuse.fuse(call(grouped).eval(), x, dtype=torch.bfloat16)
    assert not made.report().packed
    made = graphfuse.fuse(call(lambda x: F.scaled_dot_product_attention(x, x, x)).eval(), x)
    assert not made.report().packed  # float32


class Attend(nn.Module):
    """Attention, and what reads its result by its strides."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16) if after else nn.Identity()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = F.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
        return self.norm(seen.float())  # type: ignore[no-any-return]


@needs_amx
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_the_layout_of_attention_is_that_of_torch(
    all_on_tiles: None, after: bool, turned: bool
) -> None:
    model = Attend(after).eval()
    shape = (1, 9, 2, 16) if turned else (1, 2, 9, 16)
    parts = tuple(torch.randn(shape) for _ in range(3))
    parts = tuple(part.transpose(1, 2) for part in parts) if turned else parts
    made = graphfuse.fuse(model, parts)
    assert any("scaled_dot" in part.ops[0] for part in made.report().packed)
    with torch.no_grad():
        eager = model(*parts)
    assert made(*parts).stride() == eager.stride()
    assert (made(*parts) - eager).abs().max() < 0.1


@needs_amx
def test_results_that_are_returned_own_their_memory(all_on_tiles: None) -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.q(x).view(2, 17, 4, 16), self.k(x).view(2, 17, 4, 16)

    model, x = Cache().eval(), torch.randn(2, 17, 64)
    made = graphfuse.fuse(model, x, dtype=torch.bfloat16)
    assert [len(part.nodes) for part in made.report().packed] == [1, 1]
    q, k = made(x)
    assert q.is_contiguous()
    assert q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()


@needs_amx
def test_a_number_that_scales_a_single_column(all_on_tiles: None) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(64, 1), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale  # type: ignore[no-any-return]

    model, x = Scaled().eval(), torch.randn(8, 64)
    made = graphfuse.fuse(model, x, dtype=torch.bfloat16)
    with torch.no_grad():
        assert (made(x) - model(x)).abs().max() < 0.05


@needs_amx
def test_nan_scores_of_masked_keys_stay() -> None:
    q, k, v = (torch.randn(1, 1, 40, 32).bfloat16() for _ in range(3))
    k[0, 0, 7, 3] = float("nan")
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    mask[..., 7] = False
    found = _tiles.tiled_attention(q, k, v, mask, False, 0.2)
    stock = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)
    assert stock.isnan().all()
    assert found.isnan().all()


@needs_amx
def test_weights_are_given_up_in_the_middle_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc

    import torch.fx.experimental.proxy_tensor as proxies

    kept = [_tiles.TiledWeight(torch.randn(64, 64), None)]
    handle = kept[0].handle
    trace = proxies._ModuleStackTracer.trace

    def collect_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept.clear()
        gc.collect()
        return trace(self, *args, **kwargs)

    monkeypatch.setattr(proxies._ModuleStackTracer, "trace", collect_first)
    torch.export.export(nn.Linear(4, 4), (torch.ones(1, 4),), strict=False)
    assert not kept
    with pytest.raises(ValueError, match="no packed weight has handle"):
        ops.dense_linear(torch.ones(1, 64), handle, None, 0, 0, True)


@needs_amx
def test_the_report_names_them(all_on_tiles: None) -> None:
    report = graphfuse.fuse(Layer().eval(), torch.randn(2, 17, 64), dtype=torch.bfloat16).report()
    assert "12 more on AMX tiles" in str(report)
    assert "us  aten.linear.default + aten.gelu.default, on tiles" in str(report)
    assert {part.where for part in report.packed} == {"tiles"}


@needs_amx
def test_without_amx_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layer().eval(), torch.randn(2, 17, 64)
    made = graphfuse.fuse(model, x, dtype=torch.bfloat16, keep="all")
    engine = made._engines[0]
    found = []
    for available in (True, False):
        monkeypatch.setattr(_tiles, "is_available", lambda available=available: available)
        found.append(engine.packed_calls({}, tiles=True))
    assert {call.variants for call in found[0].values()} == {("tiles",)}
    assert len(found[0]) == 7  # three products as one, attention, two norms and three products
    assert found[1] == {}


def test_an_instruction_set_that_is_forced_leaves_tiles_alone(run_python: Any) -> None:
    code = "from edgeweave.graphfuse import _tiles; print(_tiles.is_available())"
    assert run_python(code, env={"EDGEWEAVE_ISA": "baseline"}).stdout.strip() == "False"
