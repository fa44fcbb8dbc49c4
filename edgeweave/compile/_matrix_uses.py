"""Whether a model does more with a sparse matrix than giving it to layers of PyG."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["buffers_put_back", "other_use"]


@contextmanager
def buffers_put_back(model: nn.Module) -> Iterator[None]:
    """Calls in the block leave the buffers of a model as they were: running means, counters."""
    before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in _tracked(model)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, values in before:
                # What nobody wrote to keeps its version, by which others know it.
                if buffer._version != version:
                    buffer.copy_(values)


def _tracked(model: nn.Module) -> list[Tensor]:
    lazy = nn.parameter.is_lazy
    return [each for each in model.buffers() if not (lazy(each) or each.is_inference())]


class _Uses(TorchFunctionMode):
    """Notes the first call outside of PyG's layers that is given one of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.depth = 0
        self.found = ""

    def holds(self, values: Any) -> bool:
        """Whether one of the tensors is among nested values."""
        return any(leaf is each for leaf in tree_leaves(values) for each in self.tensors)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not (self.depth or self.found) and self.holds((args, kwargs)):
            self.found = str(getattr(func, "__name__", func))
        return func(*args, **(kwargs or {}))


def other_use(
    model: nn.Module, matrices: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> str:
    """Call a model once to see what it does with some matrices.

    Its buffers and the random state are put back.

    Args:
        model: The model.
        matrices: Among the arguments.
        args: Of the call.
        kwargs: Of the call.

    Returns:
        What the model does with them but giving them to layers of PyG's own; empty if nothing.
    """
    from torch_geometric.nn import MessagePassing
    from torch_geometric.nn.models.basic_gnn import BasicGNN

    uses = _Uses(matrices)

    def enter(*_: Any) -> None:
        uses.depth += 1

    def leave(*_: Any) -> None:
        uses.depth -= 1

    hooks = []
    for module in model.modules():
        # A layer of the user's own may take a matrix in another way.
        of_pyg = type(module).__module__.split(".")[0] in ("torch_geometric", "edgeweave")
        if of_pyg and isinstance(module, (MessagePassing, BasicGNN)):
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with (
            buffers_put_back(model),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            warnings.catch_warnings(),
            uses,
        ):
            # What PyG says of slow layouts is not true of edges.
            warnings.simplefilter("ignore")
            out = model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if uses.holds(out):
        return "it is returned"
    return f"the model calls {uses.found} with it" if uses.found else ""
