"""The engines that `edgeweave bench inference` compares, each made from a model and inputs.

Every engine gets the same model and returns its result as flat tensors. One that is not installed,
or does not take the model, raises `EngineUnavailableError` with the reason, which the report shows.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._fuser import fuser as torch_fuser

from edgeweave._engines import find_engine
from edgeweave.bench.environment import is_installed
from edgeweave.bench.harness import fastest
from edgeweave.bench.inference_models import Inputs
from edgeweave.jitfuser._capture import Capture, flatten

__all__ = ["ENGINES", "TORCH_NATIVE", "EngineUnavailableError", "Task", "make_eager"]

Run = Callable[[], tuple[Tensor, ...]]


class EngineUnavailableError(Exception):
    """An engine is not there, or not for this model; the message says why."""


@dataclass(frozen=True)
class Task:
    """A model to run.

    Attributes:
        model: In eval mode.
        inputs: `(args, kwargs)`.
        dtype: `torch.float32`, or `torch.bfloat16` for autocast.
    """

    model: nn.Module
    inputs: Inputs
    dtype: torch.dtype = torch.float32

    @property
    def has_images(self) -> bool:
        """Whether an input is 4-d, so that channels_last means something."""
        return any(x.dim() == 4 for x in self.inputs[0])

    def capture(self, model: nn.Module | None = None) -> tuple[Capture, tuple[Tensor, ...]]:
        """The model with flat tensors in and out, and its flat inputs."""
        tensors: list[Tensor] = []
        spec = flatten(self.inputs, tensors, "inputs")
        return Capture(self.model if model is None else model, spec).eval(), tuple(tensors)

    def in_autocast(self, run: Callable[[], Any]) -> Run:
        """Lets a call run without gradients, under autocast if that is the task."""
        enabled = self.dtype is not torch.float32

        def call() -> tuple[Tensor, ...]:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return flat(run())

        return call


def flat(result: Any) -> tuple[Tensor, ...]:
    """The tensors of a result, in order.

    Args:
        result: A tensor, or tuples, dicts and dataclasses of tensors.

    Returns:
        The tensors.
    """
    found: list[Tensor] = []
    flatten(result, found, "result")
    return tuple(found)


def make_eager(task: Task) -> Run:
    """Plain torch."""
    args, kwargs = task.inputs
    return task.in_autocast(lambda: task.model(*args, **kwargs))


def make_channels_last(task: Task) -> Run:
    """Plain torch with weights and images in channels_last."""
    if not task.has_images:
        raise EngineUnavailableError("no images among the inputs")
    to_last: Any = {"memory_format": torch.channels_last}
    model = copy.deepcopy(task.model).to(**to_last)
    args = [x.contiguous(**to_last) if x.dim() == 4 else x for x in task.inputs[0]]
    kwargs = task.inputs[1]
    return task.in_autocast(lambda: model(*args, **kwargs))


def make_fuser3(task: Task) -> Run:
    """The recipe that people write by hand, in the faster layout."""
    capture, tensors = task.capture()
    sides = {"contiguous": _recipe(task, capture, tensors)}
    if task.has_images:
        last = tuple(
            x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in tensors
        )
        sides["channels_last"] = _recipe(task, capture, last)
    return sides[fastest(sides)] if len(sides) > 1 else sides["contiguous"]


def _recipe(task: Task, capture: Capture, tensors: tuple[Tensor, ...]) -> Run:
    enabled = task.dtype is not torch.float32
    script_autocast = torch._C._jit_set_autocast_mode(False)
    try:
        with warnings.catch_warnings(), torch.no_grad(), torch_fuser("fuser3"):
            warnings.simplefilter("ignore")
            with torch.autocast("cpu", torch.bfloat16, enabled, cache_enabled=False):
                traced = torch.jit.trace(  # type: ignore[no-untyped-call]
                    capture, tensors, check_trace=False, strict=False
                )
            frozen: Any = torch.jit.freeze(traced.eval())
            for _ in range(2):
                frozen(*tensors)
    except RuntimeError as error:
        raise EngineUnavailableError(f"raised: {_last_line(error)}") from error
    finally:
        torch._C._jit_set_autocast_mode(script_autocast)

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(frozen(*tensors))

    return call


def make_inductor(task: Task) -> Run:
    """`torch.compile` with Inductor and frozen weights.

    It finds no kernels of other models or of earlier runs on the disk: its first call is what a
    new machine pays, and no engine of ours keeps anything between processes either.
    """
    import torch._dynamo
    import torch._inductor.config as config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch._inductor.utils import fresh_cache

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise EngineUnavailableError("no C++ compiler on this machine") from error
    torch._dynamo.reset()
    compiled = torch.compile(task.model)
    args, kwargs = task.inputs
    run = task.in_autocast(lambda: compiled(*args, **kwargs))
    with config.patch(freezing=True), fresh_cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    return run


def make_jitfuser(task: Task, nan: str = "propagate") -> Run:
    """`edgeweave.jitfuser.optimize`."""
    from edgeweave.jitfuser import optimize

    dtype = None if task.dtype is torch.float32 else task.dtype
    fast = optimize(task.model, task.inputs, dtype=dtype, nan=nan)
    args, kwargs = task.inputs
    return lambda: flat(fast(*args, **kwargs))


def make_jitfuser_fast(task: Task) -> Run:
    """The same, with NaN as the hand recipe treats it."""
    return make_jitfuser(task, nan="fast")


def make_graphfuse(task: Task) -> Run:
    """`edgeweave.graphfuse.fuse`."""
    fuse = find_engine("graphfuse")
    if fuse is None:
        raise EngineUnavailableError("edgeweave.graphfuse is not there")
    args, kwargs = task.inputs
    dtype = None if task.dtype is torch.float32 else task.dtype
    # It takes positional or keyword inputs; the models of the zoo have either.
    fused = fuse(task.model, kwargs or args, dtype=dtype)

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return flat(fused(*args, **kwargs))

    return call


def make_openvino(task: Task) -> Run:
    """OpenVINO's CPU plugin, in the same precision and threads."""
    if not is_installed("openvino"):
        raise EngineUnavailableError("openvino is not installed")
    import openvino

    capture, tensors = task.capture()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        converted = openvino.convert_model(capture, example_input=tensors)
    compiled = openvino.compile_model(
        converted,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": "f32" if task.dtype is torch.float32 else "bf16",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        },
    )
    arrays = [x.numpy() for x in tensors]
    request = compiled.create_infer_request()

    def call() -> tuple[Tensor, ...]:
        results = request.infer(arrays, share_inputs=True, share_outputs=True)
        return tuple(torch.from_numpy(results[port]) for port in compiled.outputs)

    return call


def make_onnxruntime(task: Task) -> Run:
    """ONNX Runtime's CPU provider, in fp32."""
    for module in ("onnxruntime", "onnx"):
        if not is_installed(module):
            raise EngineUnavailableError(f"{module} is not installed")
    if task.dtype is not torch.float32:
        raise EngineUnavailableError("its CPU provider computes in fp32")
    import onnxruntime

    capture, tensors = task.capture()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    names = [f"input{i}" for i in range(len(tensors))]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "model.onnx"
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        torch.onnx.export(
            capture, tensors, str(path), input_names=names, opset_version=18, dynamo=False
        )
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = dict(zip(names, (x.numpy() for x in tensors), strict=True))
    # Constant folding may have removed an input that only its shape was asked of.
    feed = {entry.name: feed[entry.name] for entry in session.get_inputs()}
    return lambda: tuple(torch.from_numpy(x) for x in session.run(None, feed))


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


ENGINES: Mapping[str, Callable[[Task], Run]] = {
    "jitfuser": make_jitfuser,
    "jitfuser nan=fast": make_jitfuser_fast,
    "graphfuse": make_graphfuse,
    "eager": make_eager,
    "eager channels_last": make_channels_last,
    "fuser3": make_fuser3,
    "Inductor": make_inductor,
    "OpenVINO": make_openvino,
    "ONNX Runtime": make_onnxruntime,
}
"""From the engine's name to its maker, ours first."""

TORCH_NATIVE = ("eager", "eager channels_last", "fuser3", "Inductor")
