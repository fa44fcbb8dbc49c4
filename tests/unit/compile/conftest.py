"""Graphs as Dynamo captures them, before and after the passes, and numbers against float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from edgeweave.compile import Rewrite, run_passes
from edgeweave.compile._reading import name_of


@dataclass
class Captured:
    """One graph, and what the passes did to it."""

    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    rewrites: list[Rewrite] = field(default_factory=list)
    again: list[Rewrite] = field(default_factory=list)
    module: Any = None


def names(module: torch.fx.GraphModule) -> Counter[str]:
    calls = (node for node in module.graph.nodes if node.op.startswith("call_"))
    return Counter(name_of(node) for node in calls)


def leaves_of(inputs: tuple[Any, ...], dtype: torch.dtype | None = None) -> list[Any]:
    return [
        t.detach().to(dtype or t.dtype).clone().requires_grad_()
        if isinstance(t, Tensor) and t.is_floating_point()
        else (t.clone() if isinstance(t, Tensor) else t)
        for t in inputs
    ]


def run(function: Callable[..., Any], inputs: tuple[Any, ...], dtype: Any = None) -> list[Tensor]:
    """Return the outputs, and the gradients of all floating inputs."""
    leaves = leaves_of(inputs, dtype)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype or usual)
    try:
        out = function(*leaves)
    finally:
        torch.set_default_dtype(usual)
    outs = [out] if isinstance(out, Tensor) else list(out)
    wanted = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(7)
    losses = [
        (o * torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)).sum()
        for o in outs
        if o.requires_grad
    ]
    grads = torch.autograd.grad(sum(losses), wanted, allow_unused=True) if losses else ()  # type: ignore[arg-type]
    return [o.detach() for o in outs] + [g for g in grads if g is not None]


def assert_close_to_float64(ours: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> None:
    """Check that ours is as far from float64 as eager's own distance, but for rounding."""
    assert len(ours) == len(eager) == len(exact)
    for mine, theirs, true in zip(ours, eager, exact, strict=True):
        assert mine.dtype is theirs.dtype
        assert mine.shape == theirs.shape
        if not theirs.is_floating_point():
            assert torch.equal(mine, theirs)
            continue
        scale = max(1.0, float(true.abs().max())) if true.numel() else 1.0
        # Sums of up to a hundred terms in another order: a few units in the last place.
        limit = 32 * torch.finfo(mine.dtype).eps * scale
        off = (theirs.double() - true).abs().max() if true.numel() else torch.zeros(())
        torch.testing.assert_close(
            mine.double(), true.double(), rtol=0, atol=limit + 4 * float(off)
        )


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        yield
    torch._dynamo.reset()


@pytest.fixture
def rewrite() -> Callable[..., Captured]:
    """Return a function that captures, rewrites twice, runs, and compares with eager.

    The second run of the passes must find nothing. Outputs and gradients of the rewritten graph
    are compared with eager's and with float64.
    """

    def do(
        function: Callable[..., Any],
        *inputs: Any,
        dynamic: bool | None = None,
        exact: bool = True,
        without: tuple[str, ...] = (),
    ) -> Captured:
        found = Captured()

        def backend(module: torch.fx.GraphModule, example: list[Any]) -> Any:
            found.before = names(module)
            found.rewrites = run_passes(module, without)
            found.inputs = example
            found.after, found.module = names(module), module
            found.again = run_passes(module, without)
            return module

        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
        ours, eager = run(compiled, inputs), run(function, inputs)
        assert found.again == []
        assert names(found.module) == found.after
        if exact:
            assert_close_to_float64(ours, eager, run(function, inputs, torch.float64))
        return found

    return do
