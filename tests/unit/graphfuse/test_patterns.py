"""What models write out by hand is recognised, and only that."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeweave import graphfuse
from edgeweave._fx import Node, Ref, capture
from edgeweave._fx._patterns import unflatten_products

from .conftest import targets_of


def gelu_new(x: Tensor, half: float = 0.5, cubic: float = 0.044715, power: float = 3.0) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + cubic * torch.pow(x, power))
    return half * x * (1.0 + torch.tanh(inner))


def test_gelu_by_hand(assert_fused: Any, call: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), call(gelu_new))
    made = assert_fused(model, torch.randn(4, 8))
    assert targets_of(made) == ["aten.linear.default", "aten.gelu.default"]


def test_its_special_values(call: Any) -> None:
    model = call(gelu_new).eval()
    x = torch.tensor([0.0, -0.0, 1e-30, 10.0, -10.0, math.inf, math.nan, 3e38, 1e20])
    made = graphfuse.fuse(model, torch.randn(9))
    assert targets_of(made) == ["aten.gelu.default"]
    torch.testing.assert_close(
        made(x), torch.nn.functional.gelu(x, approximate="tanh"), equal_nan=True
    )
    # By hand, x**3 is infinite from 7e12 on, and the result is the same.
    torch.testing.assert_close(made(x), model(x), equal_nan=True)


@pytest.mark.parametrize(
    "change", [{"half": 0.25}, {"cubic": 0.05}, {"power": 2.0}], ids=lambda c: next(iter(c))
)
def test_other_numbers_are_another_function(assert_fused: Any, call: Any, change: Any) -> None:
    made = assert_fused(call(lambda x: gelu_new(x, **change)), torch.randn(4, 8))
    assert "aten.gelu.default" not in targets_of(made)


def test_a_part_that_others_read_stays(assert_fused: Any, call: Any) -> None:
    def also(x: Tensor) -> tuple[Tensor, Tensor]:
        tanh = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + tanh), tanh

    model, x = call(also).eval(), torch.randn(4, 8)
    made = graphfuse.fuse(model, x, keep="all")
    for found, expected in zip(made(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)
    assert "aten.gelu.default" not in targets_of(made)


class Turned(nn.Module):
    """A product as GPT-2 writes it: weights `[in, out]`, rows flattened."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.bias = nn.Parameter(torch.randn(6)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 8)
        y = (
            torch.addmm(self.bias, rows, self.weight)
            if self.bias is not None
            else rows @ self.weight
        )
        return y.view(*x.shape[:-1], 6)


@pytest.mark.parametrize("bias", [True, False])
def test_flattened_products(assert_fused: Any, bias: bool) -> None:
    model = nn.Sequential(Turned(bias), nn.GELU())
    made = assert_fused(model, torch.randn(2, 5, 8), fused=2)
    assert targets_of(made) == ["aten.linear.default", "aten.gelu.default"]
    with torch.no_grad():
        model[0].weight.mul_(2)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(made(x), model(x))


def test_flattened_products_of_open_sizes() -> None:
    model = Turned(True).eval()
    made = graphfuse.fuse(model, torch.randn(2, 5, 8), dynamic=True)
    for shape in ((2, 5, 8), (3, 7, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(made(x), model(x))


def test_a_view_to_other_sizes_stays(call: Any) -> None:
    weight = torch.randn(8, 6)
    model = call(lambda x: (x.view(-1, 8) @ weight).view(5, 2, 6)).eval()
    x = torch.randn(2, 5, 8)
    made = graphfuse.fuse(model, x, keep="all")
    torch.testing.assert_close(made(x), model(x))
    assert "aten.linear.default" not in targets_of(made)


class Tables(nn.Module):
    """Rows of tables beside two matrices, as in a recommendation model."""

    def __init__(self, rows: int = 11, width: int = 6) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, indices: Tensor) -> Tensor:
        a, b, c = (table(indices[:, -1 - i]) for i, table in enumerate(self.tables))
        return torch.stack([a, x, b, y, c], dim=1) * 1.0


@pytest.mark.parametrize("dynamic", [None, [{0}, {0}, {0}]])
def test_tables_are_looked_up_in_one_call(dynamic: Any) -> None:
    model = Tables().eval()
    example = (torch.randn(7, 6), torch.randn(7, 6), torch.randint(11, (7, 4)))
    fused = graphfuse.fuse(model, example, keep="all", dynamic=dynamic)
    assert targets_of(fused).count("edgeweave.embedding_stack.default") == 1
    assert not {"aten.embedding.default", "aten.select.int"} & set(targets_of(fused))
    for rows in (7, 300) if dynamic else (7,):
        x, y = torch.randn(rows, 6), torch.randn(6, rows).t()
        indices = torch.randint(11, (4, rows)).t()
        assert torch.equal(fused(x, y, indices), model(x, y, indices))
    with torch.no_grad():
        model.tables[1].weight.mul_(2)
    assert torch.equal(fused(*example), model(*example))


@pytest.mark.parametrize("bad", [-1, 11])
def test_rows_that_a_table_has_not(bad: int) -> None:
    model = Tables().eval()
    indices = torch.zeros(7, 4, dtype=torch.int64)
    example = (torch.randn(7, 6), torch.randn(7, 6), indices)
    fused = graphfuse.fuse(model, example, keep="all")
    indices[3, 1] = bad
    with pytest.raises(IndexError, match="index out of range in self"):
        fused(*example)
    indices[3, 1], indices[3, 0] = 0, bad  # a column that no table reads
    assert torch.equal(fused(*example), model(*example))


def test_tables_that_stay_as_they_are(call: Any) -> None:
    table, other = torch.randn(9, 4), torch.randn(9, 4)
    cases = {
        "two matrices of indices": lambda i, j: [
            F.embedding(i[:, 0], table),
            F.embedding(j[:, 0], other),
        ],
        "one table": lambda i, j: [F.embedding(i[:, 0], table), torch.ones(5, 4)],
        "a row of indices": lambda i, j: [F.embedding(i[0], table), F.embedding(i[1], other)],
        "an embedding that is read twice": lambda i, j: [F.embedding(i[:, 0], table)] * 2,
    }
    i, j = torch.randint(9, (5, 5)), torch.randint(9, (5, 5))
    for name, parts in cases.items():
        model = call(lambda i, j, parts=parts: torch.stack(parts(i, j), dim=1) + 1).eval()
        fused = graphfuse.fuse(model, (i, j), keep="all")
        assert "edgeweave.embedding_stack.default" not in targets_of(fused), name
        assert torch.equal(fused(i, j), model(i, j)), name


def test_tables_of_other_dtypes_and_layouts(call: Any) -> None:
    a, b = nn.Embedding(9, 4), nn.Embedding(9, 4).bfloat16()
    i = torch.randint(9, (5, 2))
    model = call(lambda i: torch.stack([a(i[:, 0]), b(i[:, 1])], dim=1) + 1).eval()
    fused = graphfuse.fuse(model, i, keep="all")
    assert torch.equal(fused(i), model(i))
    tables = Tables().eval()
    example = (torch.randn(7, 6), torch.randn(7, 6), torch.randint(11, (7, 4)))
    fused = graphfuse.fuse(tables, example, keep="all")
    tables.tables[0].weight = nn.Parameter(torch.randn(6, 11).t())
    assert torch.equal(fused(*example), tables(*example))


class Pairs(nn.Module):
    """Elements of a matrix for each example, as in a recommendation model."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1.0)[:, self.rows, self.columns] + 1  # type: ignore[index]


def test_elements_are_picked_from_flat_rows() -> None:
    model = Pairs(torch.tensor([0, 2, -1, 2]), torch.tensor([-4, 3, 1, 1])).eval()
    x = torch.randn(5, 3, 4)
    fused = graphfuse.fuse(model, x, keep="all", dynamic=[{0}])
    assert "aten.index_select.default" in targets_of(fused)
    for rows in (5, 1, 40):
        x = torch.randn(rows, 3, 4)
        assert torch.equal(fused(x), model(x))
        assert torch.equal(fused(x.transpose(1, 2).contiguous().transpose(1, 2)), model(x))
    model.rows[0] = 1  # noticed, as any weight
    assert torch.equal(fused(x), model(x))


def test_indices_that_are_picked_otherwise(call: Any) -> None:
    rows, columns = torch.tensor([0, 1]), torch.tensor([[0], [1]])
    x, i = torch.randn(5, 3, 4), torch.tensor([0, 1])
    cases = {
        "shapes that broadcast": (lambda x: x[:, rows, columns] + 1, (x,)),
        "one index": (lambda x: x[:, rows] + 1, (x,)),
        "the first dimension": (lambda x: x[rows, rows] + 1, (x,)),
        "an index of the call": (lambda x, i: x[:, rows, i] + 1, (x, i)),
    }
    for name, (function, args) in cases.items():
        model = call(function).eval()
        fused = graphfuse.fuse(model, args, keep="all")
        assert "aten.index_select.default" not in targets_of(fused), name
        assert torch.equal(fused(*args), model(*args)), name


def test_indices_out_of_range_raise_as_in_eager() -> None:
    model = Pairs(torch.tensor([0, 3]), torch.tensor([0, 1])).eval()
    with pytest.raises((graphfuse.FuseError, IndexError)):
        graphfuse.fuse(model, torch.randn(5, 3, 4), keep="all")


def test_products_that_autocast_converts_between_views() -> None:
    """A linear layer of GPT-2's kind under autocast: view, convert, addmm, view."""

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            flat = torch.addmm(self.bias, x.view(-1, 8), self.weight)
            return F.gelu(flat.view(*x.shape[:-1], 6))

    model = Conv1D().eval()
    x = torch.randn(2, 3, 8)
    captured = capture(model, (x,), {}, None)
    nodes, metas = list(captured.nodes), captured.metas()
    flat = next(n for n in nodes if n.target == "aten.view.default")
    at = nodes.index(flat)
    meta = replace(flat.meta, dtype=torch.bfloat16)
    cast = Node("cast", "aten._to_copy.default", (Ref(flat.name),), {"dtype": torch.bfloat16}, meta)
    metas["cast"] = meta
    product = next(n for n in nodes if n.target == "aten.addmm.default")
    moved = replace(product, args=(product.args[0], Ref("cast"), product.args[2]))
    nodes[nodes.index(product)] = moved
    nodes.insert(at + 1, cast)
    made, derived = unflatten_products(nodes, captured.outputs, metas, set(captured.constants))
    assert [n.target for n in made] == [
        "aten._to_copy.default",
        "aten.linear.default",
        "aten.gelu.default",
    ]
    assert made[0].args == (Ref(captured.inputs[0]),)
    assert metas[made[0].name] == replace(
        captured.metas()[captured.inputs[0]], dtype=torch.bfloat16
    )
    assert len(derived) == 1


class Constants(nn.Module):
    """Returns what depends on weights alone, on nothing, and views of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        steps = torch.arange(8)
        scaled = self.layer.weight * 2
        turned = torch.einsum(
            "ij->ji", torch.ones(8, 8) * 2
        )  # a view, though its schema tells none
        first = torch.meshgrid(torch.arange(3) * 2, torch.arange(4), indexing="ij")[0]
        views = (scaled.t(), turned, first, (torch.ones(3) * 2).type_as(x))
        return self.layer(x).relu() + steps, steps.view(2, 4), scaled, torch.zeros(3), *views


@pytest.mark.parametrize("value", [1.0, math.nan])
@pytest.mark.parametrize("saved", [False, True])
def test_what_a_call_returns_may_be_written_to(saved: bool, value: float, tmp_path: Path) -> None:
    model = Constants().eval()
    x = torch.randn(4, 8)
    fused = graphfuse.fuse(model, x, keep="all")
    if saved:
        fused.save(tmp_path)
        fused = graphfuse.load(tmp_path)
    x[0, 0] = value
    with torch.no_grad():
        for _ in range(2):
            for result in fused(x):
                result.fill_(100)
        for found, expected in zip(fused(x), model(x), strict=True):
            torch.testing.assert_close(found, expected, equal_nan=True)
    # Nothing but NaN goes to eager, which a loaded module runs from the graph.
    assert sum(fused._eager_calls.values()) == (3 if math.isnan(value) else 0)


class Masked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(4)
        mask = {
            "open": lambda: (steps[None, None, :, None] >= 0).expand(x.shape[0], 1, 4, 4),
            "zero": lambda: torch.zeros(4, 4),
            "causal": lambda: steps[:, None] >= steps,
            "weight": lambda: self.weight > 0,
        }[self.kind]()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", ["open", "zero", "causal", "weight"])
def test_a_mask_that_lets_all_through_is_dropped(kind: str, dynamic: bool | None) -> None:
    model = Masked(kind).eval()
    x = torch.randn(3, 2, 4, 8)
    fused = graphfuse.fuse(model, x, keep="all", dynamic=dynamic)
    nodes = {node.target: node for node in fused._engines[0].nodes}
    attention = nodes["aten.scaled_dot_product_attention.default"]
    mask = attention.kwargs.get("attn_mask", (*attention.args, None)[3])
    # A weight may be edited.
    assert (mask is None) == (kind in ("open", "zero"))
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
        model.weight[:2] = -1
        model.weight[3, 1:] = -1
        model.weight[2:, 0] = 1
        model.weight[:2, 3] = 1
        torch.testing.assert_close(fused(x), model(x))


class Residual(nn.Module):
    """Blocks that compute with channels last and add with channels first, as ConvNeXt's do."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.randn(8))
        self.swapped = swapped

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = (self.scale * self.first(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        x = a + x if self.swapped else x + a
        b = self.second(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x, x + b


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("last", [True, False])
def test_sums_move_before_permutes(last: bool, swapped: bool) -> None:
    model = Residual(swapped).eval()
    x = torch.randn(2, 8, 3, 5)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    fused = graphfuse.fuse(model, x, keep="all")
    nodes = {node.name: node for node in fused._engines[0].nodes}
    sums = [node for node in nodes.values() if node.target == "aten.add.Tensor"]
    # A sum whose result has channels first stays; it has them last where its first operand has.
    beside = [nodes[ref.name].target for node in sums for ref in node.args if ref.name in nodes]
    moved = [target for target in beside if target in ("aten.mul.Tensor", "aten.linear.default")]
    assert len(moved) == (2 if last else int(swapped))
    for found, expected in zip(fused(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


def test_sums_of_other_shapes_and_permutes_with_readers_stay() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            turned = self.layer(x).permute(0, 3, 1, 2)
            other = self.layer(x + 1).permute(0, 3, 1, 2)
            return turned + y, other + y[:, :1]

    model = Apart().eval()
    inputs = (torch.randn(2, 3, 5, 8), torch.randn(2, 8, 3, 5))
    fused = graphfuse.fuse(model, inputs, keep="all")
    for found, expected in zip(fused(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


class OtherRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return u + self.layer(x).permute(1, 0)


class OpenStride(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return u[..., :16] + self.layer(x).permute(0, 2, 1)


def test_sums_beside_permutes_of_other_ranks_and_open_strides() -> None:
    for model, inputs, other in (
        (OtherRank(), (torch.randn(1, 8), torch.randn(1, 8, 1)), None),
        (OpenStride(), (torch.randn(2, 16, 8), torch.randn(2, 8, 20)), torch.randn(2, 8, 30)),
    ):
        model.eval()
        fused = graphfuse.fuse(model, inputs, keep="all")
        torch.testing.assert_close(fused(*inputs), model(*inputs))
        if other is not None:
            torch.testing.assert_close(fused(inputs[0], other), model(inputs[0], other))
