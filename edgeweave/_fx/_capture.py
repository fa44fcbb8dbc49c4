"""From a module to a captured graph, through `torch.export`."""

from __future__ import annotations

import gc
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from ._graph import Captured, Meta, Node, Ref, Source, Sym, Symbol, row_strides
from ._sizes import SizeError, compile_size
from ._structure import Structure, flatten, flatten_call, unflatten

__all__ = ["CaptureError", "capture", "no_collections", "nodes_from_module"]

# Checks of sizes and dtypes that the capture itself has made; they compute nothing.
_ASSERTIONS = re.compile(r"aten\.(_assert_tensor_metadata|_assert_scalar|sym_constrain_range)")

# torch.export keeps what it is at in globals: two at a time fail in each other's.
_EXPORTING = threading.RLock()


class CaptureError(RuntimeError):
    """A model cannot be turned into a graph; the message says why."""


class _Flat(nn.Module):
    """Takes and returns flat lists of tensors, so that export need not know any container."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        leaves: list[Any],
        note: Callable[[list[Any], Structure], None],
    ) -> None:
        super().__init__()
        self.model = model
        self._structure = structure
        self._leaves = leaves
        self._note = note

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, Tensor) else x for x in self._leaves]
        args, kwargs = unflatten(self._structure, leaves)
        outputs, output_structure = flatten(self.model(*args, **kwargs))
        self._note(outputs, output_structure)
        return tuple(leaf for leaf in outputs if isinstance(leaf, Tensor))


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Any = None
) -> Captured:
    """Capture a model in evaluation mode as ATen calls.

    Args:
        model: The module. Its forward must be free of side effects.
        args: Example positional arguments; containers may nest.
        kwargs: Example keyword arguments.
        dynamic: None or False for fixed shapes; True for every size that the model allows to
            change; or, for each flat tensor input, a collection of dimensions that may change
            (None for none).

    Raises:
        CaptureError: If `torch.export` refuses the model, or the model changes its own state.
    """
    # As calls are taken apart, so that their structure is the same object, not only equal.
    leaves, structure = flatten_call(tuple(args), dict(kwargs))
    if dynamic is False:
        dynamic = None
    if dynamic is not None:
        leaves = [_dense(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # A closure takes the outputs, since export puts attributes of modules back as they were.
    seen: list[tuple[list[Any], Structure]] = []
    flat = _Flat(model, structure, leaves, lambda found, nest: seen.append((found, nest)))
    with _EXPORTING:
        program = _export(flat, tensors, dynamic)
    _refuse_mutation(program)
    return _convert(program, model, leaves, structure, seen[-1])


def _dense(x: Tensor) -> Tensor:
    """The same without gaps: a slice's strides would be symbols that no size of it tells."""
    if x.layout != torch.strided or x.numel() == 0:
        return x
    if x.is_contiguous():  # but the stride of a dimension of size 1 may be anything
        return x.as_strided(x.shape, row_strides(x.shape))
    return x if torch.empty_like(x).stride() == x.stride() else x.contiguous()


@contextmanager
def no_collections() -> Iterator[None]:
    """Run without collections of garbage; what is garbage goes at the next one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _shapes(tensors: list[Tensor], dynamic: Any) -> Any:
    if dynamic is None:
        return None
    auto, static = torch.export.Dim.AUTO, torch.export.Dim.STATIC
    specs = []
    for position, tensor in enumerate(tensors):
        wanted = range(tensor.dim()) if dynamic is True else (dynamic[position] or ())
        # Sizes 0 and 1 broadcast, or not at all: torch.export never leaves them open.
        free = {d for d, size in enumerate(tensor.shape) if d in wanted and size > 1}
        specs.append({d: auto if d in free else static for d in range(tensor.dim())})
    return (tuple(specs),)


def _convert_einsum_operands(graph: fx.Graph) -> None:
    """Put the conversions that autocast makes within an einsum in front of it.

    It acts on the products of which an einsum is made, when it runs; the graph runs without it.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.einsum.default:
            continue
        dtype = node.meta["val"].dtype
        operands = []
        for operand in node.args[1]:
            value = operand.meta["val"]
            if dtype in (torch.bfloat16, torch.float16) and value.dtype != dtype:
                with graph.inserting_before(node):
                    operand = graph.call_function(
                        torch.ops.aten._to_copy.default, (operand,), {"dtype": dtype}
                    )
                operand.meta["val"] = value.to(dtype)
            operands.append(operand)
        node.args = (node.args[0], operands, *node.args[2:])


def _export(flat: _Flat, tensors: list[Tensor], dynamic: Any) -> torch.export.ExportedProgram:
    try:
        # A trace makes many objects that live, beside all of torch's: collections are a third of a
        # second of it.
        with torch.no_grad(), no_collections(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own advice on exporting
            program = torch.export.export(
                flat, tuple(tensors), dynamic_shapes=_shapes(tensors, dynamic), strict=False
            )
            _convert_einsum_operands(program.graph_module.graph)
            # Functional, with composite operations such as linear and attention kept whole.
            functional: torch.export.ExportedProgram = program.run_decompositions({})
            return functional
    except Exception as error:  # torch.export raises dozens of types, all meaning "cannot"
        text = str(error).strip().splitlines()
        raise CaptureError(
            f"torch.export cannot capture {type(flat.model).__name__}: "
            f"{type(error).__name__}: {text[0] if text else ''}"
        ) from error


def _refuse_mutation(program: torch.export.ExportedProgram) -> None:
    signature = program.graph_signature
    # Buffers, parameters (an embedding with max_norm) and inputs.
    changed = [spec.target for spec in signature.output_specs if "MUTATION" in spec.kind.name]
    if changed:
        raise CaptureError(
            f"the model must not change its state or inputs in forward, it changes {changed[0]}; "
            "call model.eval() if this is a running statistic"
        )


def _size(value: Any) -> int | str:
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        if expression.is_number:
            return int(expression)
        text = str(expression)
        try:
            compile_size(text)
        except SizeError as error:
            raise CaptureError(f"a size of the model is too involved: {error}") from error
        return text
    raise CaptureError(f"a size must be an integer, got {value!r}")


def _meta(value: Any) -> Meta | None:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    shape = tuple(_size(size) for size in value.shape)
    return Meta(shape, tuple(_size(size) for size in value.stride()), value.dtype)


def _argument(value: Any) -> Any:
    if isinstance(value, fx.Node):
        found = value.meta.get("val")
        if isinstance(found, torch.SymInt):
            size = _size(found)
            return size if isinstance(size, int) else Sym(size)
        if isinstance(found, torch.SymFloat | torch.SymBool):
            raise CaptureError("a number of the model depends on the input's sizes")
        if isinstance(found, int | float | bool):
            return found
        return Ref(value.name)
    if isinstance(value, torch.SymInt):
        size = _size(value)
        return size if isinstance(size, int) else Sym(size)
    if isinstance(value, list | tuple):
        return (
            type(value)(_argument(item) for item in value)
            if type(value) in (list, tuple)
            else [_argument(item) for item in value]
        )
    if isinstance(value, dict):
        return {key: _argument(item) for key, item in value.items()}
    return value


def _target(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    name = getattr(node.target, "__name__", str(node.target))
    if name == "getitem":
        return name
    raise CaptureError(f"the graph has {name}, which is not an operator of ATen")


def nodes_from_module(module: fx.GraphModule, skip: Callable[[fx.Node], bool]) -> list[Node]:
    """The calls of an ATen-level graph module."""
    nodes = []
    for node in module.graph.nodes:
        if node.op != "call_function" or skip(node):
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
            continue  # sizes are expressions wherever they are used
        target = _target(node)
        if _ASSERTIONS.match(target):
            continue
        nodes.append(
            Node(
                node.name,
                target,
                tuple(_argument(argument) for argument in node.args),
                {key: _argument(argument) for key, argument in node.kwargs.items()},
                _meta(value),
            )
        )
    return nodes


def _source(model: nn.Module, name: str) -> Source:
    path, _, attribute = name.removeprefix("model.").rpartition(".")
    try:
        return Source(model.get_submodule(path), attribute)
    except AttributeError:
        return Source(None, attribute)


def _convert(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    leaves: list[Any],
    structure: Structure,
    result: tuple[list[Any], Structure],
) -> Captured:
    signature = program.graph_signature
    lifted = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    constants: dict[str, Tensor] = {}
    sources: dict[str, Source] = {}
    names: list[str | None] = []
    metas: list[Meta | None] = []
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        if node.name in lifted:
            origin = lifted[node.name]
            tensor = program.state_dict.get(origin)
            if tensor is None:
                tensor = program.constants[origin]
            sources[node.name] = _source(model, origin)
            constants[node.name] = sources[node.name].find(tensor)[1]
        else:
            names.append(node.name)
            metas.append(_meta(node.meta.get("val")))
    inputs: list[str | None] = []
    input_metas: list[Meta | None] = []
    remaining = iter(zip(names, metas, strict=True))
    for leaf in leaves:
        name, meta = next(remaining) if isinstance(leaf, Tensor) else (None, None)
        inputs.append(name)
        input_metas.append(meta)
    nodes = nodes_from_module(program.graph_module, lambda node: False)
    (last,) = (node for node in program.graph.nodes if node.op == "output")
    tensors = iter([_argument(value) for value in last.args[0]])
    outputs = [next(tensors) if isinstance(x, Tensor) else x for x in result[0]]
    return Captured(
        inputs,
        input_metas,
        constants,
        sources,
        nodes,
        outputs,
        _symbols(program, input_metas),
        structure,
        result[1],
        {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)},
    )


def _symbols(program: torch.export.ExportedProgram, metas: list[Meta | None]) -> dict[str, Symbol]:
    ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    found: dict[str, Symbol] = {}
    for position, meta in enumerate(metas):
        for dim, size in enumerate(meta.shape if meta is not None else ()):
            if not isinstance(size, str) or size in found or not size.isidentifier():
                continue
            bounds = ranges.get(size)
            least, most = (bounds.lower, bounds.upper) if bounds is not None else (0, None)
            limit = int(most) if most is not None and most.is_Integer else None
            found[size] = Symbol(position, dim, int(least), limit)
    return found
