"""The data plane over gRPC: handlers that take bytes, and one place that maps errors to codes.

A deserialiser of gRPC's that raises is answered with UNKNOWN, so none is given: handlers get the
bytes and parse them where an error has its code.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import grpc

from ._core import InferenceCore
from ._encode import encode_stream_error, encode_stream_response
from ._errors import (
    InvalidArgumentError,
    ModelConfigError,
    PermissionDeniedError,
    ServingError,
    UnauthenticatedError,
)
from ._grpc_wire import CallError
from ._health import HealthService
from ._messages import GRAPH_SERVICE, HEALTH_SERVICE, INFERENCE_SERVICE, message_class
from ._tracing import Tracer

__all__ = ["build_admission", "build_handlers", "to_serving_error"]

_log = logging.getLogger("edgeweave.server")
_HEAD: Final = message_class("inference.ModelInferRequest")
Handler = Callable[[bytes, Any], Awaitable[Any]]


def to_serving_error(error: Exception, request_id: str) -> ServingError:
    """What a client is told about an exception; the log gets the rest.

    Args:
        error: What was raised.
        request_id: To find it in the log.

    Returns:
        The error to answer with.
    """
    if isinstance(error, ServingError):
        _log.debug("refused", extra={"request": request_id, "reason": error.reason})
        return error
    if isinstance(error, ModelConfigError):
        return InvalidArgumentError(str(error), "model_config")
    _log.error("request failed", exc_info=error, extra={"request": request_id})
    return ServingError(f"request {request_id}: internal error; the log has more")


class _Authority:
    """Checks bearer tokens, in constant time."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._tokens = tuple(token.encode() for token in tokens)

    def check(self, context: Any) -> None:
        """Refuse a call that carries none of the tokens."""
        if not self._tokens:
            return
        given = None
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                given = value if isinstance(value, bytes) else value.encode()
        if given is None or not given.lower().startswith(b"bearer "):
            raise UnauthenticatedError("request: authorization must be a bearer token, got none")
        token = given[len(b"bearer ") :].strip()
        # Every token is compared, so that the time does not tell which one came near.
        matches = [hmac.compare_digest(token, known) for known in self._tokens]
        if not any(matches):
            raise PermissionDeniedError("request: authorization must be a known token")


def build_admission(tokens: tuple[str, ...]) -> Callable[[str, Any], bool]:
    """The check of tokens for a transport that can refuse a call by its headers.

    So nobody without a token has a message kept or unpacked. The handlers check again.

    Args:
        tokens: Bearer tokens; empty to ask for none.

    Returns:
        Takes the path and the context of a call, and says whether it brings a token; raises
        `CallError` where it has to.
    """
    authority = _Authority(tokens)

    def admit(path: str, context: Any) -> bool:
        if path.startswith(f"/{HEALTH_SERVICE}/"):
            return False
        try:
            authority.check(context)
        except ServingError as error:
            raise CallError(grpc.StatusCode[error.code.value], str(error)) from None
        return True

    return admit


def build_handlers(
    core: InferenceCore, health: HealthService, tokens: tuple[str, ...], tracer: Tracer
) -> list[Any]:
    """All services as generic handlers of grpc.

    Args:
        core: The data plane.
        health: The health service, which needs no token: probes carry none.
        tokens: Bearer tokens; empty to ask for none.
        tracer: Makes spans.

    Returns:
        For `grpc.aio.Server.add_generic_rpc_handlers`.
    """
    authority = _Authority(tokens)

    def guarded(method: Callable[[bytes], Any]) -> Any:
        return grpc.unary_unary_rpc_method_handler(_mapped(core, authority, method))

    unary: Mapping[str, Callable[[bytes], Any]] = {
        "ServerLive": core.server_live,
        "ServerReady": core.server_ready,
        "ServerMetadata": core.server_metadata,
        "ModelReady": core.model_ready,
        "ModelMetadata": core.model_metadata,
        "ModelConfig": core.model_config,
        "ModelStatistics": core.model_statistics,
        "RepositoryIndex": core.repository_index,
        "RepositoryModelLoad": core.repository_load,
        "RepositoryModelUnload": core.repository_unload,
    }
    inference = {name: guarded(method) for name, method in unary.items()}
    inference["ModelInfer"] = grpc.unary_unary_rpc_method_handler(
        _infer_handler(core, authority, tracer)
    )
    inference["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        _Stream(core, authority).handle
    )
    graph = {"Describe": guarded(core.graph_describe), "Update": guarded(core.graph_update)}
    return [
        grpc.method_handlers_generic_handler(INFERENCE_SERVICE, inference),
        grpc.method_handlers_generic_handler(GRAPH_SERVICE, graph),
        grpc.method_handlers_generic_handler(HEALTH_SERVICE, health.handlers()),
    ]


async def _abort(context: Any, error: ServingError) -> None:
    await context.abort(grpc.StatusCode[error.code.value], str(error))


def _answers(core: InferenceCore) -> Callable[[Handler], Handler]:
    """The decorator of every unary handler: errors become status codes here and nowhere else."""

    def decorate(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def wrapped(data: bytes, context: Any) -> Any:
            try:
                return await handler(data, context)
            except Exception as error:
                await _abort(context, to_serving_error(error, core.new_id()))

        return wrapped

    return decorate


def _mapped(core: InferenceCore, authority: _Authority, method: Callable[[bytes], Any]) -> Handler:
    @_answers(core)
    async def handler(data: bytes, context: Any) -> bytes:
        authority.check(context)
        answer = method(data)
        if asyncio.iscoroutine(answer):
            answer = await answer
        return bytes(answer.SerializeToString())

    return handler


def _infer_handler(core: InferenceCore, authority: _Authority, tracer: Tracer) -> Handler:
    @_answers(core)
    async def handler(data: bytes, context: Any) -> bytes:
        authority.check(context)
        if not tracer.enabled:
            return await core.infer(data, context.time_remaining())
        with tracer.span("ModelInfer", context):
            return await core.infer(data, context.time_remaining())

    def begin(
        data: bytes, context: Any, answer: Callable[[bytes | None, CallError | None], None]
    ) -> Callable[[], None] | None:
        """What `handler` does, without a task; our own transport asks for it."""

        def finished(encoded: bytes | None, error: Exception | None) -> None:
            if error is None:
                answer(encoded, None)
                return
            public = to_serving_error(error, core.new_id())
            answer(None, CallError(grpc.StatusCode[public.code.value], str(public)))

        try:
            authority.check(context)
            return core.begin(data, context.time_remaining(), finished)
        except Exception as error:
            finished(None, error)
            return None

    if not tracer.enabled:
        handler.begin = begin  # type: ignore[attr-defined]
    return handler


class _Stream:
    """ModelStreamInfer: several requests at a time, answers in the order of the requests."""

    def __init__(self, core: InferenceCore, authority: _Authority) -> None:
        self._core = core
        self._authority = authority
        self._most = core.limits.stream_requests

    async def handle(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Answer until the client ends or cancels."""
        try:
            self._authority.check(context)
        except ServingError as error:
            await _abort(context, error)
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(self._most)
        reader = asyncio.create_task(self._read(requests, context, answers))
        try:
            while (task := await answers.get()) is not None:
                yield await task
            await reader
        finally:
            reader.cancel()
            while not answers.empty():
                left = answers.get_nowait()
                if left is not None:
                    left.cancel()

    async def _read(
        self,
        requests: AsyncIterator[bytes],
        context: Any,
        answers: asyncio.Queue[asyncio.Task[bytes] | None],
    ) -> None:
        try:
            async for data in requests:
                # The queue's bound is the stream's backpressure: no more is read while it is full.
                await answers.put(asyncio.create_task(self._answer(data, context)))
        finally:
            # Without room the consumer has gone, or will come for the end later.
            if not answers.full():
                answers.put_nowait(None)
            else:
                await answers.put(None)

    async def _answer(self, data: bytes, context: Any) -> bytes:
        try:
            return encode_stream_response(await self._core.infer(data, context.time_remaining()))
        except Exception as error:
            public = to_serving_error(error, self._core.new_id())
            name, request_id = _names(data)
            return encode_stream_error(name, request_id, f"[{public.code.value}] {public}")


def _names(data: bytes) -> tuple[str, str]:
    """The model and the id of a request that failed, as far as it can be read."""
    try:
        message = _HEAD.FromString(data)
    except Exception:  # the failure is that it cannot be parsed; there is no id to give back
        return "", ""
    return message.model_name, message.id
