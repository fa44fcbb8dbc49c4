"""`segment_reduce`: rows of a tensor that follow each other, reduced segment by segment."""

from __future__ import annotations

from torch import Tensor

from .._checks import check_ties, normalize_reduce
from .._plan import plan_minmax, plan_sum
from .._plan._compiled import must_trace, scatter_op
from .._plan._composite import reduce_messages
from .._plan._prod import plan_prod
from ._groups import groups_of_ptr

__all__ = ["segment_reduce"]

_OP = "segment_reduce"


def segment_reduce(
    src: Tensor, ptr: Tensor, reduce: str = "sum", dim: int = 0, ties: str = "even"
) -> Tensor:
    """Reduces segments of `src`: `out[g] = reduce(src[ptr[g]], ..., src[ptr[g + 1] - 1])`.

    Args:
        src: Values, `[..., E, ...]` with E along `dim`; floating point or integer (not bool), any
            strides.
        ptr: `[G + 1]` int32 or int64, from 0 to E, not decreasing.
        reduce: "sum", "mean", "amax", "amin" or "prod"; "add", "max", "min" and "mul" mean the
            same. Second derivatives of "prod" exist where no entry is 0.
        dim: The dimension to reduce along.
        ties: How equal winners share a gradient: "even", or "first" (the first in order takes it).

    Returns:
        `[..., G, ...]` in src's dtype; 0 for an empty segment (1 for "prod"). Bitwise the same for
        any number of threads. float16 and bfloat16 are summed in float32 and rounded once.

    Raises:
        ValueError: If shapes, `reduce` or `ties` do not fit, or `ptr` is not as above.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import segment_reduce
        >>> src = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> segment_reduce(src, torch.tensor([0, 2, 2, 3]), "mean")
        tensor([[2., 3.],
                [0., 0.],
                [5., 6.]])
    """
    reduce = normalize_reduce(_OP, reduce, prod=True)
    check_ties(_OP, ties)
    g = groups_of_ptr(_OP, src, ptr, None, dim)
    if g.plan is None:
        run = scatter_op if must_trace(src) else reduce_messages
        return g.per_group(run(g.src, g.groups(), g.num_groups, reduce, ties))
    if reduce in ("sum", "mean"):
        return g.per_group(plan_sum(g.plan, g.src, mean=reduce == "mean"))
    if reduce == "prod":
        return g.per_group(plan_prod(g.plan, g.src))
    return g.per_group(plan_minmax(g.plan, g.src, is_max=reduce == "amax", ties=ties))
