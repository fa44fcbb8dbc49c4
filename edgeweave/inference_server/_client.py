"""Thin clients: arrays in, arrays out. Any other client of the protocol does as well."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from ._client_wire import InferResponse, decode_response, encode_graph_update, encode_request
from ._messages import GRAPH_SERVICE, INFERENCE_SERVICE, message_class

__all__ = ["AsyncClient", "Client"]

_INFER: Final = f"/{INFERENCE_SERVICE}/ModelInfer"
_STREAM: Final = f"/{INFERENCE_SERVICE}/ModelStreamInfer"
_STREAM_RESPONSE: Final = message_class("inference.ModelStreamInferResponse")
_UNBOUNDED: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


def _call(rpc: str, **fields: Any) -> tuple[str, bytes, Any]:
    """Path, request and response class of a simple rpc."""
    service, package = (
        (GRAPH_SERVICE, "edgeweave") if rpc == "Describe" else (INFERENCE_SERVICE, "inference")
    )
    names = (
        ("GraphDescribeRequest", "GraphDescription")
        if rpc == "Describe"
        else (
            f"{rpc}Request",
            f"{rpc}Response",
        )
    )
    request, response = (message_class(f"{package}.{name}") for name in names)
    return f"/{service}/{rpc}", bytes(request(**fields).SerializeToString()), response


def _credentials(root_certificates: Path | None, certificate: Path | None, key: Path | None) -> Any:
    return grpc.ssl_channel_credentials(
        *(
            None if path is None else path.read_bytes()
            for path in (root_certificates, key, certificate)
        )
    )


def _open_channel(
    api: Any,
    target: str,
    root_certificates: Path | None,
    certificate: Path | None,
    key: Path | None,
) -> Any:
    """A channel of `grpc` or `grpc.aio`; over TLS if there are root certificates."""
    if root_certificates is None:
        return api.insecure_channel(target, options=_UNBOUNDED)
    credentials = _credentials(root_certificates, certificate, key)
    return api.secure_channel(target, credentials, options=_UNBOUNDED)


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)


def _stream_answer(data: bytes) -> InferResponse:
    message = _STREAM_RESPONSE.FromString(data)
    if message.error_message:
        raise RuntimeError(
            f"infer_stream: request {message.infer_response.id} failed: {message.error_message}"
        )
    return decode_response(message.infer_response.SerializeToString())


class Client:
    """A client that blocks.

    Args:
        target: `host:port`.
        token: Bearer token.
        root_certificates: PEM file of who signed the server's certificate; turns TLS on.
        certificate: PEM file of the client's own certificate, for mutual TLS.
        key: PEM file of its key.
        timeout_s: For calls that name none.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        root_certificates: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._channel = _open_channel(grpc, target, root_certificates, certificate, key)
        self._metadata = _metadata(token)
        self._timeout_s = timeout_s

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _unary(self, path: str, request: bytes, timeout_s: float | None = None) -> bytes:
        call = self._channel.unary_unary(path)
        answer: bytes = call(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
        return answer

    def _simple(self, rpc: str, **fields: Any) -> Any:
        path, request, response = _call(rpc, **fields)
        return response.FromString(self._unary(path, request))

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, bool | int | float | str] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> InferResponse:
        """Ask a model.

        Args:
            model: The model.
            inputs: numpy arrays or CPU tensors by name.
            version: Of the model; "" for the newest.
            outputs: Names of the outputs; empty for all.
            parameters: `priority`, `timeout` (microseconds in the queue), `fan_out`, `seed`.
            request_id: Comes back with the answer.
            timeout_s: Time to wait.

        Returns:
            The answer.

        Raises:
            grpc.RpcError: With the server's status code.
        """
        request = encode_request(model, inputs, version, outputs, parameters, request_id)
        return decode_response(self._unary(_INFER, request, timeout_s))

    def infer_stream(
        self, model: str, requests: Iterable[Mapping[str, Any]], timeout_s: float | None = None
    ) -> Iterator[InferResponse]:
        """Ask a model several times over one call.

        Args:
            model: The model.
            requests: Inputs of each.
            timeout_s: Time for all.

        Yields:
            The answers, in order.

        Raises:
            RuntimeError: A request failed.
        """
        call = self._channel.stream_stream(_STREAM)
        encoded = (encode_request(model, inputs) for inputs in requests)
        for data in call(encoded, timeout=timeout_s or self._timeout_s, metadata=self._metadata):
            yield _stream_answer(data)

    def server_ready(self) -> bool:
        """Whether the server takes requests."""
        return bool(self._simple("ServerReady").ready)

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model does."""
        return bool(self._simple("ModelReady", name=name, version=version).ready)

    def model_metadata(self, name: str, version: str = "") -> Any:
        """A model's ModelMetadataResponse."""
        return self._simple("ModelMetadata", name=name, version=version)

    def statistics(self, name: str = "", version: str = "") -> Any:
        """The ModelStatisticsResponse of one model or all."""
        return self._simple("ModelStatistics", name=name, version=version)

    def load(self, name: str) -> None:
        """Load or reload a model."""
        self._simple("RepositoryModelLoad", model_name=name)

    def unload(self, name: str) -> None:
        """Take a model out of service."""
        self._simple("RepositoryModelUnload", model_name=name)

    def graph_describe(self, model: str, version: str = "") -> Any:
        """Size and version of a model's graph, a `GraphDescription`."""
        return self._simple("Describe", model_name=model, model_version=version)

    def graph_update(self, model: str, **changes: Any) -> Any:
        """Change a model's graph.

        Args:
            model: The model.
            **changes: `add_nodes` fp32 `[n, F]`, `set_nodes` (ids `[m]`, fp32 `[m, F]`),
                `remove_nodes` `[k]`, `remove_edges` `[2, r]`, `add_edges` `[2, a]`, `version`,
                `expected_graph_version`.

        Returns:
            The new `GraphDescription`.

        Raises:
            grpc.RpcError: With the server's status code.
        """
        request = encode_graph_update(model, **changes)
        response = message_class("edgeweave.GraphDescription")
        return response.FromString(self._unary(f"/{GRAPH_SERVICE}/Update", request))


class AsyncClient:
    """A client for event loops, with the calls that serving needs most.

    Args:
        target: `host:port`.
        token: Bearer token.
        root_certificates: PEM file of who signed the server's certificate; turns TLS on.
        certificate: PEM file of the client's own certificate, for mutual TLS.
        key: PEM file of its key.
        timeout_s: For calls that name none.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        root_certificates: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._channel = _open_channel(grpc.aio, target, root_certificates, certificate, key)
        self._metadata = _metadata(token)
        self._timeout_s = timeout_s
        self._infer = self._channel.unary_unary(_INFER)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, bool | int | float | str] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> InferResponse:
        """Ask a model; as `Client.infer`. Cancelling it cancels the request."""
        request = encode_request(model, inputs, version, outputs, parameters, request_id)
        data = await self._infer(
            request, timeout=timeout_s or self._timeout_s, metadata=self._metadata
        )
        return decode_response(data)

    async def infer_stream(
        self, model: str, requests: Iterable[Mapping[str, Any]], timeout_s: float | None = None
    ) -> AsyncIterator[InferResponse]:
        """Ask a model several times over one call; as `Client.infer_stream`."""
        call = self._channel.stream_stream(_STREAM)
        encoded = (encode_request(model, inputs) for inputs in requests)
        stream = call(encoded, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
        async for data in stream:
            yield _stream_answer(data)

    async def _simple(self, rpc: str, **fields: Any) -> Any:
        path, request, response = _call(rpc, **fields)
        call = self._channel.unary_unary(path)
        data = await call(request, timeout=self._timeout_s, metadata=self._metadata)
        return response.FromString(data)

    async def server_ready(self) -> bool:
        """Whether the server takes requests."""
        return bool((await self._simple("ServerReady")).ready)

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model does."""
        return bool((await self._simple("ModelReady", name=name, version=version)).ready)
