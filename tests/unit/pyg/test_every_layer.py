"""Every layer that PyG exports gives what stock PyG gives, and the table says what is fused."""

import importlib.util

import pytest
import torch
from _every_layer import CASES, UNAVAILABLE, Case
from _layer_inputs import Inputs
from _layer_marks import MARKS
from _layer_runs import FLOWS, mark_of, run_case, stand_ins
from torch import Tensor
from torch_geometric.nn import conv

import edgeweave.pyg
from scripts import list_pyg_layers

# SplineConv says on a CPU that it would rather be on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:We do not recommend using the non-optimized")

REMEDY = "run `python scripts/list_pyg_layers.py --write` and look at what changed"
RUNS = [(case, flow) for case in CASES for flow in (FLOWS if case.flows else (None,))]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    # A hundred edges are no work for two; waiting for each other takes far longer.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _what_pyg_lib_would_bring():
    with stand_ins():
        yield


def worst(values: list[Tensor]) -> float:
    return max((v.double().abs().max().item() for v in values if v.numel()), default=0.0)


def name_of(run: tuple[Case, str | None]) -> str:
    return run[0].name + ("" if run[1] is None else f"-{run[1]}")


@pytest.mark.parametrize(("case", "flow"), RUNS, ids=map(name_of, RUNS))
def test_as_stock(case, flow):
    stock, stock_64 = (run_case(case, flow, dtype) for dtype in (torch.float32, torch.float64))
    with edgeweave.pyg.accelerated():
        ours = run_case(case, flow, torch.float32)
        report = edgeweave.pyg.report()
        again, ours_64 = (run_case(case, flow, dtype) for dtype in (torch.float32, torch.float64))

    # An edge, a weight or a tie that went wrong shows here: in sums of at most a few hundred
    # numbers, another order leaves twelve digits of float64 as they were.
    largest = max(1.0, worst(stock_64))
    for a, b in zip(ours_64, stock_64, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * largest)
    # As close to float64 as stock. A factor of 2 for the luck of single roundings, and a few of
    # those of the largest number: gradients of biases and scalars add up such, which nearly cancel.
    room = 16 * torch.finfo(torch.float32).eps / 2 * largest
    for a, b, exact in zip(ours, stock, stock_64, strict=True):
        assert a.dtype is b.dtype
        assert a.shape == b.shape
        assert worst([a - exact]) <= 2 * worst([b - exact]) + room
    # The second time, plans and normalisations come from the cache.
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))

    assert mark_of(report) == MARKS.get(case.name), f"{case.name}: {REMEDY}\n{report}"


def test_table_has_every_layer_that_pyg_exports():
    cases = [case.layer for case in CASES]
    assert {*cases, *UNAVAILABLE} == set(conv.__all__)
    assert not set(cases) & set(UNAVAILABLE)
    first = [case for case in CASES if not case.option]
    assert [case.layer for case in first] == list(dict.fromkeys(cases)), "one case has no option"
    assert list(MARKS) == [case.name for case in CASES], REMEDY


MAKE_UNAVAILABLE = {
    "CuGraphSAGEConv": lambda: conv.CuGraphSAGEConv(2, 2),
    "CuGraphGATConv": lambda: conv.CuGraphGATConv(2, 2),
    "CuGraphRGCNConv": lambda: conv.CuGraphRGCNConv(2, 2, 2),
    "FusedGATConv": lambda: conv.FusedGATConv(2, 2, add_self_loops=False),
    "PANConv": lambda: conv.PANConv(2, 2, 1)(torch.ones(2, 2), torch.tensor([[0], [1]])),
}


@pytest.mark.parametrize("layer", UNAVAILABLE)
def test_layers_that_cannot_run_here_say_so(layer):
    package = UNAVAILABLE[layer].partition(",")[0]
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed, and the table says that it cannot be had")
    package = package.replace("_", "[-_]")
    with edgeweave.pyg.accelerated(), pytest.raises(ImportError, match=rf"(?i){package}"):
        MAKE_UNAVAILABLE[layer]()


def run_all() -> dict[str, list[Tensor]]:
    return {c.name: run_case(c, FLOWS[0] if c.flows else None, torch.float64) for c in CASES}


def test_the_comparison_sees_wrong_edges(monkeypatch):
    """The guard of the tests above: edges that lead elsewhere change what is compared."""
    make = Inputs.make

    def bent() -> Inputs:
        inputs = make()
        for edges in (inputs.edges, inputs.simple, inputs.across, inputs.mesh):
            edges[0, 40:60] = edges[0, 40:60].roll(1)
        return inputs

    right = run_all()
    monkeypatch.setattr(Inputs, "make", staticmethod(bent))
    wrong = run_all()
    blind = {
        name
        for name, values in right.items()
        if worst([a - b for a, b in zip(values, wrong[name], strict=True)]) < 1e-6
    }
    assert blind == {"GravNetConv", "DynamicEdgeConv", "XConv"}, "these find their edges themselves"


def test_gradients_are_compared_of_all_inputs():
    """A gradient that is zero throughout would hide an error in it."""
    silent = [case.name for case in CASES if any(g.eq(0).all() for g in _input_gradients(case))]
    assert silent == []


def _input_gradients(case: Case) -> list[Tensor]:
    out = run_case(case, FLOWS[0] if case.flows else None, torch.float64)
    torch.manual_seed(0)
    parameters = len(list(case.make().parameters()))
    inputs = case.inputs(Inputs.make().leaves(torch.float64))
    features = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    end = len(out) - parameters
    return out[end - len(features) : end]


def test_the_page_of_the_documentation_is_up_to_date():
    reports = list_pyg_layers.measure()
    assert list_pyg_layers.PAGE.read_text() == list_pyg_layers.page(reports), REMEDY
    assert list_pyg_layers.MARKS.read_text() == list_pyg_layers.marks_file(reports), REMEDY
