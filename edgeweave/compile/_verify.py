"""`optimize(verify=True)`: is the compiled model as close to float64 as eager is?"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import EdgeweaveError

__all__ = ["VerificationError", "device_of", "verify_model"]

# Distances are relative to the largest magnitude of a result. Another order of additions moves a
# sum by a few units in the last place, so eager's own distance is allowed a few times over.
_TIMES_EAGER = 4.0
_ULPS = 32.0


class VerificationError(EdgeweaveError, RuntimeError):
    """A compiled model is further from float64 than eager is."""


def verify_model(compiled: Any, inputs: Sequence[Any], precision: str) -> None:
    """Compare a compiled model with its original on one call.

    The random state is the same for all runs, and buffers that a call writes to (running means)
    are put back.

    Args:
        compiled: From `optimize`.
        inputs: Positional arguments.
        precision: "fp32" or "bf16".

    Raises:
        VerificationError: If a result is further from float64 than eager's, beyond rounding.
    """
    model: nn.Module = compiled.original
    exact_model = copy.deepcopy(model).double()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    device = device_of(inputs)
    mode = torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext()
    with torch.random.fork_rng(devices=[] if device == "cpu" else None):
        seed = torch.initial_seed()
        torch.manual_seed(seed)
        exact = list(_tensors(exact_model(*_double(list(inputs)))))
        torch.manual_seed(seed)
        with mode:
            eager = list(_tensors(model(*inputs)))
        _put_back(model, buffers)
        torch.manual_seed(seed)
        ours = list(_tensors(compiled(*inputs)))
        _put_back(model, buffers)
    for position, (mine, theirs, true) in enumerate(zip(ours, eager, exact, strict=True)):
        if not true.is_floating_point():
            continue
        scale = float(true.abs().max()) if true.numel() else 0.0
        if not torch.isfinite(true).all():
            continue
        mine_off = float((mine.double() - true).abs().max()) if true.numel() else 0.0
        eager_off = float((theirs.double() - true).abs().max()) if true.numel() else 0.0
        dtype = torch.bfloat16 if precision == "bf16" else theirs.dtype
        limit = _TIMES_EAGER * eager_off + _ULPS * torch.finfo(dtype).eps * scale
        if not mine_off <= limit:
            raise VerificationError(
                f"optimize: result {position} must be within {limit:.3g} of float64, as eager's "
                f"{eager_off:.3g} is, got {mine_off:.3g}; find the pass with "
                "torch.compile(backend='edgeweave', options={'without': [...]})"
            )


def device_of(values: Iterable[Any]) -> str:
    """The kind of device that the first tensor among some arguments is on."""
    return next((v.device.type for v in values if isinstance(v, Tensor)), "cpu")


def _put_back(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_double(each) for each in value)
    if isinstance(value, dict):
        return {key: _double(each) for key, each in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
