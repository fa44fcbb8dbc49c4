"""A model's config.toml (or config.json), read strictly."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ._batch import BatchSettings
from ._errors import ModelConfigError
from ._fields import Fields
from ._types import DATATYPES, Limits, TensorSpec

__all__ = ["GraphConfig", "ModelConfig", "parse_model_config", "parse_toml", "read_table"]

KINDS: Final = ("tensors", "graphs", "resident_graph")
PRECISIONS: Final = ("fp32", "bf16")
READOUTS: Final = ("", "sum", "mean", "amax")
GRAPH_ARGUMENTS: Final = ("x", "edge_index", "batch", "edge_attr")
_MAX_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class GraphConfig:
    """What is particular to models on graphs.

    Attributes:
        features: Features of a node.
        edge_features: Features of an edge; 0 for none.
        channels: Columns of the output.
        level: `graph` or `node`: what a row of the output stands for.
        readout: How node rows become graph rows where the module does not do it itself.
        call: Arguments of the module, in order.
        max_nodes: Nodes of one batch.
        max_edges: Edges of one batch.
        file: safetensors file of the resident graph: `x` and `edge_index`.
        hops: How far the output of a node depends on others.
        cache: Keep the predictions of all nodes per graph version.
        max_seeds: Node ids of one batch.
        updates: Whether GraphService may change the graph.
    """

    features: int
    edge_features: int = 0
    channels: int = 1
    level: str = "graph"
    readout: str = ""
    call: tuple[str, ...] = ("x", "edge_index")
    max_nodes: int = 1 << 16
    max_edges: int = 1 << 19
    file: str = "graph.safetensors"
    hops: int = 2
    cache: bool = False
    max_seeds: int = 4096
    updates: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """Everything a version's folder says about it.

    Attributes:
        kind: `tensors`, `graphs` or `resident_graph`.
        architecture: Name of the module's class; "" for an archive.
        arguments: What the class is called with.
        weights: safetensors file.
        archive: `.pt2` file instead of an architecture.
        engine: What runs the module.
        precision: `fp32` or `bf16`.
        keywords: Whether the module takes its inputs by name.
        max_batch_size: Rows of a batch; 0 where the module has no batch dimension.
        inputs: Of the module; empty for graph kinds, whose inputs are fixed.
        outputs: Of the module.
        batching: How requests wait.
        instances: Threads that run the model; 0 for the server's default.
        threads: Torch threads of each; 0 for an equal share.
        pin: Bind each instance to processors of its own.
        warmup: Shapes to run before the first request.
        graph: For graph kinds.
    """

    kind: str
    architecture: str
    arguments: dict[str, Any]
    weights: str
    archive: str
    engine: str
    precision: str
    keywords: bool
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: BatchSettings
    instances: int
    threads: int
    pin: bool
    warmup: tuple[dict[str, tuple[int, ...]], ...]
    graph: GraphConfig | None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML.

    Args:
        text: The text.
        where: What it is, for errors.

    Returns:
        The table.

    Raises:
        ModelConfigError: It is no TOML.
    """
    # Python has its own parser from 3.11 on; the extra `server` brings the same code for 3.10.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table: dict[str, Any] = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ModelConfigError(f"{where}: must be TOML, got {error}") from None
    return table


def read_table(file: Path, where: str) -> dict[str, Any]:
    """Read a TOML or JSON file, by its suffix.

    Args:
        file: The file.
        where: What it is, for errors.

    Returns:
        The table.

    Raises:
        ModelConfigError: It cannot be read or parsed.
    """
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ModelConfigError(f"{where}: must have at most {_MAX_FILE_BYTES} bytes")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelConfigError(f"{where}: must be readable, got {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelConfigError(f"{where}: must be UTF-8 text") from None
    if file.suffix != ".json":
        return parse_toml(text, where)
    try:
        table = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelConfigError(f"{where}: must be JSON, got {error}") from None
    if not isinstance(table, dict):
        raise ModelConfigError(f"{where}: must be an object, got {type(table).__name__}")
    return table


def parse_model_config(table: object, where: str = "config") -> ModelConfig:
    """Check a model's configuration.

    Args:
        table: What was read.
        where: What it is, for errors.

    Returns:
        The configuration.

    Raises:
        ModelConfigError: A key is unknown, missing, or of the wrong type or value.
    """
    top = Fields(where, table)
    kind = top.choice("kind", KINDS, "tensors")
    architecture = top.table("architecture")
    arguments = architecture.take("arguments", dict, {})
    config = ModelConfig(
        kind=kind,
        architecture=architecture.take("name", str, ""),
        arguments=arguments,
        weights=_file_name(top, "weights", "model.safetensors"),
        archive=_file_name(top, "archive", ""),
        engine=top.take("engine", str, "eager"),
        precision=top.choice("precision", PRECISIONS, "fp32"),
        keywords=top.take("keywords", bool, False),
        max_batch_size=top.count("max_batch_size", 0, most=1 << 20),
        inputs=tuple(_spec(item) for item in top.tables("inputs")),
        outputs=tuple(_spec(item) for item in top.tables("outputs")),
        batching=_batching(top.table("batching")),
        warmup=tuple(_shapes(item) for item in top.tables("warmup")),
        graph=_graph(top.table("graph"), kind) if kind != "tensors" else None,
        **_instances(top.table("instances")),
    )
    architecture.end()
    top.end()
    _check(config, where)
    return config


def _check(config: ModelConfig, where: str) -> None:
    if bool(config.architecture) == bool(config.archive):
        raise ModelConfigError(f"{where}: must name either an architecture or an archive")
    if config.kind != "tensors":
        if config.inputs or config.outputs:
            raise ModelConfigError(
                f"{where}: inputs and outputs must be left out for kind {config.kind}, "
                "which fixes them"
            )
        return
    for role, specs in (("inputs", config.inputs), ("outputs", config.outputs)):
        names = [spec.name for spec in specs]
        if not names or len(set(names)) != len(names):
            raise ModelConfigError(f"{where}: {role} must be given, with names that differ")
        for spec in specs if config.max_batch_size else ():
            if not spec.shape or spec.shape[0] != -1:
                raise ModelConfigError(
                    f"{where}: shape of {spec.name} must begin with -1, the batch, where "
                    f"max_batch_size is not 0; got {list(spec.shape)}"
                )


def _file_name(top: Fields, key: str, default: str) -> str:
    name = top.take(key, str, default)
    if name and (Path(name).name != name or name in (".", "..")):
        raise ModelConfigError(f"{top.where}: {key} must be a file name, got {name!r}")
    return name


def _spec(item: Fields) -> TensorSpec:
    name = item.take("name", str)
    datatype = item.choice("datatype", DATATYPES)
    shape = item.integers("shape")
    item.end()
    if not name:
        raise ModelConfigError(f"{item.where}: name must not be empty")
    if len(shape) > Limits().rank or any(size < -1 for size in shape):
        raise ModelConfigError(
            f"{item.where}: shape must have at most {Limits().rank} sizes, each -1 or more, "
            f"got {list(shape)}"
        )
    return TensorSpec(name, datatype, shape)


def _batching(item: Fields) -> BatchSettings:
    default = BatchSettings()
    settings = BatchSettings(
        max_queue_delay_us=item.count("max_queue_delay_us", default.max_queue_delay_us),
        queue_requests=item.count("queue_requests", default.queue_requests, least=1),
        queue_bytes=item.count("queue_bytes", default.queue_bytes, least=1),
        priority_levels=item.count("priority_levels", default.priority_levels, least=1),
        timeout_us=item.count("timeout_us", default.timeout_us),
    )
    item.end()
    return settings


def _instances(item: Fields) -> dict[str, Any]:
    found = {
        "instances": item.count("count", 0, most=1024),
        "threads": item.count("threads", 0, most=4096),
        "pin": item.take("pin", bool, False),
    }
    item.end()
    return found


def _shapes(item: Fields) -> dict[str, tuple[int, ...]]:
    names = list(item.rest_keys())
    shapes = {name: item.integers(name) for name in names}
    for name, shape in shapes.items():
        if any(size < 0 for size in shape):
            raise ModelConfigError(f"{item.where}: {name} must have no negative size")
    return shapes


def _graph(item: Fields, kind: str) -> GraphConfig:
    resident = kind == "resident_graph"
    default = GraphConfig(features=1)
    call = item.strings("call", default.call)
    graph = GraphConfig(
        features=item.count("features", 0, least=1, most=1 << 20),
        edge_features=item.count("edge_features", 0, most=1 << 16),
        channels=item.count("channels", 1, least=1, most=1 << 20),
        level=item.choice("level", ("graph", "node"), "node" if resident else "graph"),
        readout=item.choice("readout", READOUTS, ""),
        call=call,
        max_nodes=item.count("max_nodes", default.max_nodes, least=1),
        max_edges=item.count("max_edges", default.max_edges, least=1),
        file=_file_name(item, "file", default.file),
        hops=item.count("hops", default.hops, most=64),
        cache=item.take("cache", bool, False),
        max_seeds=item.count("max_seeds", default.max_seeds, least=1),
        updates=item.take("updates", bool, True),
    )
    item.end()
    if not call or any(name not in GRAPH_ARGUMENTS for name in call):
        raise ModelConfigError(
            f"{item.where}: call must list some of {', '.join(GRAPH_ARGUMENTS)}, got {list(call)}"
        )
    if ("edge_attr" in call) != bool(graph.edge_features):
        raise ModelConfigError(
            f"{item.where}: edge_attr must be in call where edge_features is not 0, and only there"
        )
    if resident and (graph.level, graph.readout, graph.edge_features) != ("node", "", 0):
        raise ModelConfigError(
            f"{item.where}: a resident graph must have level node, no readout and no edge features"
        )
    return graph
