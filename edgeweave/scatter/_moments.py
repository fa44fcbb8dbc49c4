"""`var`, `std` and `multi_reduce`: reductions that share one pass over the entries."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._checks import describe, normalize_reduce
from .._plan._compiled import must_trace
from .._plan._multi import multi_messages, plan_multi
from .._plan._traced import multi_op
from ._groups import check_floating, groups_of_index

__all__ = ["multi_reduce", "std", "var"]


def multi_reduce(
    src: Tensor,
    index: Tensor,
    reduces: Sequence[str],
    dim: int = 0,
    dim_size: int | None = None,
    correction: int = 1,
) -> tuple[Tensor, ...]:
    """Several reductions of the entries that share an index, in one pass over them.

    What PNA and other aggregators need: `src` is read once forward and once backward, however many
    reductions there are.

    Args:
        src: Values, `[..., E, ...]` with E along `dim`; floating point, any strides.
        index: Slot of each entry, int32 or int64: `[E]`, or of src's rank and expanding to it by
            dimensions of size 1 or stride 0.
        reduces: Which ones, each once: "sum", "mean", "amax", "amin", "var", "std"; "add", "max"
            and "min" mean the same.
        dim: The dimension to reduce along.
        dim_size: Number of slots; None means `index.max() + 1`.
        correction: "var" and "std" divide by `max(count - correction, 1)`, as `torch.var` but for
            slots with too few entries: 0 rather than NaN.

    Returns:
        One tensor `[..., dim_size, ...]` per name, in src's dtype; 0 where a slot has no entries.
        Ties of amax and amin share a gradient evenly; "std" has the gradient 0 where it is 0.
        Bitwise the same for any number of threads.

    Raises:
        IndexError: If an index is outside `[0, dim_size)`.
        ValueError: If shapes or `reduces` do not fit.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import multi_reduce
        >>> src = torch.tensor([1.0, 3.0, 5.0])
        >>> multi_reduce(src, torch.tensor([0, 0, 1]), ["mean", "max", "var"])
        (tensor([2., 5.]), tensor([3., 5.]), tensor([2., 0.]))
    """
    return _run("multi_reduce", src, index, _names(reduces), dim, dim_size, correction)


def var(
    src: Tensor,
    index: Tensor,
    dim: int = 0,
    dim_size: int | None = None,
    correction: int = 1,
) -> Tensor:
    """Variance of the entries that share an index.

    `out[i] = sum((src[e] - mean[i])^2) / max(count[i] - correction, 1)`

    Args:
        src: Values, `[..., E, ...]` with E along `dim`; floating point, any strides.
        index: Slot of each entry, as in `multi_reduce`.
        dim: The dimension to reduce along.
        dim_size: Number of slots; None means `index.max() + 1`.
        correction: 1 for the unbiased variance, 0 for the population's.

    Returns:
        `[..., dim_size, ...]` in src's dtype; 0 where a slot has no entries.

    Raises:
        IndexError: If an index is outside `[0, dim_size)`.
        ValueError: If shapes do not fit.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import var
        >>> var(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]))
        tensor([2., 0.])
    """
    return _run("var", src, index, ("var",), dim, dim_size, correction)[0]


def std(
    src: Tensor,
    index: Tensor,
    dim: int = 0,
    dim_size: int | None = None,
    correction: int = 1,
) -> Tensor:
    """Standard deviation of the entries that share an index: the square root of `var`.

    Args:
        src: Values, `[..., E, ...]` with E along `dim`; floating point, any strides.
        index: Slot of each entry, as in `multi_reduce`.
        dim: The dimension to reduce along.
        dim_size: Number of slots; None means `index.max() + 1`.
        correction: 1 for the unbiased variance, 0 for the population's.

    Returns:
        `[..., dim_size, ...]` in src's dtype; 0, with the gradient 0, where a slot's entries are
        all equal, or where it has none.

    Raises:
        IndexError: If an index is outside `[0, dim_size)`.
        ValueError: If shapes do not fit.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import std
        >>> std(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]), correction=0)
        tensor([1., 0.])
    """
    return _run("std", src, index, ("std",), dim, dim_size, correction)[0]


def _names(reduces: Sequence[str]) -> tuple[str, ...]:
    if isinstance(reduces, str) or not isinstance(reduces, Sequence) or len(reduces) == 0:
        raise ValueError(
            "multi_reduce: reduces must be a list of at least one name, got "
            f"{describe(reduces)}; for one reduction use scatter_reduce"
        )
    names = []
    for name in reduces:
        if name in ("var", "std"):
            names.append(name)
            continue
        try:
            names.append(normalize_reduce("multi_reduce", name))
        except ValueError:
            raise ValueError(
                "multi_reduce: reduces must name sum, mean, amax, amin, var or std (or add, max, "
                f"min), got {name!r}"
            ) from None
    if len(set(names)) < len(names):
        raise ValueError(f"multi_reduce: reduces must name each once, got {list(reduces)}")
    return tuple(names)


def _run(
    op: str,
    src: Tensor,
    index: Tensor,
    names: tuple[str, ...],
    dim: int,
    dim_size: int | None,
    correction: int,
) -> tuple[Tensor, ...]:
    if not isinstance(correction, int) or isinstance(correction, bool):
        raise TypeError(f"{op}: correction must be an integer, got {describe(correction)}")
    if correction < 0:
        raise ValueError(f"{op}: correction must not be negative, got {correction}")
    g = groups_of_index(op, src, index, dim_size, dim)
    check_floating(op, src)
    if g.plan is not None:
        made = plan_multi(g.plan, g.src, names, correction)
    elif must_trace(src):
        made = multi_op(g.src, g.groups(), g.num_groups, names, correction)
    else:
        made = multi_messages(g.src, g.groups(), g.num_groups, names, correction)
    return tuple(g.per_group(out) for out in made)
