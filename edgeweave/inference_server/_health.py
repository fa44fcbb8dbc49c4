"""grpc.health.v1: the server under the empty name, and each model under its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc

from ._core import InferenceCore
from ._errors import InvalidArgumentError
from ._messages import INFERENCE_SERVICE, message_class, parse

__all__ = ["HealthService"]

_REQUEST: Final = message_class("grpc.health.v1.HealthCheckRequest")
_RESPONSE: Final = message_class("grpc.health.v1.HealthCheckResponse")
_LIST_REQUEST: Final = message_class("grpc.health.v1.HealthListRequest")
_LIST: Final = message_class("grpc.health.v1.HealthListResponse")
_SERVING: Final = 1
_NOT_SERVING: Final = 2
_SERVICE_UNKNOWN: Final = 3
# The protocol lets List refuse when there is too much to tell.
_MOST_WATCHERS: Final = 256


class HealthService:
    """Tells the health of the server and of each model.

    Args:
        core: The data plane.
    """

    def __init__(self, core: InferenceCore) -> None:
        self._core = core
        self._changed = asyncio.Event()
        self._watchers = 0

    def changed(self) -> None:
        """Wake those who watch."""
        self._changed.set()
        self._changed = asyncio.Event()

    def status(self, service: str) -> int:
        """The status of a service: the server, its inference service, or a model."""
        if service in ("", INFERENCE_SERVICE):
            return _SERVING if self._core.is_ready else _NOT_SERVING
        if self._core.model_is_ready(service):
            return _SERVING
        known = any(name == service for name, _, _ in self._core.registry.entries())
        return _NOT_SERVING if known else _SERVICE_UNKNOWN

    def handlers(self) -> dict[str, Any]:
        """Method handlers by name."""
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "List": grpc.unary_unary_rpc_method_handler(self._list),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    async def _service(self, data: bytes, context: Any) -> str:
        try:
            return str(parse(_REQUEST, data).service)
        except InvalidArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    async def _check(self, data: bytes, context: Any) -> bytes:
        status = self.status(await self._service(data, context))
        if status == _SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "health: service must be known")
        return _encoded(status)

    async def _list(self, data: bytes, context: Any) -> bytes:
        try:
            parse(_LIST_REQUEST, data)
        except InvalidArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        answer = _LIST()
        names = {name for name, _, _ in self._core.registry.entries()}
        for name in ("", INFERENCE_SERVICE, *sorted(names)):
            answer.statuses[name].status = self.status(name)
        return bytes(answer.SerializeToString())

    async def _watch(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        service = await self._service(data, context)
        if self._watchers >= _MOST_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"health: at most {_MOST_WATCHERS} may watch"
            )
        self._watchers += 1
        try:
            async for status in self._statuses(lambda: self.status(service)):
                yield _encoded(status)
        finally:
            self._watchers -= 1

    async def _statuses(self, current: Callable[[], int]) -> AsyncIterator[int]:
        last = 0
        while True:
            changed = self._changed
            status = current()
            if status != last:
                last = status
                yield status
            await changed.wait()


def _encoded(status: int) -> bytes:
    return bytes(_RESPONSE(status=status).SerializeToString())
