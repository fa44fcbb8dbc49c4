"""`edgeweave.optimize`: a model, compiled by the whole pipeline."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from .._checks import describe
from .._errors import EdgeweaveWarning
from ..graphfuse._measure import time_sides
from ._adjacency import Adjacencies
from ._backend import edgeweave_backend
from ._matrix_uses import buffers_put_back
from ._measured import WORTH
from ._options import Engine, Precision, check_engine, check_precision
from ._pyg import prepare_pyg
from ._record import recording
from ._verify import device_of, verify_model

__all__ = ["Decision", "OptimizedModel", "optimize"]

_OP = "optimize"


class _Capture(threading.local):
    """Lets Dynamo capture what depends on values (masks, self-loops, sizes) or not, in this thread.

    It matters only while Dynamo captures, but when that will be is not known: so it is entered at
    each call, where a context of torch's own made anew would cost 40 us.
    """

    def __init__(self, wanted: bool) -> None:
        self.depth = 0
        self.patch: Any = torch._dynamo.config.patch(
            capture_dynamic_output_shape_ops=wanted, capture_scalar_outputs=wanted
        )

    def enter(self) -> None:
        if self.depth == 0:
            self.patch.__enter__()
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.patch.__exit__(None, None, None)


_capture, _break = _Capture(True), _Capture(False)


@dataclass(frozen=True)
class Decision:
    """Whether a model gains from being compiled, on one call.

    Attributes:
        compiled: Whether the compiled model runs from now on, and not the model itself.
        compiled_ms: Median of a compiled call; in training with its backward pass.
        model_ms: Median of a call of the model itself, in the same precision.
    """

    compiled: bool
    compiled_ms: float
    model_ms: float


class OptimizedModel(nn.Module):
    """A model that `optimize` compiles at its first call.

    It is called like the model. Parameters, training mode and checkpoints are the model's own:
    `state_dict()` has the same keys, and what is loaded or trained here is there as well.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        precision: Precision,
        training: bool | None,
        dynamic: bool | None,
        engine: Engine,
    ) -> None:
        super().__init__()
        self.original = model
        self._precision, self._training = precision, training
        self._engine, self._dynamic = engine, dynamic
        self._adjacencies = Adjacencies(model)
        self._captures = True
        # In inference, and in training.
        self._prefers_model = {False: False, True: False}
        self._decided: Decision | None = None
        self._compiled: Any = self._compile(dynamic)
        super().train(model.training)

    def _compile(self, dynamic: bool | None) -> Any:
        prepare_pyg()
        backend = functools.partial(edgeweave_backend, options={"engine": self._engine})
        return torch.compile(self.original, backend=backend, dynamic=dynamic)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled model.

        Args:
            args: As of the model.
            kwargs: As of the model.

        Returns:
            As of the model; under `precision="bf16"`, as of the model under autocast.

        Raises:
            ValueError: If `training=False` was promised and the model is in training mode.
        """
        if self._training is False and self.original.training:
            raise ValueError(
                f"{_OP}: the model must be in eval mode after training=False, got one in "
                "training mode; call .eval(), or pass training=None"
            )
        taken = self._adjacencies.replace(args, kwargs)
        if taken is None:
            return self._call(self.original, _break, args, kwargs)
        args, kwargs = taken
        if self._prefers_model[self.original.training] and self.may_decide():
            return self._call(self.original, _break, args, kwargs)
        return self._run_compiled(args, kwargs)

    def _run_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._captures:
            return self._call(self._compiled, _break, args, kwargs)
        try:
            return self._call(self._compiled, _capture, args, kwargs)
        except Exception as error:
            if not _is_of_the_compiler(error):
                raise
            failed = error
        return self._call_with_less(failed, args, kwargs)

    def _records_gradients(self) -> bool:
        return self._training is not False and torch.is_grad_enabled()

    def may_decide(self) -> bool:
        """Whether `decide` has something to decide: `engine="auto"`, in inference or training.

        Inference is eval mode without gradients, training is training mode with them.
        """
        return self._engine == "auto" and self.original.training == self._records_gradients()

    def decide(self, *args: Any, **kwargs: Any) -> Decision | None:
        """Time the compiled model against the model itself, and run the faster one from now on.

        This is what `optimize` does with `example_inputs`. It is for `engine="auto"`, in inference
        (eval mode, under `torch.no_grad()` or with `training=False`) and in training (training
        mode, with gradients: forward and backward are timed), each for itself; else the model is
        compiled, and nothing is decided.

        Args:
            args: Of a call like those to come. The model is called on them at least four times;
                its buffers are then as after one call, and no `.grad` is touched.
            kwargs: Likewise.

        Returns:
            What was decided, or None.
        """
        taken = self._adjacencies.replace(args, kwargs)
        if taken is None or not self.may_decide():
            self.forward(*args, **kwargs)
            return None
        args, kwargs = taken
        with recording() as records:
            self._run_compiled(args, kwargs)
        training = self.original.training
        wanted = _differentiable((args, kwargs, list(self.original.parameters())))

        def timed(run: Callable[[], Any]) -> Callable[[], object]:
            return (lambda: _step(run, wanted)) if training else run

        sides = {
            "compiled": timed(lambda: self._run_compiled(args, kwargs)),
            "model": timed(lambda: self._call(self.original, _break, args, kwargs)),
        }
        with torch.random.fork_rng(devices=[]), buffers_put_back(self.original):
            times = time_sides(sides)
        # What runs as it was captured costs Dynamo's checks, and must show that it is worth them.
        gains = not records or any(each.engine != "eager" or each.ops for each in records)
        needed = WORTH if gains else 1 / WORTH
        prefers_model = times["model"] * needed < times["compiled"]
        self._prefers_model[training] = prefers_model
        self._decided = Decision(not prefers_model, times["compiled"], times["model"])
        return self._decided

    @property
    def decision(self) -> Decision | None:
        """What the last `decide` has found; None if there was none, or it had nothing to decide."""
        return self._decided

    def _call_with_less(
        self, failed: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Try once more with graph breaks where sizes depend on values, then with fixed sizes.

        torch refuses some models only because such a size is in the graph (2.13: sizes that are
        looked at and not returned), or stumbles where sizes of views become open. What is the
        model's own fault fails again, and leaves everything as it was.
        """
        for dynamic in dict.fromkeys((self._dynamic, self._dynamic or False)):
            compiled = self._compile(dynamic)
            try:
                out = self._call(compiled, _break, args, kwargs)
            except Exception as error:
                if not _is_of_the_compiler(error):
                    raise
                continue
            self._compiled, self._captures = compiled, False
            fixed = ", and compiles for each size anew" if dynamic is not self._dynamic else ""
            text = next(iter(str(failed).strip().splitlines()), type(failed).__name__)
            warnings.warn(
                f"{_OP}: torch could not compile {type(self.original).__name__} in one graph, so "
                f"it breaks where sizes depend on values{fixed} ({text})",
                EdgeweaveWarning,
                stacklevel=4,
            )
            return out
        raise failed

    def _call(
        self, compiled: Any, capture: _Capture, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        capture.enter()
        try:
            if self._training is not False and self._precision == "fp32":
                return compiled(*args, **kwargs)
            grads: Any = torch.no_grad() if self._training is False else nullcontext()
            cast: Any = nullcontext()
            if self._precision == "bf16":
                cast = torch.autocast(device_of((*args, *kwargs.values())), torch.bfloat16)
            with grads, cast:
                return compiled(*args, **kwargs)
        finally:
            capture.leave()

    def train(self, mode: bool = True) -> OptimizedModel:
        """Set the mode of the model."""
        self.original.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, with its keys."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model."""
        return self.original.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "original":
                raise
            return getattr(super().__getattr__("original"), name)


def _differentiable(values: Any) -> list[Tensor]:
    """The tensors among some values that gradients are recorded of, each once."""
    found = {id(v): v for v in pytree.tree_leaves(values) if isinstance(v, Tensor)}
    return [v for v in found.values() if v.requires_grad]


def _step(run: Callable[[], Any], wanted: list[Tensor]) -> None:
    """A call and its backward pass, whose gradients nobody gets."""
    totals = [v.sum() for v in _differentiable(run())]
    if totals and wanted:
        torch.autograd.grad(totals, wanted, allow_unused=True)


def _is_of_the_compiler(error: Exception) -> bool:
    """Whether torch's compiler raised an error, and not the model or a kernel."""
    if isinstance(error, TorchDynamoException):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    module = "" if last is None else str(last.tb_frame.f_globals.get("__name__", ""))
    # `eval_frame` also calls what was compiled.
    return module.startswith("torch._dynamo.") and module != "torch._dynamo.eval_frame"


def optimize(
    model: nn.Module,
    example_inputs: Sequence[Any] | None = None,
    *,
    precision: Precision = "fp32",
    training: bool | None = None,
    dynamic: bool | None = None,
    engine: Engine = "auto",
    verify: bool = False,
) -> OptimizedModel:
    """Compile a model: graph passes, then oneDNN, Inductor or ATen for what they leave.

    Args:
        model: Any module; graph layers as PyG or you wrote them, with or without `accelerate()`.
        example_inputs: Positional arguments of one call. If given, the model is compiled now and
            not at its first call; and `engine="auto"` takes the model itself where that is faster
            on them (`OptimizedModel.decide`).
        precision: "fp32" leaves dtypes alone, "bf16" runs the model under bfloat16 autocast.
        training: False promises inference: no gradients are recorded, and the model must be in
            eval mode. True promises gradients, and so excludes oneDNN. None takes each call as it
            comes.
        dynamic: As of `torch.compile`: None compiles for the first sizes and once more for all
            others, True once for all sizes, False for each size anew.
        engine: What runs what the passes leave. "auto" picks for each graph: in inference on the
            CPU it times oneDNN, Inductor and ATen on the first inputs and keeps the fastest, else
            it takes Inductor. "eager" runs ATen operators and compiles nothing.
        verify: Compare with the model itself and with it in float64, on the examples.

    Returns:
        The compiled model, sharing its weights with the original.

    Raises:
        TypeError: If `model` is no module, or `example_inputs` no sequence.
        ValueError: If `precision` or `engine` has no such name, `verify` is asked for without
            `example_inputs`, or `training=True` goes with `engine="onednn"`.
        VerificationError: If `verify` finds a result that is further from float64 than eager's.

    Example:
        >>> import torch
        >>> import edgeweave
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> compiled = edgeweave.optimize(model, engine="eager")
        >>> x = torch.randn(3, 4)
        >>> bool(torch.allclose(compiled(x), model(x)))
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_OP}: model must be a torch.nn.Module, got {describe(model)}")
    check_precision(_OP, precision)
    check_engine(_OP, engine)
    for name, value in (("training", training), ("dynamic", dynamic)):
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{_OP}: {name} must be True, False or None, got {describe(value)}")
    if training and engine == "onednn":
        raise ValueError(
            f"{_OP}: engine must not be 'onednn' with training=True, got both; oneDNN partitions "
            "are for inference"
        )
    if example_inputs is not None and not isinstance(example_inputs, (tuple, list)):
        raise TypeError(
            f"{_OP}: example_inputs must be a tuple of arguments, got {describe(example_inputs)}"
        )
    if verify and example_inputs is None:
        raise ValueError(f"{_OP}: example_inputs must be given for verify=True, got None")
    if isinstance(model, OptimizedModel):
        model = model.original
    compiled = OptimizedModel(
        model, precision=precision, training=training, dynamic=dynamic, engine=engine
    )
    if example_inputs is not None:
        if verify:
            verify_model(compiled, example_inputs, precision)
        # Verification has compiled it, and puts running statistics back, which a call changes.
        if not verify or compiled.may_decide():
            compiled.decide(*example_inputs)
    return compiled
