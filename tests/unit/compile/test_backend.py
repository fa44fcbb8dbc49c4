"""`torch.compile(backend="edgeweave")`: its name, its options, and which engine gets what."""

from __future__ import annotations

import ast
import importlib.metadata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edgeweave.compile
from edgeweave import EdgeweaveWarning
from edgeweave.compile import _engine, _measured
from edgeweave.compile._passes import pipeline_id
from edgeweave.compile._record import recording

INDUCTOR_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.fixture(autouse=True)
def _nothing_said():
    _engine._said.clear()


def sums(x, edges):
    return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]]).relu() + 1


def edges_and_features():
    return torch.randn(9, 5), torch.randint(0, 9, (2, 60))


def test_the_entry_point_is_declared() -> None:
    import tomllib

    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    declared = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]
    point = importlib.metadata.EntryPoint(
        "edgeweave", declared["edgeweave"], "torch_dynamo_backends"
    )
    assert point.load() is edgeweave.compile.edgeweave_backend


def test_by_name() -> None:
    x, edges = edges_and_features()
    compiled = torch.compile(sums, backend="edgeweave", options={"engine": "eager"})
    with recording() as records:
        torch.testing.assert_close(compiled(x, edges), sums(x, edges))
    (record,) = records
    assert record.ops == {"edgeweave.mm": 1}
    assert (record.engine, record.reason) == ("eager", "asked for")
    assert record.calls_after < record.calls_before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"engine": "fast"},
            ValueError,
            "engine must be one of auto, onednn, inductor, eager, got",
        ),
        ({"speed": 3}, ValueError, r"options must be among engine, without, got \['speed'\]"),
        ({"without": ["nothing"]}, ValueError, "without must name passes among replace_segment"),
        ({"without": "fuse_mm"}, TypeError, "without must be a collection of pass names, got str"),
    ],
)
def test_wrong_options(options, error, message) -> None:
    with pytest.raises(error, match=message):
        edgeweave.compile.edgeweave_backend(torch.fx.symbolic_trace(nn.ReLU()), [], options=options)


def test_without_a_pass() -> None:
    options = {"engine": "eager", "without": ["fuse_mm"]}
    x, edges = edges_and_features()
    compiled = torch.compile(sums, backend="edgeweave", options=options)
    with recording() as records:
        torch.testing.assert_close(compiled(x, edges), sums(x, edges))
    assert records[0].ops == {"edgeweave.scatter": 1}


def test_passes_have_stable_and_distinct_ids() -> None:
    ids = [each.id for each in edgeweave.compile.PASSES]
    assert len(set(ids)) == len(ids)
    assert all(i.startswith("edgeweave.") for i in ids)
    everything = pipeline_id()
    assert everything == pipeline_id()
    assert everything != pipeline_id(["fuse_mm"])


# ---- the rule of engine="auto" -------------------------------------------------------------------


def engine_of(model: Callable[..., object], *inputs: torch.Tensor) -> tuple[str, str]:
    """Return what `auto` picks, without compiling it."""
    picked: list[tuple[str, str]] = []

    def backend(graph: torch.fx.GraphModule, example: list[object]) -> object:
        edgeweave.compile.run_passes(graph)
        picked.append(_engine.choose_engine(graph, example, edgeweave.compile._options.Options()))
        return graph

    torch.compile(model, backend=backend)(*inputs)
    return picked[0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def test_inference_of_dense_chains_goes_to_onednn() -> None:
    with torch.no_grad():
        engine, reason = engine_of(mlp(), torch.randn(4, 5))
        assert engine == "onednn"
        assert "a chain of products" in reason
        engine, reason = engine_of(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8))
        assert (engine, "a convolution" in reason) == ("onednn", True)


def test_training_goes_to_inductor() -> None:
    assert engine_of(mlp(), torch.randn(4, 5)) == ("inductor", "it records gradients")


def test_what_holds_no_chain_goes_to_inductor() -> None:
    with torch.no_grad():
        assert engine_of(nn.Linear(5, 3), torch.randn(4, 5))[0] == "inductor"
        assert engine_of(lambda x: x.sin() + 1, torch.randn(4, 5))[0] == "inductor"


def test_graph_ops_go_to_inductor() -> None:
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    with torch.no_grad():
        x, edges = edges_and_features()
        assert engine_of(lambda x, e: second(first(sums(x, e))), x, edges)[0] == "inductor"


def test_onednn_asked_for_a_graph_with_our_ops_is_said_once_and_goes_to_inductor() -> None:
    module = torch.fx.symbolic_trace(lambda x: torch.mm(torch.mm(x, x), x))
    with module.graph.inserting_before(next(iter(reversed(module.graph.nodes)))):
        module.graph.call_function(torch.ops.edgeweave.gather.default, ())
    options = edgeweave.compile._options.Options("onednn")
    with pytest.warns(EdgeweaveWarning, match=r"that calls edgeweave\.gather goes to Inductor"):
        assert _engine.choose_engine(module, [torch.randn(4, 5)], options)[0] == "inductor"


def test_autocast_goes_to_onednn_where_the_processor_has_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_engine, "has_bf16", lambda: True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert engine_of(mlp(), torch.randn(4, 5))[0] == "onednn"
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        reason = "it is under autocast to torch.float16"
        assert engine_of(mlp(), torch.randn(4, 5)) == ("inductor", reason)


def test_autocast_goes_to_inductor_where_bf16_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine, "has_bf16", lambda: False)
    # The oneDNN backend would give float32.
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert engine_of(mlp(), torch.randn(4, 5)) == (
            "inductor",
            "it is under autocast on a processor that only emulates bfloat16",
        )


def test_sizes_that_depend_on_values_go_to_inductor() -> None:
    model = mlp()
    with torch.no_grad():
        picked = engine_of(lambda x: model(x[x[:, 0] > 0]), torch.randn(4, 5))
    assert picked == ("inductor", "it has sizes that depend on values")


def test_sizes_that_no_tensor_has_go_to_inductor() -> None:
    module = torch.fx.symbolic_trace(mlp())
    size = torch.fx.experimental.symbolic_shapes.ShapeEnv().create_unbacked_symint()
    options = edgeweave.compile._options.Options()
    with torch.no_grad():
        picked = _engine.choose_engine(module, [size, torch.randn(4, 5)], options)
    assert picked == ("inductor", "it is given a size that no tensor has")


def test_without_onednn_chains_go_to_inductor(monkeypatch) -> None:
    monkeypatch.setattr(_engine, "has_onednn", lambda: False)
    with torch.no_grad():
        assert engine_of(mlp(), torch.randn(4, 5))[0] == "inductor"


def test_without_a_compiler_the_rest_runs_as_aten_and_this_is_said_once(monkeypatch) -> None:
    monkeypatch.setattr(_engine, "has_compiler", lambda device: False)
    monkeypatch.setattr(
        _measured, "time_sides", lambda sides: {name: 1.0 + (name == "eager") for name in sides}
    )
    x, edges = edges_and_features()
    compiled = torch.compile(sums, backend="edgeweave")
    with pytest.warns(EdgeweaveWarning, match=r"no C\+\+ compiler was found"):
        out = compiled(x, edges)
    torch.testing.assert_close(out, sums(x, edges))
    torch._dynamo.reset()
    with warnings.catch_warnings(), recording() as records:
        warnings.simplefilter("error", EdgeweaveWarning)
        torch.compile(sums, backend="edgeweave")(x, edges)
    assert records[0].engine == "eager"
    assert records[0].reason.startswith("no C++ compiler; measured: passes + ATen 1 ms")
    assert records[0].ops == {"edgeweave.mm": 1}


def test_a_compiler_that_is_not_there(monkeypatch) -> None:
    from torch._inductor import cpp_builder, exc

    def fail() -> str:
        raise exc.InvalidCxxCompiler()

    assert _engine.has_compiler("cpu")
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fail)
    assert not _engine.has_compiler("cpu")


@pytest.fixture
def broken_compiler(tmp_path: Path) -> dict[str, str]:
    """Variables for a process whose C++ compiler tells its version, and builds nothing."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$1" in --version | -dumpversion | -v) exec g++ "$@";; esac\n'
        'echo "internal compiler error" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    # Nothing that was built before.
    return {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}


_SUMS = """
import sys, warnings
import torch
import edgeweave.compile
from edgeweave.compile._record import recording

def sums(x, edges):
    return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]]).relu() + 1

x, edges = torch.randn(9, 5), torch.randint(0, 9, (2, 60))
"""

_BUILT_AS_ATEN = """
training = sys.argv[1] == "training"
x.requires_grad_(training)
for time in range(2):
    torch._dynamo.reset()
    with torch.set_grad_enabled(training), recording() as records:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", edgeweave.EdgeweaveWarning)
            out = torch.compile(sums, backend="edgeweave")(x, edges)
    torch.testing.assert_close(out, sums(x, edges))
    if training:
        grads = [torch.autograd.grad(y.sum(), x)[0] for y in (out, sums(x, edges))]
        torch.testing.assert_close(*grads)
    print([str(w.message) for w in said if w.category is edgeweave.EdgeweaveWarning])
    print([(record.engine, record.reason) for record in records])
"""


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_what_inductor_cannot_build_runs_as_aten_and_this_is_said_once(
    broken_compiler: dict[str, str], run_python: Callable[..., Any], mode: str
) -> None:
    done = run_python(_SUMS + _BUILT_AS_ATEN, args=(mode,), env=broken_compiler)
    first, how, second, again = map(ast.literal_eval, done.stdout.splitlines())
    assert first == [
        "edgeweave.compile: Inductor cannot build a graph (CppCompileError), so it runs as ATen "
        "operators after the graph passes; ask for engine='inductor' to see the error"
    ]
    assert second == []
    for engine, reason in (*how, *again):
        assert engine == "eager"
        assert "Inductor raises CppCompileError" in reason


def test_inductor_asked_for_by_name_shows_its_error(
    broken_compiler: dict[str, str], run_python: Callable[..., Any]
) -> None:
    code = _SUMS + (
        "torch.compile(sums, backend='edgeweave', options={'engine': 'inductor'})(x, edges)"
    )
    done = run_python(code, env=broken_compiler, check=False)
    assert done.returncode == 1
    assert "internal compiler error" in done.stderr


@INDUCTOR_WARNINGS
def test_sums_of_negative_zeros_are_positive() -> None:
    # Inductor's own code adds three negative zeros to -0.0, whose angle with 0.0 is pi.
    def angles(x):
        return torch.atan2(x.abs().sum(1), (-x).sum(1)), torch.copysign(x[:, 0], x.mul(-1).sum(1))

    x = torch.zeros(40, 3)
    compiled = torch.compile(angles, backend="edgeweave", options={"engine": "inductor"})
    with torch.no_grad():
        found = compiled(x)
    for mine, eager in zip(found, angles(x), strict=True):
        assert torch.equal(mine, eager)
        assert torch.equal(mine.signbit(), eager.signbit())


def test_onednn_asked_for_in_training_is_said_once_and_goes_to_inductor() -> None:
    graph = torch.fx.symbolic_trace(mlp())
    example = [torch.randn(4, 5, requires_grad=True)]
    options = edgeweave.compile._options.Options("onednn")
    with pytest.warns(EdgeweaveWarning, match="a graph that records gradients goes to Inductor"):
        assert _engine.choose_engine(graph, example, options)[0] == "inductor"


def test_onednn_runs() -> None:
    model, x = mlp(), torch.randn(4, 5)
    compiled = torch.compile(model, backend="edgeweave", options={"engine": "onednn"})
    with torch.no_grad(), recording() as records:
        torch.testing.assert_close(compiled(x), model(x))
    assert records[0].engine == "onednn"


@INDUCTOR_WARNINGS
def test_inductor_gets_the_rewritten_graph_and_the_id_of_the_pipeline(monkeypatch) -> None:
    from torch._inductor.utils import run_and_get_code

    x, edges = edges_and_features()
    compiled = torch.compile(sums, backend="edgeweave", options={"engine": "inductor"})
    with torch.no_grad():
        out, (code,) = run_and_get_code(compiled, x, edges)
    torch.testing.assert_close(out, sums(x, edges))
    assert "torch.ops.edgeweave.mm.default" in code
    assert "at::vec::Vectorized" in code  # the ReLU and the addition: vectorised C++
    assert "index_add" not in code.split("async_compile.wait")[1]


def test_fullgraph_captures_self_loops_without_optimize() -> None:
    from torch_geometric.nn import GCNConv

    conv, (x, edges) = GCNConv(5, 3), edges_and_features()
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=False, capture_scalar_outputs=False
    ):
        compiled = torch.compile(
            conv, backend="edgeweave", fullgraph=True, options={"engine": "eager"}
        )
        with recording() as records:
            torch.testing.assert_close(compiled(x, edges), conv(x, edges))
    assert records[0].ops == {"edgeweave.gcn": 1}
