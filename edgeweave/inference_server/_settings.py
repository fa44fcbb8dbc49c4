"""Settings of a server: what `edgeweave serve` takes, from the command line or a file."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from ._config import read_table
from ._errors import ModelConfigError
from ._fields import Fields
from ._repository import check_model_name
from ._types import Limits

__all__ = ["ServerSettings", "TlsSettings", "read_settings"]

_SHA256_DIGITS: Final = 64
TRANSPORTS: Final = ("http2", "grpcio")


@dataclass(frozen=True)
class TlsSettings:
    """Files of the server's TLS.

    Attributes:
        cert: Certificate chain, PEM.
        key: Its private key, PEM.
        client_ca: Certificates that clients' must be signed by; None to ask for none.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class ServerSettings:
    """How to serve.

    Attributes:
        model_repository: Folder of models.
        models: Models to load at start; empty for all.
        host: Address to listen on. Another than this machine's own needs TLS or `insecure`.
        port: Of gRPC; 0 for any that is free.
        metrics_port: Of Prometheus metrics; None for none, 0 for any that is free.
        metrics_host: Address of the metrics, under the same rule as `host`.
        insecure: Serve other machines without TLS.
        tls: Certificate and key.
        token_file: File with one bearer token a line; a request must carry one of them.
        workers: Processes that share the port.
        instances: Threads per model, where its configuration does not say.
        threads: Torch threads per instance, where its configuration does not say; 0 for an equal
            share of the processors.
        limits: What a request may ask for.
        allow_repository_control: Serve load and unload requests.
        allow_graph_updates: Serve `edgeweave.GraphService.Update`.
        allow_architectures: Importable `module:Class` names that models may use.
        trust_models: SHA-256 of each `.pt2` archive that may be loaded, by model name.
        drain_s: How long requests may finish after SIGTERM.
        tracing: Make OpenTelemetry spans; its package must be installed.
        transport: `http2`, this package's own, or `grpcio`, the server of `grpc.aio`.
        reuse_port: Share the port with other processes; set for workers.
        worker_index: Which of the workers this process is.
    """

    model_repository: Path
    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8001
    metrics_port: int | None = 8002
    metrics_host: str = "127.0.0.1"
    insecure: bool = False
    tls: TlsSettings | None = None
    token_file: Path | None = None
    workers: int = 1
    instances: int = 1
    threads: int = 0
    limits: Limits = field(default_factory=Limits)
    allow_repository_control: bool = False
    allow_graph_updates: bool = False
    allow_architectures: tuple[str, ...] = ()
    trust_models: Mapping[str, str] = field(default_factory=dict)
    drain_s: float = 20.0
    tracing: bool = False
    transport: str = "http2"
    reuse_port: bool = False
    worker_index: int = 0

    def __post_init__(self) -> None:
        for name, host in (("host", self.host), ("metrics_host", self.metrics_host)):
            unused = name == "metrics_host" and self.metrics_port is None
            if not (unused or _is_loopback(host) or self.tls or self.insecure):
                raise ModelConfigError(
                    f"settings: {name} must be this machine's own address, got {host}; "
                    "pass --tls-cert and --tls-key, or --insecure"
                )
        if self.transport not in TRANSPORTS:
            raise ModelConfigError(
                f"settings: transport must be one of {', '.join(TRANSPORTS)}, "
                f"got {self.transport!r}"
            )
        for name in ("port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ModelConfigError(f"settings: {name} must be in [0, 65535], got {port}")
        for name in ("workers", "instances"):
            if not 1 <= getattr(self, name) <= 1024:
                raise ModelConfigError(
                    f"settings: {name} must be in [1, 1024], got {getattr(self, name)}"
                )
        if self.threads < 0:
            raise ModelConfigError(f"settings: threads must be 0 or more, got {self.threads}")
        if self.drain_s < 0:
            raise ModelConfigError(f"settings: drain_s must be 0 or more, got {self.drain_s}")
        if self.workers > 1 and (self.allow_repository_control or self.allow_graph_updates):
            raise ModelConfigError(
                "settings: workers must be 1 with repository control or graph updates, "
                f"got {self.workers}; a request reaches one of the processes only"
            )
        for name, digest in self.trust_models.items():
            check_model_name(name)
            if len(digest) != _SHA256_DIGITS or not set(digest.lower()) <= set("0123456789abcdef"):
                raise ModelConfigError(
                    f"settings: trust_models must be NAME=SHA256 in hexadecimal, got {digest!r}"
                )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_LISTS: Final = ("models", "allow_architectures")
_PATHS: Final = ("model_repository", "token_file")
# Not for files: what a process is, not what it should do; and what is put together below.
_OF_WORKERS: Final = ("tls", "reuse_port", "worker_index")
_TLS_KEYS: Final = ("tls_cert", "tls_key", "client_ca")


def read_settings(file: Path | None, overrides: Mapping[str, Any]) -> ServerSettings:
    """Read a settings file and put the command line's words over it.

    Args:
        file: TOML or JSON with the names of `ServerSettings`, `tls_cert`, `tls_key`, `client_ca`,
            and a table `limits`; None for none.
        overrides: The same names; None values count as absent.

    Returns:
        The settings.

    Raises:
        ModelConfigError: A name is unknown, or a value is wrong.
    """
    table = {} if file is None else read_table(file, f"settings {file}")
    given = {key: value for key, value in overrides.items() if value is not None}
    limits = {**_table(table, "limits"), **given.pop("limits", {})}
    trusted = {**_table(table, "trust_models"), **given.pop("trust_models", {})}
    top = Fields("settings", {**table, **given, "limits": limits, "trust_models": trusted})
    values: dict[str, Any] = {}
    tls = {key: top.take(key, str, "") for key in _TLS_KEYS}
    for item in fields(ServerSettings):
        if item.name not in top.rest_keys() or item.name in _OF_WORKERS:
            continue
        if item.name in _LISTS:
            values[item.name] = top.strings(item.name)
        elif item.name in _PATHS:
            values[item.name] = Path(top.take(item.name, str))
        elif item.name == "limits":
            values["limits"] = _limits(top.table("limits"))
        elif item.name == "trust_models":
            values["trust_models"] = _digests(top.table("trust_models"))
        elif item.name == "metrics_port":
            # A file says -1 for none: TOML has no null.
            port = top.take("metrics_port", int)
            values["metrics_port"] = None if port == -1 else port
        else:
            default = getattr(ServerSettings, item.name)
            values[item.name] = top.take(item.name, type(default))
    top.end()
    if "model_repository" not in values:
        raise ModelConfigError("settings: model_repository must be given")
    if any(tls.values()):
        if not (tls["tls_cert"] and tls["tls_key"]):
            raise ModelConfigError("settings: tls_cert and tls_key must be given together")
        ca = Path(tls["client_ca"]) if tls["client_ca"] else None
        values["tls"] = TlsSettings(Path(tls["tls_cert"]), Path(tls["tls_key"]), ca)
    return ServerSettings(**values)


def _table(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    inner = table.get(key, {})
    if not isinstance(inner, dict):
        raise ModelConfigError(f"settings: {key} must be a table, got {inner!r}")
    return inner


def _limits(item: Fields) -> Limits:
    names = {f.name for f in fields(Limits)}
    values = {key: item.take(key, int) for key in item.rest_keys() if key in names}
    if left := item.rest_keys():
        raise ModelConfigError(
            f"{item.where}: keys must be known, got {', '.join(sorted(left))}; "
            f"the limits are {', '.join(sorted(names))}"
        )
    return replace(Limits(), **values)


def _digests(item: Fields) -> dict[str, str]:
    return {key: item.take(key, str) for key in item.rest_keys()}
