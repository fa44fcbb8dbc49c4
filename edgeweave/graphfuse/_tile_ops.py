"""Calls of edgeweave's own dense kernels (`csrc/dense`), as a plan makes them."""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from .._fx._simplify import OWN_OPERATORS
from .._native import ops, release

__all__ = [
    "ACTIVATIONS",
    "ATTENTION",
    "LINEAR",
    "NORM",
    "OWN",
    "TiledWeight",
    "activate",
    "has_vectors",
    "is_available",
    "tiled_attention",
    "tiled_linear",
    "tiled_norm",
]

# The variants of `PackedCall` that run here: bf16 on AMX tiles, and fp32 on vectors.
OWN = ("tiles", "vectors")
# As csrc/dense/dense.h numbers them.
ACTIVATIONS = {"relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "sigmoid": 5, "tanh": 6}
LINEAR = "edgeweave.tiled_linear.default"
ATTENTION = "edgeweave.tiled_attention.default"
NORM = "edgeweave.tiled_norm.default"


class TiledWeight:
    """A weight in the order of the kernel that reads it, with its bias.

    Args:
        weight: `[out, in]`, any strides.
        bias: `[out]`, or None.
        dtype: What the weight is kept in: bf16 for tiles, fp32 for vectors.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        if bias is not None:
            bias = bias.detach()
        self.on_tiles = dtype == torch.bfloat16
        pack, free = (
            (ops.dense_pack, ops.dense_release)
            if self.on_tiles
            else (ops.dense_pack_floats, ops.dense_release_floats)
        )
        self.handle: int = pack(weight.detach().to(dtype), bias)
        weakref.finalize(self, release, free, self.handle)

    def __deepcopy__(self, memo: dict[int, object]) -> TiledWeight:
        return self  # it never changes, and only one owner may free it

    def __reduce__(self) -> NoReturn:
        raise TypeError("a packed weight cannot be pickled: it is memory of this process")


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether the processor has AMX and the system lets this process use it."""
    return bool(ops.dense_available())


@lru_cache(maxsize=1)
def has_vectors() -> bool:
    """Whether the processor has vectors wide enough for products of fp32 to be worth a try."""
    return bool(ops.dense_floats_available())


def tiled_linear(
    value: Tensor,
    weight: TiledWeight,
    other: Tensor | None,
    activation: int,
    combine: int,
    wide: bool,
) -> Tensor:
    """Multiply on tiles, or on vectors by a weight that is packed for them.

    Args:
        value: fp32 or bf16 `[..., in]`; fp32 for vectors.
        weight: Packed, with its bias.
        other: fp32 or bf16 `[..., out]`, what is added or multiplied at the end; or None.
        activation: Its number in `csrc/dense/dense.h`, applied before that.
        combine: 0, or 1 to add `other`, or 2 to multiply by it.
        wide: Whether the result is fp32 rather than bf16, as it always is on vectors.

    Returns:
        `[..., out]`.
    """
    value = value if value.is_contiguous() else value.contiguous()
    if other is not None and not other.is_contiguous():
        other = other.contiguous()
    if not weight.on_tiles:
        other = None if other is None else other.float()
        made: Tensor = ops.dense_linear_floats(value, weight.handle, other, activation, combine)
        return made
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
