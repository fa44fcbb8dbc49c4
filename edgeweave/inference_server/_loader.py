"""From a version's folder to something that runs. May take long: it runs beside the event loop."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from . import _architectures, _engines
from ._batch import Runner, Work
from ._config import ModelConfig
from ._dense import DenseRunner
from ._errors import ModelConfigError
from ._graphs import GraphsRunner
from ._repository import VersionFolder
from ._resident import ResidentRunner
from ._resident_graph import ResidentGraph
from ._types import DATATYPES, InferRequest, Limits, TensorSpec, WireTensor

__all__ = ["LoadedVersion", "ModelRunner", "Trust", "load_version"]

_log = logging.getLogger("edgeweave.server")
# Enough for every dimension left open, and more than the 0 and 1 that compilers specialise on.
_WARMUP_SIZE = 2


class ModelRunner(Runner, Protocol):
    """A runner that also judges requests."""

    inputs: tuple[TensorSpec, ...]
    optional_inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: frozenset[str]

    def admit(self, request: InferRequest) -> Work:
        """Hold a request against the model."""


@dataclass(frozen=True)
class Trust:
    """What whoever starts the server vouches for.

    Attributes:
        architectures: Importable names beside the built-in ones.
        archives: SHA-256 of each model archive that may be loaded, by model name.
    """

    architectures: frozenset[str]
    archives: Mapping[str, str]


@dataclass(frozen=True)
class LoadedVersion:
    """A version ready to be scheduled."""

    name: str
    version: str
    config: ModelConfig
    runner: ModelRunner


def load_version(
    folder: VersionFolder,
    trust: Trust,
    limits: Limits,
    threads_for: Callable[[ModelConfig], int],
) -> LoadedVersion:
    """Load, optimise and warm up one version.

    Args:
        folder: Where it lies.
        trust: What may be executed.
        limits: For graph requests.
        threads_for: Torch threads of an instance of the model.

    Returns:
        The version.

    Raises:
        ModelConfigError: Something in the folder is wrong; the text names no path outside it.
    """
    config = folder.config()
    # As `Instance` does: compiled code is bound to the number that it was compiled under, and would
    # be compiled again for the first request.
    torch.get_num_threads()
    torch.set_num_threads(threads_for(config))
    module = _module(folder, config, trust)
    if config.kind == "tensors":
        runner: ModelRunner = _dense(config, module)
    elif config.kind == "graphs":
        runner = GraphsRunner.build(config, module, limits)
    else:
        tensors = _read_tensors(folder, _graph_of(config).file)
        graph = ResidentGraph.from_tensors(tensors, _graph_of(config).features)
        runner = ResidentRunner.build(config, module, graph, limits)
    loaded = LoadedVersion(folder.name, folder.version, config, runner)
    _warm_up(loaded)
    return loaded


def _graph_of(config: ModelConfig) -> Any:
    if config.graph is None:
        raise ModelConfigError(f"config: kind {config.kind} must have a graph table")
    return config.graph


def _module(folder: VersionFolder, config: ModelConfig, trust: Trust) -> nn.Module:
    if config.archive:
        return _archive(folder, config, trust)
    module = _architectures.build_architecture(
        config.architecture, config.arguments, trust.architectures
    )
    tensors = _read_tensors(folder, config.weights)
    try:
        # Weights that two names share are in the file once.
        incompatible = module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ModelConfigError(
            f"{config.weights}: must fit the architecture, got {error}"
        ) from None
    shared = _shared_names(module, tensors)
    missing = [name for name in incompatible.missing_keys if name not in shared]
    if missing or incompatible.unexpected_keys:
        raise ModelConfigError(
            f"{config.weights}: must hold the architecture's weights, got none for {missing[:5]} "
            f"and unknown {incompatible.unexpected_keys[:5]}"
        )
    return module.requires_grad_(False)


def _shared_names(module: nn.Module, present: Mapping[str, Any]) -> set[str]:
    """Names whose memory is that of a weight which the file has."""
    state = module.state_dict()
    held = {state[name].data_ptr() for name in present if name in state}
    return {name for name, tensor in state.items() if tensor.data_ptr() in held}


def _read_tensors(folder: VersionFolder, file_name: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    file = folder.file(file_name)
    try:
        tensors: dict[str, torch.Tensor] = load(file.read_bytes())
        return tensors
    except OSError as error:
        raise ModelConfigError(f"{file_name}: must be readable, got {error.strerror}") from None
    except SafetensorError as error:
        raise ModelConfigError(f"{file_name}: must be a safetensors file, got {error}") from None


def _archive(folder: VersionFolder, config: ModelConfig, trust: Trust) -> nn.Module:
    pin = trust.archives.get(folder.name)
    if pin is None:
        raise ModelConfigError(
            f"{config.archive}: an archive is executable content, so its model must be trusted; "
            f"start the server with --trust-model {folder.name}=SHA256"
        )
    if not config.archive.endswith(".pt2"):
        raise ModelConfigError(f"{config.archive}: must be a .pt2 archive of torch.export")
    try:
        # Read once: what is hashed is what is loaded.
        data = folder.file(config.archive).read_bytes()
    except OSError as error:
        raise ModelConfigError(
            f"{config.archive}: must be readable, got {error.strerror}"
        ) from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != pin.lower():
        raise ModelConfigError(f"{config.archive}: SHA-256 must be {pin}, got {digest}")
    exported: nn.Module = torch.export.load(io.BytesIO(data)).module()
    return exported


def _dense(config: ModelConfig, module: nn.Module) -> DenseRunner:
    examples = []
    for spec in config.inputs:
        dtype = DATATYPES[spec.datatype].torch
        shape = [_WARMUP_SIZE if size == -1 else size for size in spec.shape]
        examples.append(
            np.full(shape, b"", object) if dtype is None else torch.zeros(shape, dtype=dtype)
        )
    call = _engines.prepare(config.engine, config.precision, module, examples)
    return DenseRunner(
        call, config.inputs, config.outputs, config.max_batch_size, keywords=config.keywords
    )


def _warm_up(loaded: LoadedVersion) -> None:
    """Run declared shapes, so that the first request finds memory and code in place."""
    for shapes in loaded.config.warmup:
        specs = {spec.name: spec for spec in loaded.runner.inputs}
        unknown = sorted(set(shapes) - set(specs))
        if unknown:
            raise ModelConfigError(f"config: warmup must name inputs, got {unknown}")
        inputs = {name: _zeros(spec, shapes.get(name)) for name, spec in specs.items()}
        request = InferRequest(loaded.name, loaded.version, "warmup", inputs, (), {}, 0)
        work = loaded.runner.admit(request)
        try:
            with torch.inference_mode():
                raw = loaded.runner.infer(loaded.runner.collate([work]))
                loaded.runner.split(raw, [work])
        except Exception as error:
            _log.error("warm-up failed", exc_info=error, extra={"model": loaded.name})
            raise ModelConfigError(
                f"config: warmup {shapes} must run, got {type(error).__name__}"
            ) from error


def _zeros(spec: TensorSpec, shape: tuple[int, ...] | None) -> WireTensor:
    if shape is None:
        shape = tuple(1 if size == -1 else size for size in spec.shape)
    numpy = DATATYPES[spec.datatype].numpy
    array = np.full(shape, b"", object) if numpy.kind == "O" else np.zeros(shape, numpy)
    return WireTensor(spec.name, spec.datatype, array)
