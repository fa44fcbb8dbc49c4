"""Checks of arguments that several rooms share.

Each raises with the argument, the rule and what came.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

__all__ = [
    "FLOAT_DTYPES",
    "INDEX_DTYPES",
    "REDUCE_CODES",
    "check_count",
    "check_features",
    "check_index_dtype",
    "check_ties",
    "describe",
    "normalize_dim",
    "normalize_reduce",
]

MOST_NODES: Final = 1 << 46  # as csrc/ops/plan.cpp
INDEX_DTYPES: Final = (torch.int32, torch.int64)
FLOAT_DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGER_DTYPES: Final = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

# Codes of csrc/kernels/args.h (enum Reduce), under torch's, PyG's and torch_scatter's spellings.
REDUCE_CODES: Final[dict[str, int]] = {"sum": 0, "mean": 1, "amax": 2, "amin": 3}
_SPELLINGS: Final[dict[str, str]] = {
    "sum": "sum",
    "add": "sum",
    "mean": "mean",
    "amax": "amax",
    "max": "amax",
    "amin": "amin",
    "min": "amin",
}
_PROD_SPELLINGS: Final = ("prod", "mul")
_CONTAINERS: Final = (list, tuple, dict, set, frozenset)
_short: Final = reprlib.Repr()


def describe(value: object) -> str:
    """A short description of what came, for error messages."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    # Shortened: a list or an array of a million entries must not become the message.
    text = _short.repr(value) if isinstance(value, _CONTAINERS) else repr(value)
    if len(text) > 200:
        text = f"{text[:200]}..."
    return f"{type(value).__name__} {text}"


def normalize_reduce(op: str, reduce: str, *, prod: bool = False) -> str:
    """The torch spelling of `reduce`: sum, mean, amax, amin, or (where `prod`) prod."""
    try:
        if prod and reduce in _PROD_SPELLINGS:
            return "prod"
        return _SPELLINGS[reduce]
    except (KeyError, TypeError):
        names = "sum, mean, amax, amin" + (", prod" if prod else "")
        others = "add, max, min" + (", mul" if prod else "")
        raise ValueError(
            f"{op}: reduce must be one of {names} (or {others}), got {reduce!r}"
        ) from None


def check_ties(op: str, ties: str) -> None:
    """`ties` must be "even" or "first"."""
    if ties not in ("even", "first"):
        raise ValueError(f"{op}: ties must be 'even' or 'first', got {ties!r}")


def check_index_dtype(op: str, name: str, index: object) -> None:
    """`index` must be a dense int32 or int64 tensor."""
    if not isinstance(index, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {describe(index)}")
    if index.layout is not torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got layout {index.layout}")
    if index.dtype not in INDEX_DTYPES:
        raise TypeError(
            f"{op}: {name} must be int32 or int64, got {index.dtype}; convert it with .long()"
        )


def check_count(op: str, count: object) -> None:
    """A number of nodes or slots must be one that a machine could hold."""
    if isinstance(count, int) and count > MOST_NODES:
        raise ValueError(f"{op}: number of nodes must be at most 2^46, got {count}")


def check_features(op: str, name: str, x: object) -> None:
    """`x` must be a dense tensor of a dtype that has kernels."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {describe(x)}")
    if x.layout is not torch.strided:
        raise TypeError(
            f"{op}: {name} must be a dense tensor, got layout {x.layout}; "
            "convert it with .to_dense()"
        )
    if x.dtype not in FLOAT_DTYPES and x.dtype not in INTEGER_DTYPES:
        raise TypeError(
            f"{op}: {name} must be float32, float64, bfloat16, float16 or an integer type, "
            f"got {x.dtype}"
        )


def normalize_dim(op: str, dim: int, rank: int) -> int:
    """`dim` as a non-negative number."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{op}: dim must be an integer, got {describe(dim)}")
    if not -rank <= dim < rank:
        raise IndexError(f"{op}: dim must be in [{-rank}, {rank}), got {dim}")
    return dim % rank


def shape_text(shape: Sequence[object]) -> str:
    """`[E, F]`-like text of a shape."""
    return "[" + ", ".join(str(s) for s in shape) + "]"
