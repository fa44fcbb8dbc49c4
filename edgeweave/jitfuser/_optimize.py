"""`optimize`: a callable with one checked, fused function per shape."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from edgeweave._checks import describe
from edgeweave._engines import find_engine
from edgeweave._errors import EdgeweaveError, EdgeweaveWarning
from edgeweave.jitfuser._availability import bf16_missing, missing_bridge
from edgeweave.jitfuser._build import Bucket, Settings, build
from edgeweave.jitfuser._capture import Spec, flatten, unflatten
from edgeweave.jitfuser._flags import flags
from edgeweave.jitfuser._profile import profile_groups
from edgeweave.jitfuser._report import JitReport, ShapeReport
from edgeweave.jitfuser._trace import autocast_recipe
from edgeweave.jitfuser._watch import Watch

__all__ = ["OptimizedModel", "optimize"]

# torch and oneDNN keep memory of every function that was compiled (about two and a half times the
# fused weights), also of those that are gone. So the number of functions is bounded, not only that
# of those alive: per slot of the cache, this many may be made.
_BUILDS_PER_SLOT = 4

_NAN = ("propagate", "fast")
_DTYPES = (None, torch.float32, torch.bfloat16)


class OptimizedModel:
    """A model with the results of eager, run through TorchScript and oneDNN where that is right.

    Made by `optimize`. Calling it takes what the model takes and returns what the model returns,
    without gradients. It may be called from many threads; calls with inputs of one shape wait for
    each other, since a compiled oneDNN partition must not run twice at once. An autocast context
    around the call changes nothing.

    The model stays the owner of its weights. Writing into them or replacing them is noticed at the
    next call, and everything is traced anew; after edits that torch cannot see (`.data`, numpy
    views) call `refresh()`.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, max_shapes: int, notes: tuple[str, ...]
    ) -> None:
        self._model = model
        self._settings = settings
        self._max_shapes = max_shapes
        self._notes = notes
        self._lock = threading.RLock()
        self._buckets: OrderedDict[Any, Bucket] = OrderedDict()
        self._quick: dict[Any, tuple[Any, Bucket]] = {}
        self._watch = Watch(model)
        self._builds = 0
        self._evicted = 0
        self._overflowed = 0
        self._refreshed = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model.

        Args:
            *args: As of the model.
            **kwargs: As of the model.

        Returns:
            As of the model.
        """
        tensors, bucket = self._find(args, kwargs)
        if bucket is None or bucket.function is None:
            return self._eager(args, kwargs)
        if torch.is_autocast_enabled("cpu"):
            with autocast_recipe(None):
                results = bucket.run(tensors)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                results = bucket.run(tensors)
        else:
            results = bucket.run(tensors)
        assert bucket.outputs is not None
        if bucket.outputs.kind == "tensor":
            return results[0]
        return unflatten(bucket.outputs, iter(results))

    def _find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Tensor], Bucket | None]:
        """The flat tensors of a call and their bucket; None if the call is one for eager."""
        quick = _quick_key(args) if not kwargs else None
        if quick is not None:
            # Taking structures apart costs as much as a small layer: plain tensors go past it.
            with self._lock:
                known = self._quick.get(quick)
                if known is not None and not self._watch.changed():
                    key, bucket = known
                    self._buckets.move_to_end(key)
                    bucket.calls += 1
                    return args, bucket
        tensors: list[Tensor] = []
        try:
            spec = flatten((args, kwargs), tensors, "inputs")
        except TypeError:
            return (), None  # objects that only the model knows
        if not tensors or not all(_is_ordinary(x) for x in tensors):
            return (), None
        return tensors, self._bucket(spec, tensors, quick)

    def _bucket(self, spec: Spec, tensors: list[Tensor], quick: Any) -> Bucket | None:
        key = (spec, tuple([(x.shape, x.dtype) for x in tensors]))
        with self._lock:
            if self._watch.changed():
                self.refresh()
            bucket = self._buckets.get(key)
            if bucket is None and self._builds >= _BUILDS_PER_SLOT * self._max_shapes:
                self._overflowed += 1
                return None
            if bucket is None:
                self._builds += 1
                # Copies: a model may write into its inputs, and these are run many times.
                inputs = [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
                bucket = build(self._model, spec, inputs, self._settings)
                self._buckets[key] = bucket
                if len(self._buckets) > self._max_shapes:
                    self._buckets.popitem(last=False)
                    self._quick.clear()
                    self._evicted += 1
            self._buckets.move_to_end(key)
            if quick is not None:
                self._quick[quick] = (key, bucket)
            bucket.calls += 1
            return bucket

    def _eager(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with autocast_recipe(self._settings.dtype):
            return self._model(*args, **kwargs)

    def refresh(self) -> None:
        """Forgets everything made from the weights; the next call traces anew.

        Needed after edits that torch cannot see: through `.data`, numpy views, or in place into
        tensors made in inference mode, and after exchanging whole submodules.

        Example:
            >>> import torch
            >>> from edgeweave.jitfuser import optimize
            >>> layer = torch.nn.Linear(4, 4).eval()
            >>> fast = optimize(layer, torch.zeros(1, 4))
            >>> layer.bias.data.fill_(2.0)
            tensor([2., 2., 2., 2.])
            >>> fast.refresh()
            >>> fast(torch.zeros(1, 4))
            tensor([[2., 2., 2., 2.]])
        """
        with self._lock:
            self._buckets.clear()
            self._quick.clear()
            self._builds = 0
            self._watch = Watch(self._model)
            self._refreshed += 1

    def report(self, *, profile: bool = False) -> JitReport:
        """Tells what runs fused, what does not and why.

        Args:
            profile: Also time the groups, by running each shape a few times.

        Returns:
            A snapshot; printing it gives text.

        Example:
            >>> import torch
            >>> from edgeweave.jitfuser import optimize
            >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()).eval()
            >>> print(optimize(model, torch.randn(64, 256)).report())
            edgeweave.jitfuser: engine ...
        """
        with self._lock:
            shapes = tuple(_shape_report(b, profile=profile) for b in self._buckets.values())
            dtype = self._settings.dtype
            return JitReport(
                engine="torchscript",
                dtype="as the model" if dtype is None else f"autocast {dtype}",
                nan=_NAN[not self._settings.keep_nan],
                flags=flags(),
                shapes=shapes,
                evicted=self._evicted,
                overflowed=self._overflowed,
                refreshed=self._refreshed,
                notes=self._notes,
            )


def _shape_report(bucket: Bucket, *, profile: bool) -> ShapeReport:
    fused = bucket.calls if bucket.report.state == "fused" else 0
    groups = bucket.report.groups
    if profile and groups:
        with autocast_recipe(None):
            times = profile_groups(lambda: bucket.run(bucket.inputs))
        if len(times) == len(groups):
            groups = tuple(
                dataclasses.replace(group, time_s=time)
                for group, time in zip(groups, times, strict=True)
            )
    return dataclasses.replace(bucket.report, groups=groups, calls=bucket.calls, fused_calls=fused)


class _Delegate(OptimizedModel):
    """Another engine's model, or plain eager, behind the same interface."""

    def __init__(
        self, run: Any, engine: str, dtype: torch.dtype | None, nan: str, notes: tuple[str, ...]
    ) -> None:
        self._run = run
        self._engine = engine
        self._dtype = dtype
        self._nan = nan
        self._notes = notes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self._run(*args, **kwargs)

    def refresh(self) -> None:
        """See `OptimizedModel.refresh`."""
        if hasattr(self._run, "refresh"):
            self._run.refresh()

    def report(self, *, profile: bool = False) -> JitReport:
        """See `OptimizedModel.report`; `profile` is the other engine's matter."""
        own = str(self._run.report()) if hasattr(self._run, "report") else ""
        return JitReport(
            engine=self._engine,
            dtype="as the model" if self._dtype is None else str(self._dtype),
            nan=self._nan,
            flags=flags(),
            notes=self._notes,
            engine_report=own,
        )


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    nan: str = "propagate",
    max_shapes: int = 16,
) -> OptimizedModel:
    """Runs a model through TorchScript's oneDNN fusion, as right as in eager.

    The whole recipe: eval mode, autocast with its cache off if a dtype is asked for, trace,
    freeze, fold, rewrite or keep out of fusion what torch's bridge gets wrong, warm up until
    groups are fused, compare with eager on the examples and on NaN, infinite and other inputs, and
    try channels_last. What runs in the end is the fastest of what is right; that may be eager, and
    `report()` says why. Each shape of the inputs gets a function of its own on its first call.

    The model is put into eval mode, and is otherwise not changed. Only inference: the results have
    no gradients.

    Where this torch has no TorchScript or no bridge, `edgeweave.graphfuse` does the work behind
    the same interface.

    Args:
        model: Any module whose inputs and results are made of tensors, plain values, tuples,
            lists, dicts and dataclasses.
        example_inputs: A tensor, a tuple of positional inputs, a dict of keyword inputs, or a pair
            of both.
        dtype: `torch.bfloat16` to run under autocast, on processors with bf16 instructions; on
            others it says so and computes in fp32. None (or fp32) for the model's own dtype.
        verify: Compare with eager, for each new shape. Without it there is still the lint pass.
        nan: `"propagate"` keeps NaN where eager does. `"fast"` lets clamps (relu among them) and
            max pools turn NaN into numbers, as the bridge does, and fuses them.
        max_shapes: Shapes to keep; the least recently used goes first. Each holds its own folded
            and reordered weights, which torch does not give back entirely. So after four times as
            many different shapes, new ones run in eager.

    Returns:
        A callable with `report()` and `refresh()`.

    Raises:
        TypeError: If `model` is no module or `example_inputs` hold no tensor.
        ValueError: If `dtype`, `nan` or `max_shapes` is none of what is allowed.

    Example:
        >>> import torch
        >>> from edgeweave.jitfuser import optimize
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> x = torch.randn(1, 3, 16, 16)
        >>> fast = optimize(model, x)
        >>> torch.allclose(fast(x), model(x), atol=1e-5)
        True
    """
    args, kwargs = _check(model, example_inputs, dtype, nan, max_shapes)
    model.eval()
    notes: list[str] = []
    dtype = _autocast_dtype(dtype, notes)
    missing = missing_bridge()
    if missing is not None:
        return _elsewhere(model, _one_form(model, args, kwargs), dtype, nan, missing, notes)
    settings = Settings(dtype, nan == "propagate", verify)
    optimized = OptimizedModel(model, settings, max_shapes, tuple(notes))
    optimized._find(args, kwargs)
    return optimized


def _check(
    model: object, example_inputs: Any, dtype: object, nan: object, max_shapes: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize: model must be a torch.nn.Module, got {describe(model)}")
    if dtype not in _DTYPES:
        raise ValueError(f"optimize: dtype must be None, float32 or bfloat16, got {dtype}")
    if nan not in _NAN:
        raise ValueError(f"optimize: nan must be 'propagate' or 'fast', got {nan!r}")
    if not isinstance(max_shapes, int) or max_shapes < 1:
        raise ValueError(f"optimize: max_shapes must be at least 1, got {max_shapes!r}")
    args, kwargs = _split(example_inputs)
    tensors: list[Tensor] = []
    flatten((args, kwargs), tensors, "example_inputs")
    if not tensors:
        raise TypeError(
            f"optimize: example_inputs must hold a tensor, got {describe(example_inputs)}"
        )
    return args, kwargs


def _split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        if (
            len(example_inputs) == 2
            and isinstance(example_inputs[0], tuple | list)
            and isinstance(example_inputs[1], dict)
        ):
            return tuple(example_inputs[0]), dict(example_inputs[1])
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _autocast_dtype(dtype: torch.dtype | None, notes: list[str]) -> torch.dtype | None:
    """The dtype to use autocast with: None unless bf16 was asked for and is there."""
    if dtype is not torch.bfloat16:
        return None
    missing = bf16_missing()
    if missing is None:
        return dtype
    notes.append(f"bf16 was asked for, but {missing}: computes in the model's own dtype")
    warnings.warn(f"optimize: {notes[-1]}", EdgeweaveWarning, stacklevel=3)
    return None


def _elsewhere(
    model: nn.Module,
    example_inputs: Any,
    dtype: torch.dtype | None,
    nan: str,
    missing: str,
    notes: list[str],
) -> _Delegate:
    fuse = find_engine("graphfuse")
    why = "edgeweave.graphfuse is not there"
    if fuse is not None:
        try:
            fused = fuse(model, example_inputs, dtype=dtype, nan=nan)
        except EdgeweaveError as error:
            why = f"graphfuse says: {error}"
        else:
            notes.append(f"{missing}: runs on graphfuse")
            return _Delegate(fused, "graphfuse", dtype, nan, tuple(notes))
    notes.append(f"{missing}, and {why}: runs in eager")
    warnings.warn(f"optimize: {notes[-1]}", EdgeweaveWarning, stacklevel=3)
    return _Delegate(model, "eager", dtype, nan, tuple(notes))


def _one_form(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | dict[str, Any]:
    """Inputs as engines take them: positional ones or keywords, not both."""
    if not kwargs:
        return args
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def _quick_key(args: tuple[Any, ...]) -> Any:
    """A key for calls with nothing but plain tensors; None for others."""
    parts = []
    for x in args:
        if type(x) is not Tensor:
            return None
        parts.append((x.shape, x.dtype, x.layout, x.is_cpu))
    return tuple(parts)


def _is_ordinary(x: Tensor) -> bool:
    """Whether a tensor is one that TorchScript and the bridge can take."""
    return (
        x.layout is torch.strided
        and x.device.type == "cpu"
        and not x.is_quantized
        and not x.is_complex()
        and type(x) in (Tensor, nn.Parameter)
    )
