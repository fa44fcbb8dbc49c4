"""`fuse` and the module that it returns."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._checks import describe
from .._errors import EdgeweaveError
from .._fx import Captured, CaptureError, Structure, capture, flatten_call, unflatten
from .._fx._capture import no_collections
from ._draw import draw_graph
from ._engine import Engine
from ._library import load_library
from ._measure import Measured, choose
from ._plan import is_plain
from ._report import FuseReport, Verification
from ._save import save_engine
from ._segment import GuardTripped
from ._summary import summarise
from ._verify import verify_engine

__all__ = ["FuseError", "FusedModule", "Keep", "Nan", "fuse"]

Nan = Literal["propagate", "fast"]
Keep = Literal["measured", "all"]
_DTYPES = {None: "float32", torch.float32: "float32", torch.bfloat16: "bfloat16"}
_MOST_VARIANTS = 8


class FuseError(EdgeweaveError, RuntimeError):
    """A model cannot be fused, or a call does not fit what was captured."""


class FusedModule(nn.Module):
    """A model that runs on oneDNN partitions; made by `fuse` or `load`.

    It is called as the model was, with arguments that nest in the same way, and returns the same
    containers. It is for inference: no gradients flow, and training mode is refused. Weights are
    read from the model: an edit in place, or another tensor put in a weight's place, is noticed at
    the next call; an edit through `.data`, which no version counter sees, needs `refresh()`.
    It may be called from several threads at once.
    """

    def __init__(
        self,
        model: nn.Module | None,
        engines: Sequence[Engine],
        settings: Mapping[str, Any],
        capture_again: Callable[[list[Any], Engine | None], Engine] | None,
    ) -> None:
        super().__init__()
        self.original = model
        self._engines = list(engines)
        self._settings = dict(settings)
        self._capture_again = capture_again
        self._measured: dict[int, Measured] = {}
        self._calls = [0]  # a list: modules look for parameters where an attribute is set
        self._eager_calls: Counter[str] = Counter()
        self._lock = threading.RLock()
        super().train(False)

    def train(self, mode: bool = True) -> FusedModule:
        """Refuse training mode.

        Args:
            mode: Must be False.

        Raises:
            ValueError: If `mode` is True.
        """
        if mode:
            raise ValueError(
                "FusedModule.train: mode must be False, got True; train the original model"
            )
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Args:
            args: As of the model.
            kwargs: As of the model.

        Returns:
            As of the model, without gradients.

        Raises:
            ValueError: If a tensor requires gradients while they are recorded, or sizes and types
                contradict what was captured.
        """
        # With weights that fill the caches each line here takes microseconds: what comes first
        # is what decides most often.
        leaves, structure = flatten_call(args, kwargs)
        self._calls[0] += 1
        records, casts = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        for position, leaf in enumerate(leaves if records else ()):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    f"FusedModule: input {position} must not require gradients, got one that "
                    "does; call it under torch.no_grad(), or use the original model"
                )
        for x in leaves:
            if isinstance(x, Tensor) and not is_plain(x):
                reason = f"input of {x.dtype}, {x.layout}, {x.device}"
                return self._eager(reason, args, kwargs)
        if not (records or casts):
            return self._run(leaves, structure, args, kwargs)
        autocast = torch.autocast("cpu", enabled=False) if casts else nullcontext()
        with torch.no_grad(), autocast:
            return self._run(leaves, structure, args, kwargs)

    def _run(
        self,
        leaves: list[Any],
        structure: Structure,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        engine, symbols = self._find(leaves, structure)
        if engine.weights.changed():
            with self._lock:
                if engine.weights.changed():
                    engine.refresh()
        if not engine.fused and self.original is not None and self._plain_eager():
            return self.original(*args, **kwargs)
        if engine.may_be_empty and any(isinstance(x, Tensor) and x.numel() == 0 for x in leaves):
            return self._eager("empty input", args, kwargs)
        try:
            outputs = engine.run(leaves, symbols)
        except GuardTripped:
            return self._eager("NaN, infinite or very large values", args, kwargs, engine)
        return unflatten(engine.captured.output_structure, outputs)

    def _plain_eager(self) -> bool:
        return bool(self._settings["dtype"] != "bfloat16")

    def _eager(
        self,
        reason: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        engine: Engine | None = None,
    ) -> Any:
        with self._lock:
            self._eager_calls[reason] += 1
        with torch.no_grad():
            if self.original is not None:
                bf16 = not self._plain_eager()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
                    return self.original(*args, **kwargs)
            engine = engine or self._engines[0]
            leaves, _ = flatten_call(args, kwargs)
            symbols = engine.symbols_of(leaves)
            if isinstance(symbols, str):
                raise ValueError(f"FusedModule: {symbols}")
            outputs = engine.run_eager(leaves, symbols)
        return unflatten(engine.captured.output_structure, outputs)

    def _find(self, leaves: list[Any], structure: Any) -> tuple[Engine, dict[str, int]]:
        reason = "arguments must nest as in the example"
        for engine in self._engines:
            if engine.captured.input_structure != structure:
                continue
            symbols = engine.symbols_of(leaves)
            if not isinstance(symbols, str):
                return engine, symbols
            reason = symbols
        if self._capture_again is None or self._settings["dynamic"] is False:
            raise ValueError(f"FusedModule: {reason}; fuse it with such inputs")
        with self._lock:
            nearest = (
                self._engines[0] if self._engines[0].captured.input_structure == structure else None
            )
            try:
                engine = self._capture_again([leaves, structure], nearest)
            except CaptureError as error:
                raise ValueError(f"FusedModule: {reason}; {error}") from error
            symbols = engine.symbols_of(leaves)
            if isinstance(symbols, str):
                raise ValueError(f"FusedModule: {symbols}")
            self._engines = [*self._engines[: _MOST_VARIANTS - 1], engine]
        return engine, symbols

    def refresh(self) -> None:
        """Read all weights of the model again and pack them anew.

        Needed after edits that torch does not see: through `.data` or a numpy view.
        """
        with self._lock:
            for engine in self._engines:
                engine.refresh()

    def report(self) -> FuseReport:
        """What is fused, what is not and why, and what it costs."""
        return summarise(
            self._engines,
            self._settings,
            self._measured.get(0),
            self._calls[0],
            dict(self._eager_calls),
        )

    def verify(self, *, seed: int = 0) -> list[Verification]:
        """Run each partition, and the whole, against ATen in float64, on the example's sizes.

        Inputs are random ones of several magnitudes, and zeros. A partition is good if it is as
        near to the float64 result as ATen is, within a few roundings.

        Args:
            seed: Of the random inputs.

        Returns:
            One line for each partition and kind of input, and one, `whole`, for all together.
        """
        with torch.no_grad():
            return verify_engine(self._engines[0], self._settings["example_symbols"], seed)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the graph with its partitions in colour.

        Args:
            path: A file ending in `.svg`, or `.png` (which needs matplotlib).

        Raises:
            ValueError: If the file ends in anything else.
        """
        draw_graph(self._engines[0], self._settings["example_symbols"], Path(path))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Save graph and weights: `graph.json` and `weights.safetensors`.

        Args:
            directory: Made if it does not exist.
        """
        save_engine(self._engines[0], self._settings, Path(directory))


def _check_example(leaves: Sequence[Any]) -> None:
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not is_plain(leaf):
            raise TypeError(
                f"fuse: example input {position} must be a dense real CPU tensor, got "
                f"{describe(leaf)} with layout {leaf.layout}"
            )


def _check_settings(dtype: Any, nan: str, keep: str) -> str:
    if nan not in ("propagate", "fast"):
        raise ValueError(f"fuse: nan must be 'propagate' or 'fast', got {nan!r}")
    if keep not in ("measured", "all"):
        raise ValueError(f"fuse: keep must be 'measured' or 'all', got {keep!r}")
    name = dtype if dtype == "bf16-math" else _DTYPES.get(dtype)
    if name is None:
        raise ValueError(
            f"fuse: dtype must be None, torch.float32, torch.bfloat16 or 'bf16-math', got {dtype!r}"
        )
    check_dtype("fuse", str(name), dtype)
    return str(name)


def check_dtype(op: str, name: str, given: object) -> None:
    """Refuse bfloat16 where the processor would only emulate it."""
    if name != "float32" and not has_bf16():
        raise ValueError(
            f"{op}: dtype must be torch.float32 on this processor, got {given!r}, which needs "
            "avx512_bf16 or AMX; fuse it without dtype"
        )


def has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 numbers."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def fuse(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor,
    *,
    dtype: torch.dtype | Literal["bf16-math"] | None = None,
    dynamic: bool | Sequence[Collection[int]] | None = None,
    nan: Nan = "propagate",
    keep: Keep = "measured",
) -> FusedModule:
    """Fuse a model for inference on the CPU, without a compiler.

    The model is captured with `torch.export`, what oneDNN Graph knows is cut into partitions by
    oneDNN, and the rest stays in ATen.

    Args:
        model: In evaluation mode, in float32, on the CPU.
        example_inputs: Positional arguments as a tuple, keyword arguments as a mapping, or one
            tensor. Containers may nest.
        dtype: None or `torch.float32`; `torch.bfloat16` for what autocast would do, with weights
            kept in bfloat16; `"bf16-math"` for float32 values multiplied in bfloat16. The last two
            need a processor with avx512_bf16 or AMX.
        dynamic: Which sizes may change. None: those of the example, and where a call brings others,
            the model is captured once more with those that changed left open. True: all that the
            model allows, at once. False: none; other sizes raise. Or, for each tensor among the
            inputs, the dimensions that may change.
        nan: `"propagate"` gives NaN wherever eager does. `"fast"` leaves out the checks that this
            needs: oneDNN's ReLU, clamp and pooling may turn NaN into a number.
        keep: `"measured"` leaves to eager what eager does faster on the example; `"all"` fuses all
            that can be.

    Returns:
        The fused module. Its results are within rounding of the model's.

    Raises:
        OneDnnUnavailableError: If no usable libdnnl is installed; the message names the command.
        FuseError: If the model cannot be captured.
        TypeError: If the model is no module, or an example is sparse, quantised, complex, or not on
            the CPU.
        ValueError: If a setting is unknown, bf16 is not supported here, or the model is training.

    Example:
        >>> import torch
        >>> from edgeweave import graphfuse
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).eval()
        >>> x = torch.randn(4, 8)
        >>> fused = graphfuse.fuse(model, (x,), keep="all")
        >>> bool(torch.allclose(fused(x), model(x), atol=1e-6))
        True
        >>> [part.ops for part in fused.report().partitions]
        [('aten.linear.default', 'aten.relu.default')]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: model must be a torch.nn.Module, got {describe(model)}")
    if model.training:
        raise ValueError("fuse: model must be in evaluation mode, got training; call model.eval()")
    name = _check_settings(dtype, nan, keep)
    library = load_library()
    args, kwargs = _arguments(example_inputs)
    leaves, structure = flatten_call(args, kwargs)
    _check_example(leaves)
    settings: dict[str, Any] = {
        "dtype": name,
        "nan": nan,
        "keep": keep,
        "dynamic": dynamic,
        "library": library.version,
        "capture_s": 0.0,
    }

    def make(leaves: list[Any], structure: Any, dims: Any) -> Engine:
        start = time.perf_counter()
        args, kwargs = unflatten(structure, leaves)
        bf16 = name == "bfloat16"
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
            captured = capture(model, args, kwargs, dims)
        settings["capture_s"] += time.perf_counter() - start
        return _engine(captured, settings)

    def again(call: list[Any], nearest: Engine | None) -> Engine:
        dims = None if nearest is None else _changed(call[0], nearest.captured)
        engine = make(call[0], call[1], dims)
        if nearest is not None:  # what was measured holds for other sizes too
            engine.forced, engine.fused = dict(nearest.forced), nearest.fused
            engine.packed = dict(nearest.packed)
        return engine

    try:
        engine = make(leaves, structure, dynamic)
    except CaptureError as error:
        raise FuseError(f"fuse: {error}") from error
    fused = FusedModule(model, [engine], settings, again)
    symbols = engine.symbols_of(leaves)
    if isinstance(symbols, str):
        raise FuseError(f"fuse: the captured graph does not take its own example: {symbols}")
    fused._settings["example_symbols"] = symbols
    _settle(fused, engine, leaves, symbols, lambda: model(*args, **kwargs))
    return fused


def _settle(
    fused: FusedModule,
    engine: Engine,
    leaves: list[Any],
    symbols: dict[str, int],
    original: Callable[[], object],
) -> None:
    """Compile for the example, and measure if that is wanted."""
    # What a capture leaves behind would be collected in the middle of a call that is timed.
    with torch.no_grad(), no_collections():
        if fused._settings["keep"] == "measured":
            eager = original if fused._plain_eager() else engine.eager_call(leaves, symbols)
            fused._measured[0] = choose(engine, leaves, symbols, eager)
        else:
            try:
                engine.run(leaves, symbols)
            except GuardTripped:
                engine.plan(symbols)


def _engine(captured: Captured, settings: Mapping[str, Any]) -> Engine:
    fpmath = "bf16" if settings["dtype"] == "bf16-math" else "strict"
    return Engine(captured, fpmath=fpmath, guard=settings["nan"] == "propagate")


def _changed(leaves: Sequence[Any], captured: Captured) -> list[set[int]] | None:
    """Dimensions of each tensor input that differ from what was captured."""
    found = []
    for leaf, meta in zip(leaves, captured.input_metas, strict=True):
        if not isinstance(leaf, Tensor) or meta is None:
            continue
        if leaf.dim() != len(meta.shape):
            return None
        sizes = zip(leaf.shape, meta.shape, strict=True)
        found.append({d for d, (now, then) in enumerate(sizes) if now != then})
    return found


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, list | tuple):
        return tuple(example), {}
    raise TypeError(
        "fuse: example_inputs must be a tuple, a mapping of keyword arguments or a tensor, got "
        f"{describe(example)}"
    )
