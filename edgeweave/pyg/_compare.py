"""Stock PyG beside the accelerated layers, layer by layer: time, and memory kept for backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from edgeweave.pyg._report import report
from edgeweave.pyg._state import accelerated, is_accelerated

__all__ = ["Comparison", "LayerComparison", "compare"]


@dataclass(frozen=True)
class LayerComparison:
    """One message-passing layer of a model, in both ways.

    Attributes:
        name: Name of the module in the model; empty for the model itself.
        kind: Name of its class.
        stock_ms: Median time of its forward passes with PyG's own code, ms.
        ours_ms: The same, accelerated.
        stock_kept: Bytes that it keeps for the backward pass, parameters and inputs left out, with
            PyG's own code; 0 without gradients.
        ours_kept: The same, accelerated.
        fused: Calls of edgeweave's kernels by name (a layer, or `gather`, `utils.scatter`, ...).
        reasons: Why PyG's own code ran, where it did.
    """

    name: str
    kind: str
    stock_ms: float
    ours_ms: float
    stock_kept: int
    ours_kept: int
    fused: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """A model in both ways.

    Attributes:
        layers: Its message-passing layers, in the order in which they were called.
        stock_ms: Median time of a forward and (with gradients) backward pass with PyG's code, ms.
        ours_ms: The same, accelerated.
        difference: Largest difference of the two outputs, relative to the largest stock output.
    """

    layers: tuple[LayerComparison, ...]
    stock_ms: float
    ours_ms: float
    difference: float

    def __str__(self) -> str:
        head = ("layer", "forward, ms", "kept for backward, MiB", "how")
        rows = [head]
        for layer in self.layers:
            how = "fused" if layer.fused and not layer.reasons else "PyG's code"
            if layer.fused and layer.reasons:
                how = "partly: " + ", ".join(layer.fused)
            if layer.reasons:
                how += " (" + "; ".join(layer.reasons) + ")"
            rows.append(
                (
                    f"{layer.name or 'model'} ({layer.kind})",
                    f"{layer.stock_ms:.2f} -> {layer.ours_ms:.2f}",
                    f"{layer.stock_kept / 2**20:.1f} -> {layer.ours_kept / 2**20:.1f}",
                    how,
                )
            )
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        lines = [
            "  ".join((*(text.ljust(w) for text, w in zip(row, widths, strict=False)), row[3]))
            for row in rows
        ]
        lines.append(
            f"whole pass: {self.stock_ms:.2f} -> {self.ours_ms:.2f} ms "
            f"({self.stock_ms / self.ours_ms:.2f}x), outputs differ by {self.difference:.1e}"
        )
        return "\n".join(lines)


class _Seen:
    """What was seen of one layer in one of the two ways."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.kept = 0
        self.fused: dict[str, None] = {}
        self.reasons: dict[str, None] = {}


def compare(model: nn.Module, *inputs: Any, repeat: int = 5, **kwargs: Any) -> Comparison:
    """Runs a model with PyG's own code and accelerated, and says what each layer gains.

    The model runs `2 * (repeat + 1)` times in turn, forward and, if gradients are on and something
    wants one, backward; gradients of parameters and inputs are left as they were. Random numbers
    (dropout) are the same in both ways. Buffers that a forward pass updates (running statistics)
    are restored.

    Args:
        model: A model with PyG layers.
        inputs: What to call it with.
        repeat: Timed passes in each way, at least 1; one more before is not timed.
        kwargs: Further arguments of the model.

    Returns:
        A table when printed.

    Raises:
        ImportError: If torch_geometric is not installed.
        ValueError: If `repeat` is below 1, or the model holds no message-passing layer.

    Example:
        >>> import torch
        >>> from torch_geometric.nn import SAGEConv
        >>> from edgeweave.pyg import compare
        >>> edges = torch.randint(0, 100, (2, 1000))
        >>> found = compare(SAGEConv(16, 16), torch.rand(100, 16), edges)
        >>> found.layers[0].fused
        ('SAGEConv',)
    """
    from torch_geometric.nn import MessagePassing

    if repeat < 1:
        raise ValueError(f"compare: repeat must be at least 1, got {repeat}")
    layers = {m: name for name, m in model.named_modules() if isinstance(m, MessagePassing)}
    if not layers:
        raise ValueError(
            "compare: model must hold a message-passing layer of PyG, got "
            f"{type(model).__name__} without one"
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        with torch.no_grad():
            model(*inputs, **kwargs)  # lazy layers find their widths
    called: dict[Any, None] = {}
    seen = {way: {layer: _Seen() for layer in layers} for way in (False, True)}
    times: dict[bool, list[float]] = {False: [], True: []}
    outputs: dict[bool, list[Tensor]] = {}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    try:
        for index in range(repeat + 1):
            for ours in (False, True):
                torch.set_rng_state(state)
                with _way(ours), _watched(seen[ours], called, index > 0):
                    begin = time.perf_counter()
                    out = _tensors(model(*inputs, **kwargs))
                    _backward(model, inputs, kwargs, out)
                    if index > 0:
                        times[ours].append(time.perf_counter() - begin)
                outputs[ours] = [t.detach() for t in out]
                _restore(model, buffers)
    finally:
        torch.set_rng_state(state)
        _restore(model, buffers)
    return Comparison(
        tuple(
            _row(layer, layers[layer], seen[False][layer], seen[True][layer]) for layer in called
        ),
        1e3 * median(times[False]),
        1e3 * median(times[True]),
        _difference(outputs[False], outputs[True]),
    )


def _restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Puts the values of buffers back, but for those that are new or of another shape."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            before = buffers.get(name)
            if before is not None and before.shape == buffer.shape:
                buffer.copy_(before)


def _row(layer: Any, name: str, stock: _Seen, ours: _Seen) -> LayerComparison:
    return LayerComparison(
        name,
        type(layer).__name__,
        1e3 * median(stock.times),
        1e3 * median(ours.times),
        stock.kept,
        ours.kept,
        tuple(ours.fused),
        tuple(ours.reasons),
    )


@contextmanager
def _way(ours: bool) -> Iterator[None]:
    if ours:
        with accelerated():
            yield
        return
    if not is_accelerated():
        yield
        return
    # `accelerate()` is on for the process: this thread's calls alone are left to PyG.
    from edgeweave.pyg._install import _switch

    _switch.opted_out += 1
    try:
        yield
    finally:
        _switch.opted_out -= 1


@contextmanager
def _watched(seen: dict[Any, _Seen], called: dict[Any, None], timed: bool) -> Iterator[None]:
    """Puts a `forward` that watches on each layer, and takes it off again."""
    own = {layer: layer.__dict__.get("forward") for layer in seen}
    for layer, record in seen.items():
        layer.forward = _watching(layer, layer.forward, record, called, timed)
    try:
        yield
    finally:
        for layer, forward in own.items():
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _watching(
    layer: Any,
    forward: Callable[..., Any],
    record: _Seen,
    called: dict[Any, None],
    timed: bool,
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        called[layer] = None
        if timed:
            begin = time.perf_counter()
            out = forward(*args, **kwargs)
            record.times.append(time.perf_counter() - begin)
            return out
        # The pass that is not timed looks at memory and at the report instead.
        own = {t.untyped_storage().data_ptr() for t in layer.parameters()}
        own.update(t.untyped_storage().data_ptr() for t in _tensors((args, kwargs)))
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        before = report()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks if torch.is_grad_enabled() else nullcontext():
            out = forward(*args, **kwargs)
        record.kept += sum(kept.values())
        for site in report().sites:
            earlier = before[site.site]
            if site.fused > earlier.fused:
                record.fused[site.site] = None
            for reason, count in site.reasons.items():
                if count > earlier.reasons.get(reason, 0):
                    record.reasons[f"{site.site}: {reason}"] = None
        return out

    return run


def _backward(model: nn.Module, inputs: Any, kwargs: Any, out: list[Tensor]) -> None:
    """Computes every gradient, and leaves none behind."""
    if not torch.is_grad_enabled():
        return
    ends = [t for t in out if t.requires_grad]
    leaves = [t for t in (*model.parameters(), *_tensors((inputs, kwargs))) if t.requires_grad]
    if ends and leaves:
        torch.autograd.grad(ends, leaves, [torch.ones_like(t) for t in ends], allow_unused=True)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _tensors(v)]
    return []


def _difference(stock: list[Tensor], ours: list[Tensor]) -> float:
    worst = 0.0
    for a, b in zip(stock, ours, strict=True):
        if a.numel() == 0 or not a.is_floating_point():
            continue
        first, second = a.double(), b.double()
        finite = first.isfinite()
        # Infinities and NaN must be the same, and in the same places.
        if not torch.equal(first.nan_to_num()[~finite], second.nan_to_num()[~finite]) or not (
            torch.equal(finite, second.isfinite()) and torch.equal(first.isnan(), second.isnan())
        ):
            return float("inf")
        if finite.any():
            scale = first[finite].abs().max().clamp(min=torch.finfo(a.dtype).tiny)
            worst = max(worst, float((first - second)[finite].abs().max() / scale))
    return worst
