"""Saving and loading: weights as safetensors, the graph as JSON. Nothing in either is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._fx import (
    Captured,
    Meta,
    Node,
    Ref,
    Source,
    Sym,
    Symbol,
    structure_from_json,
    structure_to_json,
)
from .._fx._simplify import OWN_OPERATORS, operator_of
from ._engine import Engine
from ._library import load_library

if TYPE_CHECKING:
    from ._module import FusedModule

__all__ = ["load", "save_engine"]

_FORMAT = "edgeweave-graphfuse/1"
_MARK = "$"
_TORCH_VALUES = (torch.dtype, torch.memory_format, torch.layout)


def _encode(value: Any) -> Any:
    if isinstance(value, Ref):
        return {_MARK: "ref", "name": value.name}
    if isinstance(value, Sym):
        return {_MARK: "size", "text": value.expression}
    if isinstance(value, _TORCH_VALUES):
        return {_MARK: type(value).__name__, "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_MARK: "device", "name": str(value)}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, tuple):
        return {_MARK: "tuple", "items": [_encode(item) for item in value]}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {_MARK: "float", "text": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"save: an argument of the graph must be plain data, got {value!r}")


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    kind = data.get(_MARK)
    if kind == "ref":
        return Ref(data["name"])
    if kind == "size":
        return Sym(data["text"])
    if kind == "tuple":
        return tuple(_decode(item) for item in data["items"])
    if kind == "float":
        return float(data["text"])
    if kind == "device":
        return torch.device(data["name"])
    if kind in ("dtype", "memory_format", "layout"):
        found = getattr(torch, data["name"], None)
        if isinstance(found, _TORCH_VALUES):
            return found
    raise ValueError(f"load: graph.json must hold known values, got {data!r}")


def _encode_meta(meta: Meta | None) -> Any:
    if meta is None:
        return None
    return [list(meta.shape), list(meta.stride), str(meta.dtype).removeprefix("torch.")]


def _decode_meta(data: Any) -> Meta | None:
    if data is None:
        return None
    dtype = getattr(torch, data[2])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"load: graph.json must name a dtype, got {data[2]!r}")
    return Meta(tuple(data[0]), tuple(data[1]), dtype)


def save_engine(engine: Engine, settings: Mapping[str, Any], directory: Path) -> None:
    """Write `graph.json` and `weights.safetensors`."""
    from safetensors.torch import save_file

    captured = engine.captured
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: captured.sources[name].find(tensor)[1].detach()
        for name, tensor in captured.constants.items()
    }
    # safetensors refuses shared memory: weights under two names are written twice.
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
        directory / "weights.safetensors",
    )
    graph = {
        "format": _FORMAT,
        "settings": {key: settings[key] for key in ("dtype", "nan", "keep", "example_symbols")},
        "inputs": captured.inputs,
        "input_metas": [_encode_meta(meta) for meta in captured.input_metas],
        "nodes": [
            {
                "name": node.name,
                "target": node.target,
                "args": _encode(list(node.args)),
                "kwargs": {key: _encode(value) for key, value in node.kwargs.items()},
                "meta": _encode_meta(node.meta),
            }
            for node in captured.nodes
        ],
        "outputs": _encode(list(captured.outputs)),
        "symbols": {name: asdict(symbol) for name, symbol in captured.symbols.items()},
        "input_structure": structure_to_json(captured.input_structure),
        "output_structure": structure_to_json(captured.output_structure),
        "literals": {str(position): _encode(v) for position, v in captured.literals.items()},
        "strides": {name: list(tensor.stride()) for name, tensor in tensors.items()},
        "forced": engine.forced,
        "packed": engine.packed,
        "fused": engine.fused,
    }
    text = json.dumps(graph, indent=1)
    (directory / "graph.json").write_text(text + "\n", encoding="utf-8")


def load(directory: str | os.PathLike[str]) -> FusedModule:
    """Load what `FusedModule.save` has saved.

    No pickled code is executed: the graph is data, and names operators of ATen only. Outputs of
    classes that a model library defines come back as plain dicts. Sizes other than those captured
    raise, since there is no model to capture again.

    Args:
        directory: With `graph.json` and `weights.safetensors`.

    Returns:
        The fused module, compiled at its first call.

    Raises:
        ValueError: If the files are of another format, or name anything but ATen operators.
        OneDnnUnavailableError: If no usable libdnnl is installed.

    Example:
        >>> import tempfile, torch
        >>> from edgeweave import graphfuse
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> x = torch.ones(3, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     graphfuse.fuse(model, x, keep="all").save(folder)
        ...     loaded = graphfuse.load(folder)
        >>> bool(torch.allclose(loaded(x), model(x), atol=1e-6))
        True
    """
    from safetensors.torch import load_file

    from ._module import FusedModule, check_dtype

    path = Path(directory)
    graph = json.loads((path / "graph.json").read_text(encoding="utf-8"))
    if graph.get("format") != _FORMAT:
        raise ValueError(f"load: graph.json must have format {_FORMAT}, got {graph.get('format')}")
    library = load_library()
    constants = load_file(path / "weights.safetensors")
    settings = {
        **graph["settings"],
        "dynamic": False,
        "library": library.version,
        "capture_s": 0.0,
    }
    check_dtype("load", settings["dtype"], settings["dtype"])
    captured = _captured(graph, constants)
    fpmath = "bf16" if settings["dtype"] == "bf16-math" else "strict"
    engine = Engine(captured, fpmath=fpmath, guard=settings["nan"] == "propagate")
    engine.forced = dict(graph["forced"])
    engine.packed = {name: str(how) for name, how in graph.get("packed", {}).items()}
    engine.fused = bool(graph["fused"])
    return FusedModule(None, [engine], settings, None)


def _captured(graph: Mapping[str, Any], constants: dict[str, torch.Tensor]) -> Captured:
    nodes = []
    for data in graph["nodes"]:
        operator_of(data["target"])  # refuses what is not of ATen
        if data["target"] in OWN_OPERATORS:  # passes put them in; no captured graph has any
            raise ValueError(f"graph: operator must be of ATen, got {data['target']!r}")
        kwargs = {key: _decode(value) for key, value in data["kwargs"].items()}
        args = tuple(_decode(data["args"]))
        nodes.append(Node(data["name"], data["target"], args, kwargs, _decode_meta(data["meta"])))
    strided = {}
    for name, strides in graph["strides"].items():
        tensor = constants[name]
        if tuple(strides) != tensor.stride() and 0 not in strides:
            tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
        strided[name] = tensor
    return Captured(
        graph["inputs"],
        [_decode_meta(meta) for meta in graph["input_metas"]],
        strided,
        {name: Source(None, name) for name in strided},
        nodes,
        _decode(graph["outputs"]),
        {name: Symbol(**symbol) for name, symbol in graph["symbols"].items()},
        structure_from_json(graph["input_structure"]),
        structure_from_json(graph["output_structure"]),
        {int(position): _decode(value) for position, value in graph["literals"].items()},
    )
