"""What models write out by hand is recognised, and only that."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeweave import graphfuse
from edgeweave._fx import Node, Ref, capture
from edgeweave._fx._patterns import unflatten_products
from edgeweave._native import ops


def gelu_new(x: Tensor, half: float = 0.5, cubic: float = 0.044715, power: float = 3.0) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + cubic * torch.pow(x, power))
    return half * x * (1.0 + torch.tanh(inner))


def _targets(made: graphfuse.FusedModule) -> list[str]:
    return [node.target for node in made._engines[0].nodes]


def test_gelu_by_hand(assert_fused: Any, call: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), call(gelu_new))
    made = assert_fused(model, torch.randn(4, 8))
    assert _targets(made) == ["aten.linear.default", "aten.gelu.default"]


def test_its_special_values(call: Any) -> None:
    model = call(gelu_new).eval()
    x = torch.tensor([0.0, -0.0, 1e-30, 10.0, -10.0, math.inf, math.nan, 3e38, 1e20])
    made = graphfuse.fuse(model, torch.randn(9))
    assert _targets(made) == ["aten.gelu.default"]
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
    assert "aten.gelu.default" not in _targets(made)


def test_a_part_that_others_read_stays(assert_fused: Any, call: Any) -> None:
    def also(x: Tensor) -> tuple[Tensor, Tensor]:
        tanh = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + tanh), tanh

    model, x = call(also).eval(), torch.randn(4, 8)
    made = graphfuse.fuse(model, x, keep="all")
    for found, expected in zip(made(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)
    assert "aten.gelu.default" not in _targets(made)


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
    assert _targets(made) == ["aten.linear.default", "aten.gelu.default"]
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
    assert "aten.linear.default" not in _targets(made)


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
    assert _targets(fused).count("edgeweave.embedding_stack.default") == 1
    assert not {"aten.embedding.default", "aten.select.int"} & set(_targets(fused))
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
        assert "edgeweave.embedding_stack.default" not in _targets(fused), name
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


class Interaction(nn.Module):
    """Products of an example's features with each other, as in a recommendation model."""

    def __init__(self, tables: int, width: int, rows: int = 11) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.dense = nn.Linear(3, width)
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, offset=1))

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        x = self.dense(x)
        rows = [x] + [table(indices[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack(rows, dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        picked = products[:, self.pairs[0], self.pairs[1]]  # type: ignore[index]
        return torch.cat([x, picked], dim=1)


_CROSSED = "edgeweave.dot_interaction.default"
_CROSSING_CALLS = {
    "aten.stack.default",
    "aten.bmm.default",
    "aten.index.Tensor",
    "aten.index_select.default",
    "aten.cat.default",
    "edgeweave.embedding_stack.default",
}


def _expected(model: Interaction, x: Tensor, indices: Tensor, dtype: Any = None) -> Tensor:
    """In float64, of features rounded as `dtype` rounds them."""
    front = model.dense(x) if dtype is None else F.linear(*_as(dtype, x, *model.dense.parameters()))
    rows = [front] + [table(indices[:, i]) for i, table in enumerate(model.tables)]
    features = torch.stack([row.to(dtype or row.dtype).double() for row in rows], dim=1)
    products = features @ features.mT
    return torch.cat([front.double(), products[:, model.pairs[0], model.pairs[1]]], dim=1)


def _as(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("tables", "width"), [(2, 1), (3, 5), (7, 16), (15, 33), (16, 64), (26, 64), (40, 7), (63, 256)]
)
@torch.no_grad()
def test_interactions_are_one_call(tables: int, width: int, dtype: Any) -> None:
    model = Interaction(tables, width).eval()
    example = (torch.randn(5, 3), torch.randint(11, (5, tables)))
    fused = graphfuse.fuse(model, example, keep="all", dtype=dtype, dynamic=[{0}, {0}])
    targets = _targets(fused)
    assert targets.count(_CROSSED) == 1
    assert not _CROSSING_CALLS & set(targets)
    # Sums of `width` products of float32; a result in bfloat16 is rounded once more.
    tolerance = 2.0**-8 if dtype else 1e-5
    for rows in (5, 1, 200):
        x, indices = torch.randn(rows, 3), torch.randint(11, (tables, rows)).t()
        expected = _expected(model, x, indices, dtype)
        torch.testing.assert_close(
            fused(x, indices).double(), expected, rtol=tolerance, atol=tolerance * width**0.5
        )
    indices[-1, 0] = 11
    with pytest.raises(IndexError, match="index out of range in self"):
        fused(x, indices)
    model.tables[1].weight.mul_(2)  # noticed, as any weight
    x, indices = example
    expected = _expected(model, x, indices, dtype)
    torch.testing.assert_close(
        fused(x, indices).double(), expected, rtol=tolerance, atol=tolerance * 4 * width**0.5
    )


@torch.no_grad()
def test_special_values_of_an_interaction() -> None:
    model = Interaction(3, 17).eval()
    x, indices = torch.randn(6, 3), torch.randint(11, (6, 3))
    model.tables[0].weight[:, 3] = torch.inf
    model.tables[1].weight[:, 3] = 0.0
    model.tables[2].weight[0] = torch.nan
    fused = graphfuse.fuse(model, (x, indices), keep="all")
    assert _CROSSED in _targets(fused)
    torch.testing.assert_close(fused(x, indices), model(x, indices), equal_nan=True)


def test_interactions_of_given_features(call: Any) -> None:
    """Any order of picks, any features; what is read elsewhere too stays."""
    rows, columns = torch.tensor([2, 0, 0, 1, 2, 2]), torch.tensor([0, 0, 1, 2, 1, 2])
    x = torch.randn(9, 3, 5)
    cases = {
        "transpose": lambda x: (x @ x.transpose(-1, -2))[:, rows, columns],
        "permute": lambda x: torch.bmm(x, x.permute(0, 2, 1))[:, rows, columns],
        "negative": lambda x: torch.bmm(x, x.mT)[:, rows - 3, columns],
        "stack": lambda x: (lambda s: torch.bmm(s, s.mT)[:, rows, columns])(
            torch.stack([x[:, 0], x[:, 1], x[:, 2]], dim=1)
        ),
        "read twice": lambda x: (lambda s: torch.bmm(s, s.mT)[:, rows, columns] + s.sum())(x * 2),
        "front is last": lambda x: torch.cat([(x @ x.mT)[:, rows, columns], x[:, 0]], dim=1),
        "front": lambda x: torch.cat([x[:, :, 0], (x @ x.mT)[:, rows, columns]], dim=-1),
    }
    for name, function in cases.items():
        model = call(function).eval()
        fused = graphfuse.fuse(model, x, keep="all")
        assert _CROSSED in _targets(fused), name
        torch.testing.assert_close(fused(x), model(x), msg=name)
        y = torch.randn(3, 5, 9).permute(2, 0, 1)
        torch.testing.assert_close(fused(y), model(y), msg=name)


def test_what_is_no_interaction(call: Any) -> None:
    rows, columns = torch.tensor([2, 0]), torch.tensor([0, 1])
    x, y, wide = torch.randn(9, 3, 3), torch.randn(9, 3, 3), torch.randn(4, 3, 257)
    cases = {
        "of two": (lambda x, y: (x @ y.mT)[:, rows, columns], (x, y)),
        "not turned": (lambda x: (x @ x)[:, rows, columns], (x,)),
        "turned first": (lambda x: (x.mT @ x.mT)[:, rows, columns], (x,)),
        "columns": (lambda x: (x.mT @ x)[:, rows, columns], (x,)),
        "products that others read": (
            lambda x: (lambda p: p[:, rows, columns].sum() + p)(x @ x.mT),
            (x,),
        ),
        "float64": (lambda x: (x @ x.mT)[:, rows, columns], (x.double(),)),
        "wide": (lambda x: (x @ x.mT)[:, rows, columns], (wide,)),
        "rounded in between": (
            lambda x: (x.bfloat16().float() @ x.mT)[:, rows, columns],
            (x,),
        ),
    }
    for name, (function, args) in cases.items():
        model = call(function).eval()
        fused = graphfuse.fuse(model, args, keep="all")
        assert _CROSSED not in _targets(fused), name
        torch.testing.assert_close(fused(*args), model(*args), msg=name)


def test_interactions_saved_and_loaded(tmp_path: Any) -> None:
    model = Interaction(3, 8).eval()
    example = (torch.randn(5, 3), torch.randint(11, (5, 3)))
    fused = graphfuse.fuse(model, example, keep="all")
    fused.save(tmp_path / "saved")
    loaded = graphfuse.load(tmp_path / "saved")
    assert _CROSSED in _targets(loaded)
    assert torch.equal(loaded(*example), fused(*example))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"picks": torch.tensor([4])}, "picks must be elements of a matrix of slots by slots"),
        ({"picks": torch.tensor([-1])}, "picks must be elements"),
        ({"picks": torch.tensor([[1]])}, "picks must be a vector of int64"),
        ({"picks": torch.tensor([1.0])}, "picks must be a vector of int64"),
        ({"front": torch.randn(4, 2)}, "front must have a contiguous row for each example"),
        ({"front": torch.randn(5, 2).double()}, "front must have a contiguous row"),
        ({"front": torch.randn(2, 5).t()}, "front must have a contiguous row"),
        ({"others": [torch.randn(5, 3), torch.randn(5, 4)]}, "must have the same width and dtype"),
        ({"others": [torch.randn(5, 3), torch.randn(4, 3)]}, "must have the same width and dtype"),
        ({"others": [torch.randn(5, 3).double()] * 2}, "features must be float32 or bfloat16"),
        ({"others": []}, "a slot for each table and matrix"),
        ({"order": [0, 2]}, "order must name tables and matrices"),
        ({"order": [0, -1]}, "order must name tables and matrices"),
        ({"order": []}, "a slot for each table and matrix"),
        ({"columns": [0]}, "a column for each table"),
        ({"indices": torch.zeros(5, 1).long()}, "indices must be given where tables are"),
        ({"others": [torch.randn(5)] * 2}, "must have the same width and dtype"),
    ],
)
def test_bad_input_of_an_interaction(change: dict[str, Any], message: str) -> None:
    given = {
        "tables": [],
        "indices": None,
        "columns": [],
        "others": [torch.randn(5, 3), torch.randn(5, 3)],
        "order": [0, 1],
        "narrow": False,
        "picks": torch.tensor([1]),
        "front": None,
    }
    assert ops.dense_dot_interaction(*given.values()).shape == (5, 1)
    with pytest.raises(ValueError, match=f"dense: .*{message}"):
        ops.dense_dot_interaction(*{**given, **change}.values())


def test_empty_interactions() -> None:
    none = torch.tensor([], dtype=torch.int64)
    pick = torch.tensor([1, 2, 3, 0])

    def call(others: list[Tensor], picks: Tensor, front: Tensor | None = None) -> Tensor:
        order = list(range(len(others)))
        return ops.dense_dot_interaction([], None, [], others, order, False, picks, front)

    assert call([torch.randn(0, 3)] * 2, pick).shape == (0, 4)
    assert torch.equal(call([torch.randn(5, 0)] * 2, pick), torch.zeros(5, 4))
    assert call([torch.randn(5, 3)] * 2, none).shape == (5, 0)
    front = torch.randn(5, 2)
    assert torch.equal(call([torch.randn(5, 3)] * 2, none, front), front)


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
    assert "aten.index_select.default" in _targets(fused)
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
        assert "aten.index_select.default" not in _targets(fused), name
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
