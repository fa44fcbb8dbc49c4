"""What people do to layers, done to every layer: with and without us, the same comes of it.

If stock PyG raises, so must we; if it computes, we compute the same.
"""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from _every_layer import Case
from _layer_changes import LAYERS, Alter, compare, compare_all, outcome, same
from _layer_inputs import EDGES, NODES, Inputs
from _layer_runs import call_case, stand_ins
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import to_torch_csr_tensor

import edgeweave.pyg

# Sparse adjacencies and what stock PyG does with them bring warnings of their own.
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


def message_passing(layer: nn.Module) -> list[MessagePassing]:
    return [module for module in layer.modules() if isinstance(module, MessagePassing)]


# ---- the layer ---------------------------------------------------------------------------------


def saved(layer: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved,
}


@of_each(LAYERS)
def test_copies(case):
    """Copies made before, while and after, of layers that have been called."""

    def copied(how: str) -> Alter:
        def alter(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
            call_case(case, layer, inputs, torch.float64)
            torch.manual_seed(0)
            return COPIES[how](layer), inputs

        return alter

    stock = compare_all(case, {how: copied(how) for how in COPIES})
    assert not any(isinstance(found, type) for found in stock.values())
    with edgeweave.pyg.accelerated():
        torch.manual_seed(0)
        layer = case.make()
        call_case(case, layer, Inputs.make(), torch.float32)
        text = pickle.dumps(layer)
    assert b"edgeweave" not in text
    assert pickle.loads(text).state_dict().keys() == layer.state_dict().keys()


class Calls:
    """A hook that counts, and changes what it sees where it may."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: object) -> object:
        self.count += 1
        out = args[-1]
        return 2 * out if isinstance(out, Tensor) else None


HOOKS = (
    "propagate_forward_pre",
    "propagate_forward",
    "message_forward_pre",
    "message_forward",
    "aggregate_forward_pre",
    "aggregate_forward",
    "edge_update_forward",
)


@of_each(LAYERS)
def test_message_passing_hooks(case):
    calls: dict[str, list[Calls]] = {hook: [] for hook in HOOKS}

    def hooked(hook: str) -> Alter:
        def alter(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
            calls[hook].append(Calls())
            for module in message_passing(layer):
                getattr(module, f"register_{hook}_hook")(calls[hook][-1])
            return layer, inputs

        return alter

    compare_all(case, {hook: hooked(hook) for hook in HOOKS})
    counts = {hook: [run.count for run in runs] for hook, runs in calls.items()}
    assert {hook: ours for hook, (_, ours) in counts.items()} == {
        hook: stock for hook, (stock, _) in counts.items()
    }
    assert counts["propagate_forward"][0] > 0


@of_each(LAYERS)
def test_hooks_of_all_modules(case):
    """Forward hooks on every part of the layer, as profilers and summaries set them."""
    calls: list[list[str]] = []

    def alter(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        seen: list[str] = []
        calls.append(seen)
        layer = copy.deepcopy(layer)  # some activations are defaults that all layers share
        for name, module in layer.named_modules():
            module.register_forward_hook(lambda *_, n=name, s=seen: s.append(n))
        return layer, inputs

    compare(case, alter)
    stock, ours = calls
    assert ours == stock


@of_each(LAYERS)
def test_explain(case):
    """A mask over the edges, as `torch_geometric.explain` sets it, scales the messages."""

    def alter(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(3)
        for module in message_passing(layer):
            module.explain = True
            module._edge_mask = torch.rand(EDGES, dtype=torch.float64)
            module._loop_mask = inputs.edges[0] != inputs.edges[1]
            module._apply_sigmoid = True
        return layer, inputs

    explained = compare(case, alter)
    plain = outcome(case)
    if message_passing(case.make()) and not isinstance(explained, type):
        assert not all(map(torch.equal, explained, plain)), "the mask changes nothing"


@of_each(LAYERS)
def test_decomposed_layers(case):
    def alter(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        for module in message_passing(layer):
            module.decomposed_layers = 2
        return layer, inputs

    compare(case, alter)


@of_each(LAYERS)
def test_subclass_with_its_own_message(case):
    """Twice the message of the layer: somebody's `message` is never passed over."""

    def alter(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        cls = type(layer)
        inherited = getattr(cls, "message", None)
        if inherited is None:
            return layer, inputs

        @functools.wraps(inherited)
        def message(self, *args, **kwargs):
            return 2 * inherited(self, *args, **kwargs)

        own = type(f"Own{cls.__name__}", (cls,), {"message": message, "__module__": __name__})
        torch.manual_seed(0)
        made = own.__new__(own)
        made.__dict__.update(layer.__dict__)
        made.inspector = copy.copy(layer.inspector)
        own._set_jittable_templates(made)
        return made, inputs

    doubled = compare(case, alter)
    plain = outcome(case)
    if hasattr(type(case.make()), "message") and not isinstance(doubled, type):
        assert not all(map(torch.equal, doubled, plain)), "the message was passed over"


@of_each(LAYERS)
def test_parameters_that_are_frozen(case):
    """Hand-written backward passes are asked for some gradients only."""

    def features(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        return layer.requires_grad_(False), inputs

    def parameters(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        return layer, inputs.detached()

    def every_other(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        for i, parameter in enumerate(layer.parameters()):
            parameter.requires_grad_(i % 2 == 0)
        return layer, inputs

    alters = (features, parameters, every_other)
    stock = compare_all(case, {alter.__name__: alter for alter in alters})
    assert not any(isinstance(found, type) for found in stock.values())


# ---- the edges ---------------------------------------------------------------------------------


def with_edges(change: Callable[[Tensor], Tensor]) -> Alter:
    return lambda layer, inputs: (layer, replace(inputs, edges=change(inputs.edges)))


def as_csr(edges: Tensor) -> Tensor:
    """The transposed adjacency, as PyG's layers take it."""
    distinct = torch.unique(edges, dim=1)
    return to_torch_csr_tensor(distinct.flip(0), size=(NODES, NODES)).double()


EDGE_FORMS = {
    "EdgeIndex": lambda e: EdgeIndex(e, sparse_size=(NODES, NODES)),
    "sorted EdgeIndex": lambda e: EdgeIndex(e, sparse_size=(NODES, NODES)).sort_by("col").values,
    "CSR": as_csr,
    "COO": lambda e: as_csr(e).to_sparse_coo(),
    "strided": lambda e: e.t().contiguous().t(),
    "reversed": lambda e: e.flip(1),
}


@of_each([case for case in LAYERS if case.flows])
def test_forms_of_edges(case):
    stock = compare_all(case, {form: with_edges(change) for form, change in EDGE_FORMS.items()})
    assert not isinstance(stock["strided"], type)
    assert not isinstance(stock["reversed"], type)


@of_each([case for case in LAYERS if case.flows])
def test_sparse_tensor(case):
    pytest.importorskip("torch_sparse", reason="it has to be compiled for each torch")
    compare(case, with_edges(lambda e: SparseTensor.from_torch_sparse_csr_tensor(as_csr(e))))


@of_each([case for case in LAYERS if case.flows])
def test_int32_edges(case):
    """They give what int64 ones do; stock PyG raises in some layers, or computes nonsense."""
    plain = outcome(case)
    with edgeweave.pyg.accelerated():
        ours = outcome(case, with_edges(Tensor.int))
    same(ours, plain)


@of_each(LAYERS)
def test_no_edges(case):
    def alter(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        none = {
            name: getattr(inputs, name)[:, :0]
            for name in ("edges", "simple", "across", "negative", "mesh")
        }
        for name in ("attr", "weight"):
            none[name] = getattr(inputs, name).detach()[:0].requires_grad_()
        return layer, replace(inputs, edge_type=inputs.edge_type[:0], **none)

    compare(case, alter)


BAD = {"too large": NODES + 50, "negative": -1}


@of_each([case for case in LAYERS if case.flows])
def test_bad_index(case):
    """Where stock raises we raise; nothing is read out of bounds."""

    def bent(row: int, value: int) -> Alter:
        def bend(edges: Tensor) -> Tensor:
            edges = edges.clone()
            edges[row, 17] = value
            return edges

        def alter(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
            return layer, replace(inputs, edges=bend(inputs.edges), simple=bend(inputs.simple))

        return alter

    for row in (0, 1):
        for what, value in BAD.items():
            stock = outcome(case, bent(row, value))
            with edgeweave.pyg.accelerated():
                ours = outcome(case, bent(row, value))
            assert isinstance(ours, type) == isinstance(stock, type), f"row {row}, {what}"
            if not isinstance(stock, type):
                same(ours, stock)
