"""Where a whole layer or a product must not be stood in for, and PyG's own code and errors show."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch_geometric.nn import GINConv, Linear, SAGEConv

import edgeweave.pyg
from edgeweave import runtime
from edgeweave.pyg import _linear

NODES = 300  # enough rows for the faster products


@pytest.fixture
def edges() -> Tensor:
    return torch.randint(0, NODES, (2, 1500))


def outcome(call) -> Tensor | tuple[type, str]:
    try:
        return call().detach()
    except Exception as error:  # whatever PyG raises is what must come
        return type(error), str(error)


def assert_stock(call) -> None:
    """The same result or, where PyG raises, the same error."""
    stock = outcome(call)
    with edgeweave.pyg.accelerated():
        ours = outcome(call)
    if isinstance(stock, tuple):
        assert ours == stock
        return
    assert ours.dtype is stock.dtype
    # Sums of tens of float32 products of order 1 in another order.
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


MODULES = {
    "Linear": lambda lin, edges: lin,
    "GINConv": lambda lin, edges: with_layer(
        GINConv(nn.Identity()), "nn", nn.Sequential(lin), edges
    ),
    "GINConv of a layer": lambda lin, edges: with_layer(GINConv(nn.Identity()), "nn", lin, edges),
    "SAGEConv lin_l": lambda lin, edges: with_layer(SAGEConv(8, 4), "lin_l", lin, edges),
    "SAGEConv lin_r": lambda lin, edges: with_layer(SAGEConv(8, 4), "lin_r", lin, edges),
}


def with_layer(conv: nn.Module, name: str, lin: nn.Module, edges: Tensor):
    setattr(conv, name, lin)
    return lambda x: conv(x, edges)


def linear_for(name: str) -> nn.Module:
    return (
        nn.Linear(8, 4) if name.startswith("GIN") else Linear(8, 4, bias=name != "SAGEConv lin_r")
    )


@pytest.mark.parametrize(
    "bias",
    [
        lambda: torch.randn(1000)[::250],
        lambda: torch.randn(1).expand(4),
        lambda: torch.randn(1),
        lambda: torch.randn(NODES, 4),
        lambda: torch.randn(1, 4),
        lambda: torch.randn(5),
        lambda: torch.randn(4, dtype=torch.float64),
    ],
    ids=["strided", "expanded", "one", "matrix", "row", "longer", "double"],
)
@pytest.mark.parametrize("name", MODULES)
def test_bias_that_is_not_a_plain_vector(name, bias, edges):
    lin = linear_for(name)
    lin.bias = nn.Parameter(bias())
    model, x = MODULES[name](lin, edges), torch.randn(NODES, 8)
    assert_stock(lambda: model(x))


@pytest.mark.parametrize(
    "weight",
    [
        lambda: torch.randn(8, 4).t(),
        lambda: torch.randn(4, 1).expand(4, 8),
        lambda: torch.randn(8),
        lambda: torch.randn(4, 9),
        lambda: torch.randn(5, 8),
        lambda: torch.randn(1, 8),
        lambda: torch.randn(4, 8, dtype=torch.float64),
    ],
    ids=["turned", "expanded", "vector", "wider", "longer", "one", "double"],
)
@pytest.mark.parametrize("name", MODULES)
def test_weight_that_does_not_fit(name, weight, edges):
    lin = linear_for(name)
    lin.bias = None
    lin.weight = nn.Parameter(weight())
    model, x = MODULES[name](lin, edges), torch.randn(NODES, 8)
    assert_stock(lambda: model(x))


def test_linear_without_a_bias_attribute(edges):
    lin = Linear(8, 4)
    del lin.bias
    assert_stock(lambda: lin(torch.randn(NODES, 8)))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return 2 * weight


@pytest.mark.parametrize("name", MODULES)
def test_parametrization_is_evaluated_once(name, edges):
    lin, counting = linear_for(name), Counting()
    parametrize.register_parametrization(lin, "weight", counting)
    model, x = MODULES[name](lin, edges), torch.randn(NODES, 8)
    counting.calls = 0
    with edgeweave.pyg.accelerated():
        model(x)
    assert counting.calls == 1
    assert_stock(lambda: model(x))


# ---- propagate ---------------------------------------------------------------------------------


LAYERS = {SAGEConv: (8, 4), GINConv: (nn.Linear(8, 4),)}


@pytest.mark.parametrize("base", LAYERS)
@pytest.mark.parametrize("where", ["class", "instance"])
def test_propagate_of_somebody_else_is_called(base, where, edges):
    calls: list[int] = []

    class Own(base):
        def propagate(self, edge_index, **kwargs):
            calls.append(1)
            return super().propagate(edge_index, **kwargs)

    with edgeweave.pyg.accelerated():
        layer = (Own if where == "class" else base)(*LAYERS[base])
        if where == "instance":
            inner = layer.propagate
            layer.propagate = lambda *args, **kw: (calls.append(1), inner(*args, **kw))[1]
        layer(torch.randn(NODES, 8), edges)
    assert calls == [1]


def test_propagate_replaced_on_the_class_is_called(edges, monkeypatch):
    layer, calls = SAGEConv(8, 4), []
    with edgeweave.pyg.accelerated():
        inner = SAGEConv.propagate
        with monkeypatch.context() as patch:
            patch.setattr(
                SAGEConv, "propagate", lambda *args, **kw: (calls.append(1), inner(*args, **kw))[1]
            )
            layer(torch.randn(NODES, 8), edges)
    assert calls == [1]


# ---- GIN ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_gin_promotes_as_stock_does(dtype, eps, edges):
    seen: list[Tensor] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    layer, x = GINConv(Watch(), eps=eps), torch.randn(NODES, 8).to(dtype)
    layer(x, edges)
    with edgeweave.pyg.accelerated():
        layer(x, edges)
    stock, ours = seen
    assert ours.dtype is stock.dtype
    if dtype is torch.float64:
        torch.testing.assert_close(ours, stock, rtol=1e-12, atol=1e-12)


# ---- memory ------------------------------------------------------------------------------------


def test_products_are_whole_off_linux(monkeypatch):
    monkeypatch.setattr(runtime.sys, "platform", "darwin")
    assert not _linear.comes_in_fresh_pages(1 << 20, 1 << 10)


def test_small_products_are_whole(monkeypatch):
    monkeypatch.setattr(runtime, "_returns_freed_blocks", lambda: True)
    assert _linear.comes_in_fresh_pages(1 << 16, 128)  # 32 MiB
    assert not _linear.comes_in_fresh_pages((1 << 16) - 1, 128)


def test_allocator_is_identified_once_and_its_tuning_noticed(monkeypatch):
    monkeypatch.setattr(runtime, "_tuned", False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    before = _linear.comes_in_fresh_pages(1 << 20, 1 << 10)
    assert before is (runtime.allocator_info().name == "glibc")

    def fail() -> str:
        raise AssertionError("asked the loader again")

    monkeypatch.setattr(runtime, "_malloc_library", fail)
    assert _linear.comes_in_fresh_pages(1 << 20, 1 << 10) is before
    monkeypatch.setattr(runtime, "_tuned", True)
    assert not _linear.comes_in_fresh_pages(1 << 20, 1 << 10)
