"""Calls of edgeweave's own kernels on AMX tiles (`csrc/dense`), as a plan makes them."""

from __future__ import annotations

import weakref
from functools import lru_cache

import torch
from torch import Tensor

from .._fx._simplify import OWN_OPERATORS
from .._native import ops, release

__all__ = [
    "ACTIVATIONS",
    "ATTENTION",
    "LINEAR",
    "NORM",
    "TiledWeight",
    "activate",
    "is_available",
    "tiled_attention",
    "tiled_linear",
    "tiled_norm",
]

# As csrc/dense/amx.h numbers them.
ACTIVATIONS = {"relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "sigmoid": 5, "tanh": 6}
LINEAR = "edgeweave.tiled_linear.default"
ATTENTION = "edgeweave.tiled_attention.default"
NORM = "edgeweave.tiled_norm.default"


class TiledWeight:
    """A weight in the order of the tiles, with its bias.

    Args:
        weight: `[out, in]`, any strides; it is kept in bfloat16.
        bias: `[out]`, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        if bias is not None:
            bias = bias.detach()
        self.handle: int = ops.dense_pack(weight.detach().to(torch.bfloat16), bias)
        weakref.finalize(self, release, ops.dense_release, self.handle)


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether the processor has AMX and the system lets this process use it."""
    return bool(ops.dense_available())


def tiled_linear(
    value: Tensor,
    weight: TiledWeight,
    other: Tensor | None,
    activation: int,
    combine: int,
    wide: bool,
) -> Tensor:
    """Multiply on tiles.

    Args:
        value: fp32 or bf16 `[..., in]`.
        weight: Packed, with its bias.
        other: fp32 or bf16 `[..., out]`, what is added or multiplied at the end; or None.
        activation: Its number in `csrc/dense/amx.h`, applied before that.
        combine: 0, or 1 to add `other`, or 2 to multiply by it.
        wide: Whether the result is fp32 rather than bf16.

    Returns:
        `[..., out]`.
    """
    value = value if value.is_contiguous() else value.contiguous()
    if other is not None and not other.is_contiguous():
        other = other.contiguous()
    result: Tensor = ops.dense_linear(value, weight.handle, other, activation, combine, wide)
    return result


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    side_by_side: bool = True,
) -> Tensor:
    """Attend on tiles.

    Args:
        query: bf16 `[batch, heads, queries, width]`.
        key: bf16 `[batch, heads, keys, width]`.
        value: As `key`.
        mask: bool, fp32 or bf16, broadcast to `[batch, heads, queries, keys]`; or None.
        causal: Whether a query sees only the keys up to its own position.
        scale: What scores are multiplied by.
        side_by_side: Whether the heads of a query are neighbours in memory.

    Returns:
        bf16 `[batch, heads, queries, width]`.
    """
    parts = [t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)]
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    result: Tensor = ops.dense_attention(*parts, mask, causal, scale, side_by_side)
    return result


def tiled_norm(
    value: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, wide: bool
) -> Tensor:
    """Normalise rows.

    Args:
        value: fp32 or bf16 `[..., width]`.
        weight: fp32 `[width]`, or None.
        bias: fp32 `[width]`, or None.
        epsilon: Added to the variance.
        wide: Whether the result is fp32 rather than bf16.

    Returns:
        `[..., width]`.
    """
    value = value if value.is_contiguous() else value.contiguous()
    result: Tensor = ops.dense_norm(value, weight, bias, epsilon, wide)
    return result


def activate(value: Tensor, name: str) -> Tensor:
    """Apply an activation in place, on wide vectors.

    Args:
        value: fp32 or bf16, contiguous.
        name: A key of `ACTIVATIONS`.

    Returns:
        `value`.
    """
    ops.dense_activate(value, ACTIVATIONS[name])
    return value


OWN_OPERATORS[LINEAR] = tiled_linear
OWN_OPERATORS[ATTENTION] = tiled_attention
OWN_OPERATORS[NORM] = tiled_norm
