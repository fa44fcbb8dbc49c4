"""Dot interactions of recommendation models: one call, right, and only where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeweave import graphfuse
from edgeweave._native import ops

from .conftest import targets_of


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
    targets = targets_of(fused)
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
    assert _CROSSED in targets_of(fused)
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
        "two in front": lambda x: torch.cat(
            [x[:, :, 1], torch.cat([x[:, :, 0], (x @ x.mT)[:, rows, columns]], dim=1)], dim=1
        ),
        "front": lambda x: torch.cat([x[:, :, 0], (x @ x.mT)[:, rows, columns]], dim=-1),
    }
    for name, function in cases.items():
        model = call(function).eval()
        fused = graphfuse.fuse(model, x, keep="all")
        assert _CROSSED in targets_of(fused), name
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
        assert _CROSSED not in targets_of(fused), name
        torch.testing.assert_close(fused(*args), model(*args), msg=name)


def test_interactions_saved_and_loaded(tmp_path: Any) -> None:
    model = Interaction(3, 8).eval()
    example = (torch.randn(5, 3), torch.randint(11, (5, 3)))
    fused = graphfuse.fuse(model, example, keep="all")
    fused.save(tmp_path / "saved")
    loaded = graphfuse.load(tmp_path / "saved")
    assert _CROSSED in targets_of(loaded)
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


@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_other_instruction_sets(isa: str, run_python: Any) -> None:
    code = """
import torch
from edgeweave._native import ops
for slots, width, dtype in ((1, 1, 0), (5, 3, 1), (9, 17, 0), (27, 64, 1), (33, 40, 2), (16, 9, 2)):
    features = torch.randn(6, slots, width)
    narrow, features = dtype == 1, features.bfloat16() if dtype == 2 else features
    picks = torch.randint(slots * slots, (50,))
    found = ops.dense_dot_interaction(
        [], None, [], list(features.unbind(1)), list(range(slots)), narrow, picks, None
    )
    exact = (features.bfloat16() if narrow else features).double()
    exact = (exact @ exact.mT).flatten(1)[:, picks]
    limit = 1e-6 * width if dtype == 0 else 2.0**-8
    assert ((found - exact).abs() <= limit * (1 + exact.abs())).all()
print("right")
"""
    run = run_python(code, env={"EDGEWEAVE_ISA": isa}, check=False)
    if "must be one of" in run.stderr or "must name" in run.stderr:
        pytest.skip(f"this processor or build has no {isa}")
    assert run.stdout.strip() == "right", run.stderr
