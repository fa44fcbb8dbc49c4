"""Edge sets and comparisons of the tests on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor


def random_edges(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> Tensor:
    """Return unsorted edges with duplicates whose last destination and last source are isolated."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [
            torch.randint(0, max(num_src - 1, 1), (num_edges,), generator=generator),
            torch.randint(0, max(num_dst - 1, 1), (num_edges,), generator=generator),
        ]
    )


def hub_edges(nodes: int = 12, hub: int = 2500, rest: int = 60) -> Tensor:
    """Return edges of which `hub` go into node 3, and as many out of node 5: rows in chunks."""
    edges = random_edges(nodes, nodes, 2 * hub + rest)
    edges[1, :hub] = 3
    edges[0, hub : 2 * hub] = 5
    return edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(1))]


def leaf_of(values: Tensor, device: str) -> Tensor:
    """Return a copy on a device that records gradients, whatever the original is used for."""
    return values.detach().clone().to(device).requires_grad_()


def close(ours: Tensor, exact: Tensor, units: float = 8.0) -> None:
    """Compare with a float64 result: some units of the dtype, of the largest entry of each row."""
    ours = ours.detach().cpu().double()
    assert ours.shape == exact.shape
    missing = exact.isnan()
    assert torch.equal(ours.isnan(), missing)
    scale = exact.nan_to_num().abs()
    row = scale.amax(-1, keepdim=True) if scale.dim() and scale.shape[-1] else scale
    scale = row + (scale.mean() if scale.numel() else 0)
    wrong = (ours - exact).nan_to_num().abs() > units * scale + 1e-300
    if bool(wrong.any()):
        worst = float((ours - exact).nan_to_num().abs().max())
        where = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} off by up to {worst:.3g}, first at {where}: "
            f"got {float(ours[tuple(where)])}, expected {float(exact[tuple(where)])}"
        )


def tolerance(dtype: torch.dtype) -> float:
    """Return what `close` allows: sums of some dozen terms, rounded once to the dtype."""
    return {
        torch.float64: 1e-13,
        torch.float32: 1e-5,
        torch.float16: 2e-3,
        torch.bfloat16: 1.6e-2,
    }[dtype]
