"""Write a version's folder: configuration, weights, graph; and prove that it loads to the same."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._architectures import BUILT_IN, build_architecture
from ._config import parse_model_config
from ._errors import ModelConfigError
from ._repository import check_model_name
from ._types import DATATYPE_OF_TORCH, TensorSpec

__all__ = ["export_model"]


def export_model(
    module: nn.Module,
    repository: Path,
    name: str,
    *,
    version: int = 1,
    arguments: Mapping[str, Any] | None = None,
    architecture: str = "",
    kind: str = "tensors",
    inputs: Sequence[TensorSpec] = (),
    outputs: Sequence[TensorSpec] = (),
    examples: Sequence[Tensor] = (),
    graph: tuple[Tensor, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model's folder `repository/name/version`.

    The folder appears at once and complete. The module is built anew from `architecture` and
    `arguments`, given the weights, and must return bit for bit what the original does for
    `examples`.

    Args:
        module: The trained module.
        repository: The folder of models; made if it is not there.
        name: The model's name.
        version: Its version, 1 or more; it must not exist.
        arguments: Keyword arguments that build the module's class.
        architecture: Importable `module:Class`; the module's class if "", by its built-in name.
        kind: `tensors`, `graphs` or `resident_graph`.
        inputs: Specifications for kind `tensors`; from `examples` if empty.
        outputs: Specifications for kind `tensors`; from what `examples` give if empty.
        examples: Arguments of a typical call.
        graph: `x` fp32 `[N, F]` and `edge_index` int64 `[2, E]` of a resident graph.
        options: Further keys of the configuration, such as `engine`, `max_batch_size`, `batching`.

    Returns:
        The folder.

    Raises:
        ModelConfigError: The version exists, the configuration would be wrong, or the rebuilt
            module differs.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from edgeweave.inference_server import export_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = export_model(
        ...         torch.nn.Linear(4, 2), Path(folder), "linear",
        ...         arguments={"in_features": 4, "out_features": 2},
        ...         examples=[torch.zeros(1, 4)], options={"max_batch_size": 8},
        ...     )
        ...     print(sorted(file.name for file in made.iterdir()))
        ['config.json', 'model.safetensors']
    """
    check_model_name(name)
    if version < 1:
        raise ModelConfigError(f"export_model: version must be 1 or more, got {version}")
    target = repository / name / str(version)
    if target.exists():
        raise ModelConfigError(f"export_model: version must be new, got {version} of {name}")
    cls = type(module)
    architecture = architecture or _name_of(cls)
    if kind == "resident_graph" and graph is None:
        raise ModelConfigError("export_model: graph must be given for kind resident_graph")
    table: dict[str, Any] = {
        "kind": kind,
        "architecture": {"name": architecture, "arguments": dict(arguments or {})},
        **(options or {}),
    }
    was_training = module.training
    module.eval()
    try:
        rebuilt = _rebuilt(module, architecture, table["architecture"]["arguments"])
        expected = _compare(module, rebuilt, examples)
    finally:
        module.train(was_training)
    if kind == "tensors":
        batched = bool(table.get("max_batch_size"))
        table["inputs"] = _tables(inputs or _specs("INPUT", examples, batched))
        table["outputs"] = _tables(outputs or _specs("OUTPUT", expected, batched))
    parse_model_config(table, "export_model")
    _write(target, table, module, graph)
    return target


def _name_of(cls: type) -> str:
    """The built-in name of a class that has one, for its own module may be a deeper one."""
    packages = cls.__module__.split(".")
    for length in range(len(packages), 0, -1):
        name = f"{'.'.join(packages[:length])}:{cls.__qualname__}"
        module = sys.modules.get(".".join(packages[:length]))
        if name in BUILT_IN and getattr(module, cls.__qualname__, None) is cls:
            return name
    return f"{cls.__module__}:{cls.__qualname__}"


def _rebuilt(module: nn.Module, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
    try:
        # As it will be read back: tuples are lists then.
        arguments = json.loads(json.dumps(arguments))
    except TypeError as error:
        raise ModelConfigError(f"export_model: arguments must be plain data, got {error}") from None
    rebuilt = build_architecture(architecture, arguments, [architecture])
    try:
        rebuilt.load_state_dict(module.state_dict())
    except RuntimeError as error:
        raise ModelConfigError(
            f"export_model: arguments must build the module's architecture, got {error}"
        ) from None
    return rebuilt


def _compare(module: nn.Module, rebuilt: nn.Module, examples: Sequence[Tensor]) -> list[Tensor]:
    """Outputs for the examples, which both must agree on bit for bit."""
    if not examples:
        return []
    with torch.no_grad():
        pairs = [_as_list(m(*examples)) for m in (module, rebuilt)]
    for ours, theirs in zip(*pairs, strict=True):
        if not torch.equal(ours, theirs):
            raise ModelConfigError(
                "export_model: rebuilt module must return what the original does, got another "
                "result; arguments may lack something that is not in the weights"
            )
    return pairs[0]


def _as_list(value: Any) -> list[Tensor]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, tuple | list) else [value]


def _specs(prefix: str, tensors: Sequence[Tensor], batched: bool) -> list[TensorSpec]:
    if not tensors:
        raise ModelConfigError("export_model: examples must be given, or inputs and outputs")
    return [
        TensorSpec(
            f"{prefix}{i}",
            DATATYPE_OF_TORCH[t.dtype],
            ((-1, *t.shape[1:]) if batched else tuple(t.shape)),
        )
        for i, t in enumerate(tensors)
    ]


def _tables(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": s.name, "datatype": s.datatype, "shape": list(s.shape)} for s in specs]


def _write(
    target: Path,
    table: Mapping[str, Any],
    module: nn.Module,
    graph: tuple[Tensor, Tensor] | None,
) -> None:
    from safetensors.torch import save_file, save_model

    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place and then renamed: a server that looks meanwhile sees all of it or nothing.
    draft = Path(tempfile.mkdtemp(prefix=".export-", dir=target.parent))
    try:
        text = json.dumps(table, indent=2) + "\n"
        (draft / "config.json").write_text(text, encoding="utf-8")
        # Knows about weights that two names share.
        save_model(module, str(draft / "model.safetensors"))
        if graph is not None:
            x, edge_index = graph
            tensors = {"x": x.contiguous().float(), "edge_index": edge_index.contiguous().long()}
            save_file(tensors, str(draft / "graph.safetensors"))
        draft.chmod(0o755)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft)
        raise
