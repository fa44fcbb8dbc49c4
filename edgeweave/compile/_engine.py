"""Which engine gets a graph, and handing it over."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .._errors import EdgeweaveWarning
from ..graphfuse._module import has_bf16
from ._buffers import large_buffers
from ._contents import dense_chain, first_foreign_op, tells_zeros_apart
from ._options import Options
from ._passes import pipeline_id
from ._reading import tensor_of

__all__ = [
    "build_with_inductor",
    "choose_engine",
    "hand_over",
    "has_compiler",
    "has_onednn",
    "records_gradients",
]

Compiled = Callable[..., Any]

_said: set[str] = set()
_lock = threading.Lock()


def _say_once(text: str) -> None:
    with _lock:
        if text in _said:
            return
        _said.add(text)
    warnings.warn(text, EdgeweaveWarning, stacklevel=4)


def records_gradients(example_inputs: Sequence[Any]) -> bool:
    """Whether a backward pass can follow a graph with these inputs."""
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in example_inputs
    )


def has_compiler(device: str) -> bool:
    """Whether Inductor can build code for a kind of device here: C++ for the CPU, else Triton."""
    if device != "cpu":
        return bool(torch.utils._triton.has_triton())
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError):
        return False
    return True


def _device_of(example_inputs: Sequence[Any]) -> str:
    kinds = {value.device.type for value in example_inputs if isinstance(value, Tensor)}
    others = sorted(kinds - {"cpu", "meta"})
    return others[0] if others else "cpu"


def has_onednn() -> bool:
    from ..graphfuse import OneDnnUnavailableError, load_library

    try:
        load_library()
    except OneDnnUnavailableError:
        return False
    return True


def _odd_size(module: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """What sizes a graph has that the oneDNN backend, which captures it anew, cannot know."""
    for node in module.graph.nodes:
        if free_unbacked_symbols(node.meta.get("example_value")):
            return "has sizes that depend on values"
    # The inputs are real; their sizes as symbols are with the placeholders.
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    tensors = [tensor for node in given if (tensor := tensor_of(node)) is not None]
    sizes = {str(size) for tensor in tensors for size in tensor.shape}
    if any(isinstance(value, torch.SymInt) and str(value) not in sizes for value in example_inputs):
        return "is given a size that no tensor has"
    return ""


def _unfit_for_onednn(module: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Why a graph cannot go to oneDNN, as in "a graph that ..."; empty if it can."""
    if records_gradients(example_inputs):
        return "records gradients"
    device = _device_of(example_inputs)
    if device != "cpu":
        return f"is on {device}"
    if torch.is_autocast_enabled("cpu"):
        if torch.get_autocast_dtype("cpu") != torch.bfloat16:
            return f"is under autocast to {torch.get_autocast_dtype('cpu')}"
        if not has_bf16():
            return "is under autocast on a processor that only emulates bfloat16"
    foreign = first_foreign_op(module)
    return f"calls {foreign}" if foreign else _odd_size(module, example_inputs)


def choose_engine(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> tuple[str, str]:
    """Decide who runs a graph.

    The rule of `engine="auto"`: a graph on the CPU that records no gradients, is not under
    autocast where bfloat16 would be emulated, has a convolution or two matrix products with nothing
    but pointwise calls between them, calls no op but ATen's (so none of edgeweave's), and has no
    sizes that depend on values, goes to oneDNN if its library is there. All others go to Inductor.
    Whatever was asked for, what Inductor cannot build for want of a compiler runs as ATen.

    Args:
        module: The graph, after the passes.
        example_inputs: Its inputs.
        options: What was asked for.

    Returns:
        (`inductor`, `onednn` or `eager`; why).
    """
    if options.engine == "eager":
        return "eager", "asked for"
    unfit = _unfit_for_onednn(module, example_inputs)
    if options.engine == "onednn":
        if not unfit:
            return "onednn", "asked for"
        _say_once(
            "edgeweave.compile: engine='onednn' is for inference with ATen operators in float32 on "
            f"the CPU, and a graph that {unfit} goes to Inductor"
        )
    chain = "" if unfit else dense_chain(module)
    if options.engine == "auto" and chain and has_onednn():
        return "onednn", f"inference on the CPU with {chain}"
    device = _device_of(example_inputs)
    if not has_compiler(device):
        what = "C++ compiler" if device == "cpu" else "Triton"
        _say_once(
            f"edgeweave.compile: no {what} was found, so graphs run as ATen operators after the "
            f"graph passes; install one, or ask for engine='eager' to run without this warning"
        )
        return "eager", f"no {what}"
    if options.engine == "inductor":
        return "inductor", "asked for"
    return "inductor", f"it {unfit}" if unfit else "no dense chain for oneDNN"


class _Identity(CustomGraphPass):
    """Changes nothing; its id makes Inductor's cache tell versions of the pipeline apart."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, graph: fx.Graph) -> None:
        """Leave the graph as it is."""

    def uuid(self) -> str:
        """The id of the pipeline."""
        return self.key


def hand_over(
    engine: str, module: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Compiled:
    """Compile a graph with an engine.

    Args:
        engine: `inductor`, `onednn` or `eager`.
        module: The graph.
        example_inputs: Its inputs.
        options: What was asked for.

    Returns:
        What runs in the graph's place.
    """
    if engine == "onednn":
        from ..graphfuse import edgeweave_onednn

        return edgeweave_onednn(module, example_inputs)
    if engine == "eager" and not records_gradients(example_inputs):
        # Nothing to differentiate: the graph as it is, in which torch's own shapes are right (2.13:
        # the strides that AOTAutograd expects of a batch norm over turned features are not).
        return module.forward
    if engine == "eager":
        from torch._dynamo.backends.debugging import aot_eager

        as_aten: Compiled = aot_eager(module, list(example_inputs))
        return as_aten
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(*args: Any, **kwargs: Any) -> Any:
        # Backward passes may be compiled later, at their first call.
        with large_buffers():
            return compile_fx_inner(*args, **kwargs)

    patches: dict[str, Any] = {}
    if inductor_config.post_grad_custom_pre_pass is None:
        patches["post_grad_custom_pre_pass"] = _Identity(pipeline_id(options.without))
    if tells_zeros_apart(module):
        # Written out, a short sum of zeros that are all negative is -0.0; torch's begins with 0.0.
        patches["unroll_reductions_threshold"] = 1
    with large_buffers():
        compiled: Any = compile_fx(
            module, list(example_inputs), inner_compile=inner, config_patches=patches
        )
    built: Compiled = compiled
    return built


def build_with_inductor(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Compiled | str:
    """Compile a graph with Inductor; with `engine="auto"`, say why it could not be.

    Args:
        module: The graph.
        example_inputs: Its inputs.
        options: What was asked for.

    Returns:
        What runs in the graph's place; or the reason, which has also been said, once.

    Raises:
        InductorError: If Inductor fails and was asked for by name.
    """
    from torch._inductor.exc import InductorError

    try:
        return hand_over("inductor", module, example_inputs, options)
    except InductorError as error:
        if options.engine != "auto":
            raise
        kind = type(error.inner_exception).__name__
        _say_once(
            f"edgeweave.compile: Inductor cannot build a graph ({kind}), so it runs as ATen "
            "operators after the graph passes; ask for engine='inductor' to see the error"
        )
        return f"Inductor raises {kind}"
