"""Modes of torch that a layer may be called in: with and without us, the same comes of it."""

import copy

import pytest
import torch
from _every_layer import Case
from _layer_changes import FUSED, LAYERS, Outcome, compare, outcome
from _layer_inputs import Inputs
from _layer_runs import call_case, cotangent, stand_ins
from torch import Tensor, nn

import edgeweave.pyg

# TorchScript and autocast bring warnings of torch and PyG of their own.
pytestmark = pytest.mark.filterwarnings("ignore")


def of_each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _what_pyg_lib_would_bring():
    with stand_ins():
        yield


@of_each(FUSED)
def test_second_derivatives(case):
    def derivatives(case: Case) -> Outcome:
        torch.manual_seed(0)
        layer = case.make().double()
        outputs, leaves = call_case(case, layer, Inputs.make().leaves(torch.float64), torch.float64)
        total = [(out * cotangent(out)).pow(2).sum() for out in outputs if out.requires_grad]
        if not total or not leaves:
            return []
        first = torch.autograd.grad(
            torch.stack(total).sum(), leaves, create_graph=True, allow_unused=True
        )
        bent = [(g * cotangent(g)).sum() for g in first if g is not None and g.requires_grad]
        if not bent:
            return []
        second = torch.autograd.grad(torch.stack(bent).sum(), leaves, allow_unused=True)
        return [
            torch.zeros_like(leaf) if g is None else g.detach()
            for g, leaf in zip(second, leaves, strict=True)
        ]

    stock = derivatives(case)
    with edgeweave.pyg.accelerated():
        ours = derivatives(case)
    for a, b in zip(ours, stock, strict=True):
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11 * scale)


@of_each(LAYERS)
def test_inference_mode_and_training_afterwards(case):
    def alter(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        before = copy.deepcopy(layer.state_dict())
        with torch.inference_mode():
            call_case(case, layer, inputs, torch.float64)
        layer.load_state_dict(before)  # running means of batch norms
        return layer, inputs

    assert not isinstance(compare(case, alter), type)


@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
@of_each(LAYERS)
def test_autocast(case):
    """The same dtypes as stock, and as near to float64."""

    def run() -> list[Tensor] | type[Exception]:
        torch.manual_seed(0)
        layer, inputs = case.make(), Inputs.make()
        try:
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                return call_case(case, layer, inputs, torch.float32)[0]
        except Exception as error:
            return type(error)

    exact = outcome(case)
    stock = run()
    with edgeweave.pyg.accelerated():
        ours = run()
    if isinstance(stock, type):
        # PyG mixes dtypes there and torch refuses; we may know better.
        return
    assert not isinstance(ours, type)
    for a, b, right in zip(ours, stock, exact, strict=False):
        assert a.dtype is b.dtype
        worst_a, worst_b = ((t.double() - right).abs().max().item() for t in (a, b))
        # Single roundings to bfloat16 may fall either way.
        assert worst_a <= 2 * worst_b + 2**-8 * right.double().abs().max().item()


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=GPU)])
@of_each(LAYERS)
def test_other_devices_pass_through(case, device):
    def shapes() -> list[tuple[object, ...]] | type[Exception]:
        torch.manual_seed(0)
        try:
            layer, inputs = case.make().to(device), Inputs.make().to(device)
            outputs, _ = call_case(case, layer, inputs, torch.float32)
        except Exception as error:
            return type(error)
        return [(out.shape, out.dtype, out.device.type) for out in outputs]

    stock = shapes()
    with edgeweave.pyg.accelerated():
        ours = shapes()
    assert ours == stock
    report = edgeweave.pyg.report()
    assert not any(entry.fused for entry in report.sites), report


@of_each(LAYERS)
def test_jit_script(case):
    """TorchScript compiles PyG's own code, or refuses it as it does without us."""

    def scripted() -> list[Tensor] | type[Exception]:
        torch.manual_seed(0)
        layer, inputs = case.make(), Inputs.make()
        try:
            return call_case(case, torch.jit.script(layer), inputs, torch.float32)[0]
        except Exception as error:
            return type(error)

    stock = scripted()
    with edgeweave.pyg.accelerated():
        ours = scripted()
    if isinstance(stock, type):
        assert ours is stock
    else:
        for a, b in zip(ours, stock, strict=True):
            assert torch.equal(a, b)
