"""`torch.compile(backend="edgeweave_onednn")`."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest
import torch
from torch import nn

from edgeweave import EdgeweaveWarning, graphfuse
from edgeweave.graphfuse import _backend


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    _backend._said.clear()


def _model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()


def _compiled_parts(monkeypatch: pytest.MonkeyPatch) -> list[graphfuse.FusedModule]:
    made: list[graphfuse.FusedModule] = []
    original = _backend.fuse

    def fuse(*args: object, **kwargs: object) -> graphfuse.FusedModule:
        kwargs["keep"] = "all"
        made.append(original(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(_backend, "fuse", fuse)
    return made


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_batches_of_several_sizes(monkeypatch: pytest.MonkeyPatch, dynamic: bool | None) -> None:
    made = _compiled_parts(monkeypatch)
    model = _model()
    compiled = torch.compile(model, backend=graphfuse.edgeweave_onednn, dynamic=dynamic)
    with torch.no_grad():
        for batch in (4, 5, 7):  # no other size is 4, which Dynamo would take for the same
            x = torch.randn(batch, 3, 8, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(made) == {None: 2, False: 3, True: 1}[dynamic]
    assert all(sum(len(p.nodes) for p in each.report().partitions) == 2 for each in made)


def test_weights_edited_or_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    _compiled_parts(monkeypatch)
    model, x = _model(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend=graphfuse.edgeweave_onednn)
    with torch.no_grad():
        compiled(x)
        model[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
        model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))
        torch.testing.assert_close(compiled(x), model(x))


def test_graphs_that_record_gradients_run_in_eager_and_say_so_once() -> None:
    model, x = _model(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend=graphfuse.edgeweave_onednn)
    with pytest.warns(EdgeweaveWarning, match="records gradients runs in eager"):
        loss = compiled(x).sum()
    loss.backward()
    assert model[0].weight.grad is not None
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", EdgeweaveWarning)
        torch.compile(model, backend=graphfuse.edgeweave_onednn)(x)


def test_a_graph_that_cannot_be_fused_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise graphfuse.FuseError("fuse: no")

    monkeypatch.setattr(_backend, "fuse", refuse)
    model, x = _model(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend=graphfuse.edgeweave_onednn)
    with torch.no_grad(), pytest.warns(EdgeweaveWarning, match="a graph runs in eager: fuse: no"):
        torch.testing.assert_close(compiled(x), model(x))


def test_unknown_options() -> None:
    compiled = torch.compile(_model(), backend=graphfuse.edgeweave_onednn, options={"speed": "all"})
    with pytest.raises(Exception, match="options must be empty"), torch.no_grad():
        compiled(torch.randn(2, 3, 8, 8))


def test_the_entry_point_is_declared() -> None:
    from pathlib import Path

    import tomllib

    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    declared = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]
    point = importlib.metadata.EntryPoint(
        "edgeweave_onednn", declared["edgeweave_onednn"], "torch_dynamo_backends"
    )
    assert point.load() is graphfuse.edgeweave_onednn


def test_an_operator_of_another_library_leaves_the_graph_to_eager() -> None:
    with torch.library._scoped_library("edgeweave_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        torch.library.register_fake("edgeweave_test::twice", torch.empty_like, lib=library)

        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.edgeweave_test.twice(x @ x).relu()

        compiled = torch.compile(run, backend=graphfuse.edgeweave_onednn)
        x = torch.randn(4, 4)
        with torch.no_grad(), pytest.warns(EdgeweaveWarning, match="operator must be of ATen"):
            torch.testing.assert_close(compiled(x), run(x))
