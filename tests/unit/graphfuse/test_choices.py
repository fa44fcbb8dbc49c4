"""Whatever a measurement may choose, the model is computed, and rightly.

Which calls run in partitions, in ATen, in torch's own libraries or on tiles depends on the clock.
Here it is drawn instead.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeweave import graphfuse

_DRAWS = 40


class Decoder(nn.Module):
    """Layers that attend to the same normalised memory, as those of a decoder do."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.side = nn.Linear(width, width)
        self.own = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.q = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.k = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.v = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, memory: Tensor, x: Tensor) -> Tensor:
        memory = self.norm(memory + 1.0)
        x = x + F.gelu(self.side(memory)).mean(1, keepdim=True)
        for own, q, k, v, up, down in zip(
            self.own, self.q, self.k, self.v, self.up, self.down, strict=True
        ):
            heads = [
                y.view(*y.shape[:2], 4, -1).transpose(1, 2)
                for y in (q(own(x)), k(memory), v(memory))
            ]
            seen = F.scaled_dot_product_attention(*heads)
            x = x + seen.transpose(1, 2).reshape(x.shape)
            x = x + down(F.gelu(up(x)))
        return x


def _options(engine: Any) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """How each product can run outside of partitions, and what that covers."""
    found: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for tiles in (False, True):
        for name, call in engine.packed_calls({}, tiles=tiles).items():
            variants = ("tiles", "vectors") if tiles else ("inside", "apart", "mkl")
            ways = [(v, call.nodes) for v in variants if v in call.variants]
            found.setdefault(name, []).extend(ways)
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_every_choice_computes_the_model(dtype: torch.dtype | None) -> None:
    torch.manual_seed(3)
    model = Decoder().eval()
    inputs = torch.randn(2, 9, 64), torch.randn(2, 7, 64)
    fused = graphfuse.fuse(model, inputs, dtype=dtype, keep="all")
    (engine,) = fused._engines
    with torch.no_grad():
        exact = model.double()(*(x.double() for x in inputs))
        model.float()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            eager = model(*inputs)
    # Other places to round in: a few times eager's own distance.
    limit = 4 * float((eager.double() - exact).abs().max()) + 1e-6
    names, options = [node.name for node in engine.nodes], _options(engine)
    assert options
    draw = random.Random(0)
    kinds = set()
    for _ in range(_DRAWS):
        apart, packed = draw.choice((0.0, 0.1, 0.6, 1.0)), draw.random()
        chosen = {n: draw.choice(ways) for n, ways in options.items() if draw.random() < packed}
        engine.packed = {name: how for name, (how, _) in chosen.items()}
        engine.forced = {n: "in this test" for n in names if draw.random() < apart}
        for _, covered in chosen.values():
            engine.forced.update(dict.fromkeys(covered, "in this test"))
        engine.drop_plans()
        out = fused(*inputs)
        assert out.dtype == eager.dtype
        assert float((out.double() - exact).abs().max()) <= limit
        plan = engine.plan({})
        kinds.add((bool(plan.segments), bool(plan.packed)))
    assert {(True, True), (False, True)} <= kinds  # with partitions and without
    assert not fused.report().eager_calls
