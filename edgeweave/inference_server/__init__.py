"""A gRPC service for PyTorch and graph models on CPUs, speaking the Open Inference Protocol v2.

`edgeweave serve` runs it; docs/serving.md says how. From Python: `export_model` writes a model's
folder, `BackgroundServer` serves in a thread, `Client` and `AsyncClient` ask.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._errors import Code, ModelConfigError, ServingError

if TYPE_CHECKING:
    from ._client import AsyncClient, Client
    from ._client_wire import InferResponse
    from ._export import export_model
    from ._server import BackgroundServer, InferenceServer
    from ._settings import ServerSettings, TlsSettings
    from ._types import Limits, TensorSpec

__all__ = [
    "AsyncClient",
    "BackgroundServer",
    "Client",
    "Code",
    "InferResponse",
    "InferenceServer",
    "Limits",
    "ModelConfigError",
    "ServerSettings",
    "ServingError",
    "TensorSpec",
    "TlsSettings",
    "export_model",
]

# Loaded at first use: this package must be importable without the extra `server`, so that the
# command line can say what is missing.
_MODULE_OF = {
    "AsyncClient": "_client",
    "BackgroundServer": "_server",
    "Client": "_client",
    "InferResponse": "_client_wire",
    "InferenceServer": "_server",
    "Limits": "_types",
    "ServerSettings": "_settings",
    "TensorSpec": "_types",
    "TlsSettings": "_settings",
    "export_model": "_export",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
