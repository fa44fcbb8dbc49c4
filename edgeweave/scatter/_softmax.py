"""`softmax` and `logsumexp` over groups of entries, such as the edges into each node."""

from __future__ import annotations

from torch import Tensor

from .._plan._compiled import must_trace
from .._plan._softmax import logsumexp_messages, plan_logsumexp, plan_softmax, softmax_messages
from .._plan._traced import logsumexp_op, softmax_op
from ._groups import Groups, check_floating, groups_of_index, groups_of_ptr

__all__ = ["logsumexp", "softmax"]


def softmax(
    src: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = 0,
) -> Tensor:
    """Softmax over the entries of `src` that share an index: attention over incoming edges.

    `out[e] = exp(src[e]) / sum(exp(src[f]) for f with index[f] == index[e])`

    The maximum of each group is subtracted first, so nothing overflows. Forward and backward are
    one fused kernel each.

    Args:
        src: Scores, `[..., E, ...]` with E along `dim` (`[E, H]` for H heads); floating point, any
            strides.
        index: Group of each entry, int32 or int64: `[E]`, or of src's rank and expanding to it by
            dimensions of size 1 or stride 0. Either this or `ptr`.
        ptr: `[G + 1]` int32 or int64: entries `ptr[g]` to `ptr[g + 1]` are group g.
        dim_size: Number of groups; None means `index.max() + 1`.
        dim: The dimension that entries are along.

    Returns:
        Like `src`. Within a group that holds a NaN or an infinity, or negative infinities alone,
        what `torch.softmax` gives: NaN. Computed in float32 at least; bitwise the same for any
        number of threads.

    Raises:
        IndexError: If an index is outside `[0, dim_size)`.
        ValueError: If shapes do not fit, or not exactly one of `index` and `ptr` is given.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import softmax
        >>> softmax(torch.tensor([1.0, 1.0, 5.0]), torch.tensor([0, 0, 1]))
        tensor([0.5000, 0.5000, 1.0000])
    """
    g = _groups("softmax", src, index, ptr, dim_size, dim)
    if g.plan is not None:
        return g.per_entry(plan_softmax(g.plan, g.src))
    run = softmax_op if must_trace(src) else softmax_messages
    return g.per_entry(run(g.src, g.groups(), g.num_groups))


def logsumexp(
    src: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = 0,
) -> Tensor:
    """Logarithm of the sum of exponentials of the entries that share an index.

    `out[i] = log(sum(exp(src[e]) for e with index[e] == i))`

    Args:
        src: Values, `[..., E, ...]` with E along `dim`; floating point, any strides.
        index: Group of each entry, as in `softmax`. Either this or `ptr`.
        ptr: `[G + 1]` int32 or int64: entries `ptr[g]` to `ptr[g + 1]` are group g.
        dim_size: Number of groups; None means `index.max() + 1`.
        dim: The dimension to reduce along.

    Returns:
        `[..., dim_size, ...]` in src's dtype; -inf where a group has no entries. Computed in
        float32 at least and rounded once; bitwise the same for any number of threads.

    Raises:
        IndexError: If an index is outside `[0, dim_size)`.
        ValueError: If shapes do not fit, or not exactly one of `index` and `ptr` is given.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import logsumexp
        >>> logsumexp(torch.zeros(3), torch.tensor([0, 0, 2]), dim_size=3)
        tensor([0.6931,   -inf, 0.0000])
    """
    g = _groups("logsumexp", src, index, ptr, dim_size, dim)
    if g.plan is not None:
        return g.per_group(plan_logsumexp(g.plan, g.src))
    run = logsumexp_op if must_trace(src) else logsumexp_messages
    return g.per_group(run(g.src, g.groups(), g.num_groups))


def _groups(
    op: str, src: Tensor, index: Tensor | None, ptr: Tensor | None, dim_size: int | None, dim: int
) -> Groups:
    if (index is None) == (ptr is None):
        got = "neither" if index is None else "both"
        raise ValueError(f"{op}: index or ptr must be given, and not both, got {got}")
    if index is not None:
        groups = groups_of_index(op, src, index, dim_size, dim)
    else:
        assert ptr is not None, "one of the two is given"
        groups = groups_of_ptr(op, src, ptr, dim_size, dim)
    check_floating(op, src)
    return groups
