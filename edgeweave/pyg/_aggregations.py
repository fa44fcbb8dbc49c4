"""Lists of aggregations: which of PyG's modules run in one pass, and `FusedAggregation` itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr

from edgeweave._plan import plan_for_index
from edgeweave._plan._device import same_device
from edgeweave._plan._multi import plan_multi
from edgeweave.pyg._eligibility import (
    INDEX_DTYPES,
    features_refusal,
    has_hooks,
    mode_refusal,
)
from edgeweave.pyg._functions import run_counted

__all__ = [
    "aggregate",
    "edge_reductions",
    "fused_aggregations",
    "multi_names",
    "reductions_of",
]

_NAMES: dict[type, str] = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "amax",
    aggr.MinAggregation: "amin",
    aggr.VarAggregation: "var",
    aggr.StdAggregation: "std",
}
_SITE = "FusedAggregation"


def reductions_of(module: Any) -> list[str] | None:
    """The reductions of a `MultiAggregation`, None if one of them is not among those above.

    Exact types without hooks: a subclass may differ, and a hook wants to be called.
    """
    if type(module) is not aggr.MultiAggregation or has_hooks(module):
        return None
    names = [_name_of(one) for one in module.aggrs]
    known = [name for name in names if name is not None]
    return known if known and len(known) == len(names) else None


def _name_of(module: Any) -> str | None:
    name = _NAMES.get(type(module))
    if name is None or has_hooks(module) or "reduce" in module.__dict__:
        return None
    if name == "std":
        inner = module.var_aggr
        return name if type(inner) is aggr.VarAggregation and _name_of(inner) == "var" else None
    return None if name == "var" and module.semi_grad else name


def edge_reductions(module: Any) -> tuple[list[str], Callable[[list[Tensor]], Tensor]] | None:
    """What an aggregation module makes of one pass over messages, and how; None if it is not known.

    Returns:
        (names of reductions, function of their results): for a list of aggregations, and for the
        variance and the standard deviation.
    """
    names = reductions_of(module)
    if names is not None:
        return names, module.combine
    name = _name_of(module)
    return None if name is None else ([name], lambda results: results[0])


def aggregate(made: Mapping[str, Tensor], names: list[str]) -> list[Tensor]:
    """The results for `names` from those that `multi_names` asked for."""
    return [_deviation(made["var"]) if name == "std" else made[name] for name in names]


def multi_names(names: list[str]) -> tuple[tuple[str, ...], int]:
    """What `plan_multi` is to be asked for, and its correction, to make these of the answers.

    PyG's deviation is its own function of the variance, and its variance divides by the count.
    """
    asked = dict.fromkeys("var" if name == "std" else name for name in names)
    return tuple(asked), 0


def _deviation(var: Tensor) -> Tensor:
    """PyG's standard deviation: 0, without a gradient, where the variance is 1e-5 or less."""
    out = var.clamp(min=1e-5).sqrt()
    return out.masked_fill(out <= math.sqrt(1e-5), 0.0)


def fused_aggregations(module: Any, x: Any, index: Any, ptr: Any, dim_size: Any, dim: Any) -> Any:
    """`FusedAggregation.forward`, or `NotImplemented` where PyG's own must run."""
    if torch.compiler.is_compiling():
        return NotImplemented
    names = [_BY_CLASS.get(name) for name in module.aggr_names]
    reason = mode_refusal()
    if reason is None and (None in names or module.semi_grad):
        reason = "a product, or a variance of semi_grad"
    if reason is None:
        reason = features_refusal(x, "x")
    if reason is None and (x.dim() != 2 or dim not in (0, -2)):
        reason = "x is not [E, F]"
    if reason is None and (
        type(index) is not Tensor
        or index.dtype not in INDEX_DTYPES
        or index.dim() != 1
        or not same_device(index, x)
        or index.size(0) != x.size(0)
    ):
        reason = "index is not [E] of int32 or int64 where x is"
    if reason is None and not (dim_size is None or (type(dim_size) is int and dim_size >= 0)):
        reason = "dim_size is not a number of groups"
    if reason is None and dim_size is None and ptr is not None:
        dim_size = ptr.numel() - 1
    known = [name for name in names if name is not None]

    def run(groups: int) -> list[Tensor]:
        asked, correction = multi_names(known)
        made = plan_multi(plan_for_index(index, groups), x.contiguous(), asked, correction)
        return aggregate(dict(zip(asked, made, strict=True)), known)

    return run_counted(_SITE, reason, index, dim_size, run)


_BY_CLASS = {cls.__name__: name for cls, name in _NAMES.items()}
