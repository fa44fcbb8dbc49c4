"""Running the cases of `_every_layer.py`, and reading off what ran on edgeweave's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch_geometric.typing
from _every_layer import Case
from _layer_inputs import Inputs
from torch import Tensor, nn
from torch_geometric.nn.conv import spline_conv

import edgeweave.pyg

FLOWS = ("source_to_target", "target_to_source")


def run_case(
    case: Case,
    flow: str | None,
    dtype: torch.dtype,
    alter: Callable[[nn.Module, Inputs], tuple[nn.Module, Inputs]] | None = None,
    inputs: Inputs | None = None,
    weigh: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Build and call the layer of a case, always from the same numbers.

    Args:
        case: What to run.
        flow: Flow of the layer, None for the layer's own.
        dtype: Of parameters and features; the float64 ones are the float32 ones widened.
        alter: Changes the layer and its inputs before the call.
        inputs: Others than the usual ones.
        weigh: Gives the cotangent of an output; default `cotangent`.

    Returns:
        Outputs, then the gradients of inputs and parameters for a fixed cotangent.
    """
    torch.manual_seed(0)
    layer = case.make(**({} if flow is None else {"flow": flow})).to(dtype)
    inputs = (inputs or Inputs.make()).leaves(dtype)
    if alter is not None:
        layer, inputs = alter(layer, inputs)
    outputs, leaves = call_case(case, layer, inputs, dtype)
    total = [(out * (weigh or cotangent)(out)).sum() for out in outputs if out.requires_grad]
    if total:
        torch.stack(total).sum().backward()
    gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    return [out.detach() for out in outputs] + gradients


def call_case(
    case: Case, layer: nn.Module, inputs: Inputs, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Call a layer.

    Args:
        case: What is called.
        layer: What its `make` made.
        inputs: From which the case picks.
        dtype: The default one during the call: MeshCNNConv makes its messages in it.

    Returns:
        The outputs, and the leaves they were computed from: inputs, then parameters.
    """
    arguments = case.inputs(inputs)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        result = case.call(layer, *arguments) if case.call else layer(*arguments)
    finally:
        torch.set_default_dtype(before)
    leaves = [leaf for leaf in _tensors(arguments) if leaf.requires_grad]
    return list(_tensors(result)), leaves + [p for p in layer.parameters() if p.requires_grad]


def cotangent(out: Tensor) -> Tensor:
    """Return numbers from -1 to 1 in the shape of `out`, the same in each dtype.

    In no order: where they rise from node to node, a sum over edges in the order of their nodes
    runs far off before it comes back, and rounds more than one in any other order.
    """
    order = torch.randperm(out.numel(), generator=torch.Generator().manual_seed(0))
    return torch.linspace(-1, 1, out.numel())[order].to(out.dtype).view_as(out)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def mark_of(report: edgeweave.pyg.Report) -> str:
    """Say how much of what was reported ran on edgeweave's kernels.

    Args:
        report: Of one case.

    Returns:
        `fused`: a layer ran as one, and nothing fell back. `passed`: nothing ran on our kernels.
        `partly`: anything between.
    """
    fused = [entry.site for entry in report.sites if entry.fused]
    if not fused:
        return "passed"
    if any(map(is_layer, fused)) and not any(entry.fell_back for entry in report.sites):
        return "fused"
    return "partly"


def is_layer(site: str) -> bool:
    """Return whether a site of the report is a layer, not a function that layers call."""
    return site != "gcn_norm" and not site.startswith("utils.") and not site.endswith("Aggregation")


# ---- what pyg_lib would bring ------------------------------------------------------------------


def _knn(x: Tensor, y: Tensor, ptr_x: object, ptr_y: object, k: int, *_: object) -> Tensor:
    """Return the k nearest of `x` for each of `y`, `[2, k * len(y)]`, rows of `y` first."""
    assert ptr_x is None, "the stand-in knows one example only"
    assert ptr_y is None, "the stand-in knows one example only"
    nearest = torch.cdist(x.detach().double(), y.detach().double()).topk(k, dim=0, largest=False)
    columns = nearest.indices.t().reshape(-1)
    return torch.stack([torch.arange(len(y)).repeat_interleave(k), columns])


def _spline_basis(attr: Tensor, sizes: Tensor, _open: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """Return the products of hat functions around each point, and their numbers."""
    assert degree == 1, "the stand-in knows hat functions only"
    place = attr * (sizes - 1)
    low = place.detach().floor().minimum(sizes - 2)
    part = place - low
    values = [attr.new_ones(len(attr))]
    numbers = [torch.zeros(len(attr), dtype=torch.long)]
    stride = 1
    for axis, size in enumerate(sizes.tolist()):
        ends = ((1 - part[:, axis], low[:, axis]), (part[:, axis], low[:, axis] + 1))
        values = [v * share for v in values for share, _ in ends]
        numbers = [n + stride * at.long() for n in numbers for _, at in ends]
        stride *= size
    return torch.stack(values, dim=1), torch.stack(numbers, dim=1)


def _spline_weighting(x: Tensor, weight: Tensor, basis: Tensor, numbers: Tensor) -> Tensor:
    """Return `sum_s basis[:, s] * (x @ weight[numbers[:, s]])`."""
    # Not weight[numbers], whose backward adds in an order that changes from run to run.
    picked = weight.index_select(0, numbers.reshape(-1)).view(*numbers.shape, *weight.shape[1:])
    return torch.einsum("es,ei,esio->eo", basis, x, picked)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Lend PyG simple stand-ins for the functions of `pyg_lib` that four of its layers call.

    `pyg_lib` is not on the package index. What it computes for these layers is the graph, or the
    message of an edge; everything around that is PyG's own code, and is what is compared.
    """
    lent = [
        mock.patch.object(torch_geometric.typing, "WITH_KNN", True),
        mock.patch.object(torch.ops.pyg, "knn", _knn, create=True),
        mock.patch.object(spline_conv, "spline_basis", _spline_basis),
        mock.patch.object(spline_conv, "spline_weighting", _spline_weighting),
    ]
    for patch in lent:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(lent):
            patch.stop()
