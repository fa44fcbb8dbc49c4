"""Which classes a configuration may name, and how they are built.

Weights are data, but an importable name is code: only what is listed here, or what whoever starts
the server allows, is ever imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import nn

from ._errors import ModelConfigError

__all__ = ["BUILT_IN", "build_architecture"]

_PYG: Final = "torch_geometric.nn.models"
_TRANSFORMERS: Final = "transformers"

BUILT_IN: Final = frozenset(
    [
        *(f"{_PYG}:{n}" for n in ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN", "MLP")),
        *(
            f"{_TRANSFORMERS}:{n}"
            for n in (
                "AutoModel",
                "AutoModelForSequenceClassification",
                "AutoModelForTokenClassification",
                "AutoModelForMaskedLM",
                "AutoModelForQuestionAnswering",
                "AutoModelForImageClassification",
            )
        ),
    ]
)
_EXTRAS: Final = {"torch_geometric": 'pip install "edgeweave[pyg]"'}


def build_architecture(
    name: str, arguments: Mapping[str, Any], allowed: Iterable[str] = ()
) -> nn.Module:
    """Build a module with fresh weights.

    Args:
        name: `package.module:Class`.
        arguments: Keyword arguments of the class; for `transformers` its configuration, with
            `model_type`.
        allowed: Names allowed besides the built-in ones.

    Returns:
        The module, in evaluation mode.

    Raises:
        ModelConfigError: The name is not allowed, cannot be imported, or refuses its arguments.
    """
    if name not in BUILT_IN and name not in frozenset(allowed):
        raise ModelConfigError(
            f"architecture: name must be built in or allowed, got {name!r}; "
            f"start the server with --allow-architecture {name} if you trust it"
        )
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        remedy = _EXTRAS.get(package, f"pip install {package}")
        raise ModelConfigError(f"architecture {name}: needs {package}; {remedy}") from error
    except AttributeError:
        raise ModelConfigError(f"architecture {name}: there is no such class") from None
    if module_name == _TRANSFORMERS:
        factory = _from_config(factory, arguments)
        arguments = {}
    try:
        module = factory(**arguments)
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        raise ModelConfigError(f"architecture {name}: must take its arguments, got {error}") from (
            error
        )
    if not isinstance(module, nn.Module):
        raise ModelConfigError(f"architecture {name}: must be an nn.Module, got {type(module)}")
    return module.eval()


def _from_config(auto_class: Any, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    values = dict(arguments)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ModelConfigError("architecture: arguments of a transformers model need model_type")
    if "auto_map" in values:
        raise ModelConfigError("architecture: auto_map, which names code, must be left out")
    transformers = importlib.import_module(_TRANSFORMERS)

    def build() -> Any:
        config = transformers.AutoConfig.for_model(model_type, **values)
        return auto_class.from_config(config)

    return build
