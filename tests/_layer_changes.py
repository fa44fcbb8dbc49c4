"""What comes of a change to a layer or its inputs, in stock PyG and accelerated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _every_layer import CASES, Case
from _layer_inputs import Inputs
from _layer_marks import MARKS
from _layer_runs import run_case
from torch import Tensor, nn

import edgeweave.pyg

# Those that run fused: the others are PyG's own code around functions that have their own tests.
FUSED = [case for case in CASES if MARKS[case.name] == "fused"]
LAYERS = [case for case in FUSED if not case.option]
EXACT = {"rtol": 1e-11, "atol": 1e-11}  # float64 sums in another order
Alter = Callable[[nn.Module, Inputs], tuple[nn.Module, Inputs]]
Outcome = list[Tensor] | type[Exception]


def unchanged(layer: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Change nothing."""
    return layer, inputs


def outcome(case: Case, alter: Alter = unchanged) -> Outcome:
    """Return outputs and gradients in float64, or the type of the error."""
    try:
        return run_case(case, None, torch.float64, alter)
    except Exception as error:
        return type(error)


def same(ours: Outcome, stock: Outcome, what: str = "") -> None:
    """Assert that both raise the same, or give the same."""
    if isinstance(stock, type) or isinstance(ours, type):
        assert ours is stock, what
        return
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, **EXACT, msg=lambda text: f"{what}: {text}")


def compare(case: Case, alter: Alter) -> Outcome:
    """Compare what comes of a change with what comes of it in stock PyG; returns the latter."""
    return compare_all(case, {"": alter})[""]


def compare_all(case: Case, changes: dict[str, Alter]) -> dict[str, Outcome]:
    """Do so for several changes: it takes longer to patch PyG than to call a layer."""
    stock = {what: outcome(case, alter) for what, alter in changes.items()}
    with edgeweave.pyg.accelerated():
        ours = {what: outcome(case, alter) for what, alter in changes.items()}
    for what in changes:
        same(ours[what], stock[what], what)
    return stock
