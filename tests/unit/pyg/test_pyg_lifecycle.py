"""`accelerate`, `accelerated` and `restore`: exact, nested, idempotent, thread-safe."""

import copy
import gc
import importlib
import inspect
import io
import pickle
import sys
import threading
import types
import warnings

import pytest
import torch
import torch_geometric
from torch_geometric import utils
from torch_geometric.nn import GCNConv, MessagePassing, SAGEConv, SumAggregation
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.conv import gcn_conv

import edgeweave.pyg
from edgeweave.pyg import _state

N, E, F = 12, 60, 4


@pytest.fixture
def edges() -> torch.Tensor:
    return torch.randint(0, N, (2, E))


def classes() -> list[type]:
    found, todo = [], [MessagePassing, Aggregation]
    while todo:
        cls = todo.pop()
        if cls not in found:
            found.append(cls)
            todo.extend(cls.__subclasses__())
    return found


def snapshot() -> dict[tuple[str, str], int]:
    """Identity of every attribute of PyG's modules and layer classes."""
    state = {}
    gc.collect()  # Classes of earlier tests must not vanish between two snapshots.
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch_geometric" and isinstance(module, types.ModuleType):
            state |= {(name, key): id(value) for key, value in vars(module).items()}
    for cls in classes():
        state |= {(repr(cls), key): id(value) for key, value in vars(cls).items()}
    return state


def changed(before: dict[tuple[str, str], int]) -> set[tuple[str, str]]:
    after = snapshot()
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def test_restore_puts_back_exactly_the_originals(edges):
    SAGEConv(F, F)
    before = snapshot()
    edgeweave.pyg.accelerate()
    patched = changed(before)
    assert ("torch_geometric.utils", "scatter") in patched
    assert ("torch_geometric.nn.conv.sage_conv", "spmm") in patched
    assert (repr(SAGEConv), "propagate") in patched
    SAGEConv(F, F)(torch.randn(N, F), edges)
    edgeweave.pyg.restore()
    assert changed(before) == set()


def test_class_first_built_while_accelerated(edges):
    class Fresh(SAGEConv):
        pass

    class FreshChild(Fresh):
        pass

    with edgeweave.pyg.accelerated():
        layer, child = Fresh(F, F), FreshChild(F, F)
        x = torch.randn(N, F)
        layer(x, edges)
        child(x, edges)
    fused = [site.fused for site in edgeweave.pyg.report().sites if "Fresh" in site.site]
    assert fused == [1, 1]
    for cls in (Fresh, FreshChild):
        for name in ("propagate", "_jinja_propagate", "_orig_propagate"):
            assert not hasattr(vars(cls)[name], "__wrapped__"), (cls, name)
    assert Fresh.propagate is Fresh._jinja_propagate
    # PyG takes a child's "original" propagate from its parent; no wrapper may stay in there.
    assert Fresh._orig_propagate is SAGEConv.propagate
    assert FreshChild._orig_propagate is Fresh.propagate


def test_accelerate_is_idempotent():
    before = snapshot()
    edgeweave.pyg.accelerate()
    once = snapshot()
    edgeweave.pyg.accelerate()
    assert changed(once) == set()
    edgeweave.pyg.restore()
    edgeweave.pyg.restore()
    assert changed(before) == set()


def test_accelerating_again_does_not_stack(edges):
    layer, x = SAGEConv(F, F), torch.randn(N, F)
    for _ in range(3):
        with edgeweave.pyg.accelerated():
            layer(x, edges)
    assert edgeweave.pyg.report()["SAGEConv"].fused == 3


def test_nested_contexts():
    assert not edgeweave.pyg.is_accelerated()
    with edgeweave.pyg.accelerated():
        with edgeweave.pyg.accelerated():
            assert edgeweave.pyg.is_accelerated()
        assert edgeweave.pyg.is_accelerated()
    assert not edgeweave.pyg.is_accelerated()


def test_context_inside_accelerate_leaves_it_on():
    edgeweave.pyg.accelerate()
    with edgeweave.pyg.accelerated():
        pass
    assert edgeweave.pyg.is_accelerated()


def test_accelerate_inside_a_context_stays_on():
    with edgeweave.pyg.accelerated():
        edgeweave.pyg.accelerate()
    assert edgeweave.pyg.is_accelerated()


def test_restore_inside_contexts_ends_them():
    original = utils.scatter
    with edgeweave.pyg.accelerated(), edgeweave.pyg.accelerated():
        edgeweave.pyg.restore()
        assert not edgeweave.pyg.is_accelerated()
        assert utils.scatter is original
    assert not edgeweave.pyg.is_accelerated()


def test_context_ends_on_an_error():
    with pytest.raises(KeyError), edgeweave.pyg.accelerated():
        raise KeyError
    assert not edgeweave.pyg.is_accelerated()


def test_threads_in_and_out_of_contexts(edges):
    before = snapshot()
    layer, x = SAGEConv(F, F), torch.randn(N, F)
    expected = layer(x, edges)
    wrong: list[object] = []

    def work() -> None:
        try:
            for _ in range(20):
                with edgeweave.pyg.accelerated():
                    out = layer(x, edges)
                    if not edgeweave.pyg.is_accelerated():
                        wrong.append("was switched off inside a block")
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert changed(before) == set()
    assert edgeweave.pyg.report()["SAGEConv"].fused == 80


def test_modules_imported_later_are_restored(monkeypatch):
    original = utils.scatter
    later = types.ModuleType("someones_module")
    with edgeweave.pyg.accelerated():
        later.scatter = utils.scatter
        monkeypatch.setitem(sys.modules, "someones_module", later)
    assert later.scatter is original


def test_pyg_module_imported_while_accelerated_is_covered():
    name = "torch_geometric.nn.unpool.knn_interpolate"
    original = utils.scatter
    edgeweave.pyg.accelerate()
    module = importlib.reload(sys.modules[name])
    assert module.scatter is utils.scatter is not original
    edgeweave.pyg.restore()
    assert module.scatter is original


def test_wrapper_that_outlives_restore_is_the_original_in_effect():
    with edgeweave.pyg.accelerated():
        kept = utils.scatter
    src, index = torch.randn(5), torch.tensor([0, 1, 0, 1, 2])
    assert torch.equal(kept(src, index), utils.scatter(src, index))
    assert edgeweave.pyg.report().sites == ()


def test_wrappers_look_like_what_they_wrap():
    signatures = [inspect.signature(f) for f in (utils.scatter, utils.spmm, gcn_conv.gcn_norm)]
    with edgeweave.pyg.accelerated():
        for wrapper, signature in zip(
            (utils.scatter, utils.spmm, gcn_conv.gcn_norm), signatures, strict=True
        ):
            assert inspect.signature(wrapper) == signature
            assert wrapper.__module__.startswith("torch_geometric")
            assert wrapper.__doc__ == wrapper.__wrapped__.__doc__


@pytest.mark.parametrize("make", [GCNConv, SAGEConv])
def test_deepcopy_pickle_and_state_dict(make, edges):
    layer, x = make(F, F), torch.randn(N, F)
    stock = layer(x, edges)
    with edgeweave.pyg.accelerated():
        layer(x, edges)
        twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
        fresh = make(F, F)
        fresh.load_state_dict(layer.state_dict())
        twins.append(fresh)
        for twin in twins:
            torch.testing.assert_close(twin(x, edges), stock, rtol=1e-5, atol=1e-6)
        assert edgeweave.pyg.report()[make.__name__].fused == 4
        assert not any("edgeweave" in str(key) for key in layer.__dict__)
        data = pickle.dumps(layer)
    assert b"edgeweave" not in data
    torch.testing.assert_close(pickle.loads(data)(x, edges), stock, rtol=1e-5, atol=1e-6)


def test_saved_cached_layer_does_not_need_edgeweave(edges):
    layer, buffer = GCNConv(F, F, cached=True), io.BytesIO()
    with edgeweave.pyg.accelerated():
        layer(torch.randn(N, F), edges)
        torch.save(layer, buffer)
    assert b"edgeweave" not in buffer.getvalue()


def test_explained_layer_survives_restore_and_pickle(edges):
    layer, x = SAGEConv(F, F), torch.randn(N, F)
    stock = layer(x, edges)
    with edgeweave.pyg.accelerated():
        layer.explain = True
        layer.explain = False
    torch.testing.assert_close(layer(x, edges), stock)
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x, edges), stock)
    assert edgeweave.pyg.report().sites == ()


def test_failed_install_leaves_pyg_untouched(monkeypatch):
    from edgeweave.pyg import _install

    before = snapshot()

    def fail(cls: type) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(_install, "_adopt", fail)
    with pytest.raises(RuntimeError, match="no"):
        edgeweave.pyg.accelerate()
    monkeypatch.undo()
    assert changed(before) == set()
    assert not edgeweave.pyg.is_accelerated()


DISABLED = """
import warnings
warnings.simplefilter("ignore")
import torch
from torch_geometric import utils
from torch_geometric.nn import SAGEConv
import edgeweave.pyg
original = utils.scatter
edgeweave.pyg.accelerate()
with edgeweave.pyg.accelerated():
    assert (utils.scatter is original) == {disabled}
    SAGEConv(3, 3)(torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]]))
assert edgeweave.pyg.is_accelerated() != {disabled}
print(edgeweave.pyg.report()["SAGEConv"].fused)
"""


@pytest.mark.parametrize(
    ("value", "disabled"), [("1", True), ("yes", True), ("0", False), ("off", False), ("", False)]
)
def test_values_of_the_environment_variable(value, disabled, monkeypatch):
    monkeypatch.setenv("EDGEWEAVE_DISABLE", value)
    edgeweave.pyg.accelerate()
    assert edgeweave.pyg.is_accelerated() is not disabled


@pytest.mark.parametrize(("value", "disabled"), [("1", True), ("0", False)])
def test_environment_variable(value, disabled, run_python):
    done = run_python(DISABLED.format(disabled=disabled), env={"EDGEWEAVE_DISABLE": value})
    assert done.stdout.strip() == ("0" if disabled else "1")


def test_importing_does_not_import_pyg(run_python):
    done = run_python("import sys, edgeweave.pyg; print('torch_geometric' in sys.modules)")
    assert done.stdout.strip() == "False"


def test_without_pyg_the_error_says_what_to_install(run_python):
    code = (
        "import sys; sys.modules['torch_geometric'] = None\n"
        "import edgeweave.pyg\n"
        "try: edgeweave.pyg.accelerate()\n"
        "except ImportError as error: print(error)\n"
        "print(edgeweave.pyg.is_accelerated())\n"
        "edgeweave.pyg.restore()\n"
    )
    done = run_python(code)
    assert "pip install edgeweave[pyg]" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("version", ["2.9.0", "3.0", "2.6.1", "unknown"])
def test_untested_version_warns_once(version, monkeypatch):
    monkeypatch.setattr(torch_geometric, "__version__", version)
    monkeypatch.setattr(_state, "_version_checked", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        edgeweave.pyg.accelerate()
        edgeweave.pyg.restore()
        edgeweave.pyg.accelerate()
    (warning,) = caught
    assert warning.category is edgeweave.pyg.UntestedVersionWarning
    assert f"got {version}" in str(warning.message)
    assert warning.filename == __file__


def test_untested_version_warns_at_the_with_statement_too(monkeypatch):
    monkeypatch.setattr(torch_geometric, "__version__", "2.9.0")
    monkeypatch.setattr(_state, "_version_checked", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with edgeweave.pyg.accelerated():
            pass
    (warning,) = caught
    assert warning.filename == __file__


@pytest.mark.parametrize("version", ["2.7.0", "2.8.1", "2.8.0.dev20260101"])
def test_tested_version_does_not_warn(version, monkeypatch):
    monkeypatch.setattr(torch_geometric, "__version__", version)
    monkeypatch.setattr(_state, "_version_checked", False)
    edgeweave.pyg.accelerate()
    assert _state._version_checked


def test_report(edges):
    assert str(edgeweave.pyg.report()).startswith("edgeweave.pyg: no call has been seen yet; was")
    layer, x = SAGEConv(F, F), torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        layer(x, edges)
        SAGEConv(F, F, aggr="mul")(x, edges)
        SumAggregation()(x, torch.zeros(N, dtype=torch.long))
    report = edgeweave.pyg.report()
    assert report["SAGEConv"].fused == 1
    assert report["SAGEConv"].fell_back == 1
    assert report["never seen"].fused == 0
    lines = str(report).splitlines()
    assert lines[0].split() == ["call", "site", "fused", "fell", "back", "why"]
    (line,) = (line for line in lines if line.startswith("SAGEConv"))
    assert line.split()[:3] == ["SAGEConv", "1", "1"]
    assert "1x aggr='mul' is not a plain sum, mean, max or min" in line
    edgeweave.pyg.reset_report()
    assert edgeweave.pyg.report().sites == ()
