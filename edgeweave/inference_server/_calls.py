"""gRPC calls on HTTP/2 streams: deadlines, statuses, and the handlers that answer.

The handlers are those of `grpc`'s own server: coroutines of the request's bytes and a context with
`abort`, `time_remaining` and `invocation_metadata`.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, NamedTuple

import grpc

from ._deadlines import Deadlines
from ._frames import Http2ErrorCode
from ._grpc_wire import CallError, Memory, MessageReader, parse_timeout, status_block
from ._http2_send import Sender, Stream

__all__ = ["Call", "CallSettings", "Methods"]

_log = logging.getLogger("edgeweave.server")
# Of a request stream, before the window closes: the stream's backpressure.
_MOST_WAITING: Final = 16
# What a message in a queue costs beside its bytes, and what headers may hold uncounted.
_MESSAGE_OVERHEAD: Final = 64
_FREE_HEADERS: Final = 4096
# Longest message of a call that needs no token where others do.
_OPEN_MESSAGE: Final = 1 << 12
_HIDDEN: Final = frozenset(("te", "content-type", "grpc-timeout", "grpc-encoding"))


class _Details(NamedTuple):
    """What a generic handler of grpc is asked with."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...]


class Methods:
    """The methods of generic handlers, by path.

    Args:
        handlers: As `grpc.method_handlers_generic_handler` makes them.
    """

    def __init__(self, handlers: list[Any]) -> None:
        self._handlers = handlers
        self._known: dict[str, Any] = {}

    def find(self, path: str) -> Any:
        """The handler of a path; None where there is none."""
        found = self._known.get(path)
        if found is None:
            for handler in self._handlers:
                found = handler.service(_Details(path, ()))
                if found is not None:
                    self._known[path] = found
                    break
        return found


class CallSettings:
    """What calls of a server share.

    Args:
        methods: What can be called.
        message_bytes: Longest message, in either direction.
        buffered_bytes: What all requests that no handler has taken may hold together.
    """

    def __init__(self, methods: Methods, message_bytes: int, buffered_bytes: int) -> None:
        self.methods = methods
        self.message_bytes = message_bytes
        self.memory = Memory(buffered_bytes)
        # Refuses calls by their path and headers, or says whether they may be long.
        self.admit: Callable[[str, Any], bool] | None = None
        # The loop itself holds tasks weakly.
        self.tasks: set[asyncio.Task[None]] = set()
        self.deadlines = Deadlines(asyncio.get_running_loop())

    def open(
        self, connection: Sender, stream_id: int, fields: list[tuple[str, str]], size: int
    ) -> Call:
        """Make the call of a new stream."""
        return Call(self, connection, stream_id, fields, size)


class Call(Stream):
    """One call; also the context that its handler gets.

    Args:
        settings: Of the server.
        connection: Where it came.
        stream_id: Its number there.
        fields: Its headers.
        size: Of the headers, as HTTP/2 counts it.
    """

    __slots__ = (
        "_alarm",
        "_cancel",
        "_deadline",
        "_ended",
        "_failure",
        "_fields",
        "_finished",
        "_headers_sent",
        "_held",
        "_method",
        "_news",
        "_reader",
        "_requests",
        "_settings",
        "_task",
    )

    def __init__(
        self,
        settings: CallSettings,
        connection: Sender,
        stream_id: int,
        fields: list[tuple[str, str]],
        size: int,
    ) -> None:
        super().__init__(connection, stream_id)
        self._settings = settings
        self._fields = fields
        self._requests: deque[bytes] = deque()
        self._ended = self._finished = self._headers_sent = False
        self._news: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: float | None = None
        self._alarm: list[Any] | None = None
        self._cancel: Callable[[], None] | None = None
        self._method: Any = None
        self._reader: MessageReader | None = None
        self._failure: CallError | None = None
        # Bytes that count in the memory of all calls, beside those of the reader.
        self._held = 0
        try:
            if size > _FREE_HEADERS:
                self._hold(size)
            self._begin(dict(fields))
        except CallError as error:
            # Answered by `receive`: the connection does not know the stream yet.
            self._failure = error

    def _begin(self, headers: Mapping[str, str]) -> None:
        kind = headers.get("content-type", "")
        if headers[":method"] != "POST" or not (
            kind == "application/grpc"
            or kind.startswith(("application/grpc+", "application/grpc;"))
        ):
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, "call: must be gRPC")
        timeout = headers.get("grpc-timeout")
        if timeout is not None:
            self._deadline = self.connection.loop.time() + parse_timeout(timeout)
            self._alarm = self._settings.deadlines.add(self._deadline, self)
        path = headers[":path"]
        self._method = self._settings.methods.find(path)
        if self._method is None:
            raise CallError(
                grpc.StatusCode.UNIMPLEMENTED, f"call: method must be known, got {path[:128]!r}"
            )
        most = self._settings.message_bytes
        if self._settings.admit is not None and not self._settings.admit(path, self):
            most = min(most, _OPEN_MESSAGE)
        self._reader = MessageReader(
            most,
            self._settings.memory,
            headers.get("grpc-encoding", "identity"),
            self._message,
        )

    # --- the context of handlers ---

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """What the client sent beside the request; names that end in -bin have bytes."""
        found: list[tuple[str, str | bytes]] = []
        for name, value in self._fields:
            if name[:1] == ":" or name in _HIDDEN:
                continue
            if name.endswith("-bin"):
                try:
                    # Values of one name may come joined.
                    for part in value.split(","):
                        padded = part.strip() + "=" * (-len(part.strip()) % 4)
                        found.append((name, base64.b64decode(padded, validate=True)))
                except ValueError:
                    _log.debug("metadata that is not base64", extra={"key": name[:64]})
            else:
                found.append((name, value))
        return tuple(found)

    def time_remaining(self) -> float | None:
        """Seconds until the client gives up; None for never."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - self.connection.loop.time())

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the call with a status."""
        raise CallError(code, details)

    # --- in ---

    @property
    def credits_at_once(self) -> bool:
        """A stream of requests gets its window back when they are taken."""
        return self._method is None or not self._method.request_streaming

    def receive(self, data: bytes, ended: bool) -> None:
        """Take a piece of the request; see `Stream`."""
        if self._finished:
            # The status waits for the client's window.
            return
        try:
            if self._failure is not None or self._reader is None:
                raise self._failure or CallError(grpc.StatusCode.INTERNAL, "call: must begin")
            if data:
                self._reader.feed(data)
            if ended and self._reader.inside:
                raise CallError(grpc.StatusCode.INTERNAL, "call: message must be complete")
            streaming = self._method.request_streaming
            if ended and not streaming and not self._requests:
                raise CallError(grpc.StatusCode.INTERNAL, "call: there must be one message")
        except CallError as error:
            self._finish(error)
            return
        self._ended = ended
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        if self._task is None and (ended or streaming):
            begin = getattr(self._method.unary_unary, "begin", None)
            if begin is None:
                self._start()
            else:
                self._cancel = begin(self._next(), self, self._answer)

    def _message(self, data: bytes) -> None:
        if self._requests and not self._method.request_streaming:
            raise CallError(grpc.StatusCode.INTERNAL, "call: there must be one message")
        self._requests.append(data)
        self._hold(len(data) + _MESSAGE_OVERHEAD)

    def _hold(self, size: int) -> None:
        self._held += size
        self._settings.memory.used += size
        self._settings.memory.check()

    def _next(self) -> bytes:
        data = self._requests.popleft()
        size = len(data) + _MESSAGE_OVERHEAD
        self._held -= size
        self._settings.memory.used -= size
        return data

    def closed(self) -> None:
        """Nothing more is sent; see `Stream`."""
        self._finished = True
        if self._alarm is not None:
            self._settings.deadlines.drop(self._alarm)
            self._alarm = None
        self._release()

    def expire(self) -> None:
        """The deadline is here."""
        if not self._finished:
            self._finish(CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "call: deadline exceeded"))
        else:
            # Answered, but the client does not take the answer.
            self.connection.reset(self, Http2ErrorCode.CANCEL)

    def _release(self) -> None:
        """Let go of what the call holds, and end its handler; its deadline stays."""
        if self._reader is not None:
            self._reader.drop()
            # It refers to us: without this the collector would have to find each call.
            self._reader = None
        self._requests.clear()
        self._settings.memory.used -= self._held
        self._held = 0
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    # --- out ---

    def _start(self) -> None:
        run: Callable[[], Any] = self._stream
        if not (self._method.request_streaming or self._method.response_streaming):
            run = self._unary
        self._task = self.connection.loop.create_task(self._guarded(run))
        self._settings.tasks.add(self._task)
        self._task.add_done_callback(self._settings.tasks.discard)

    def _answer(self, data: bytes | None, error: CallError | None) -> None:
        """What a method without a task found."""
        if self._finished:
            return
        if data is not None:
            try:
                self._send(data)
            except CallError as too_long:
                error = too_long
        self._finish(error)

    async def _guarded(self, run: Callable[[], Any]) -> None:
        try:
            await run()
        except CallError as error:
            self._finish(error)
        except asyncio.CancelledError:
            # By the client, the deadline or the end of the server; the first two have said so.
            self._finish(CallError(grpc.StatusCode.CANCELLED, "call: cancelled"))
        except Exception as error:
            _log.error("handler raised", exc_info=error)
            self._finish(
                CallError(grpc.StatusCode.INTERNAL, "call: internal error; the log has more")
            )

    async def _unary(self) -> None:
        data = await self._method.unary_unary(self._next(), self)
        if not self._finished:
            self._send(data)
            self._finish(None)

    async def _stream(self) -> None:
        if self._method.request_streaming:
            answers = self._method.stream_stream(self._incoming(), self)
        else:
            answers = self._method.unary_stream(self._next(), self)
        try:
            async for data in answers:
                if self._finished:
                    return
                self._send(data)
                if self._finished:
                    # What it sent was too much for the connection.
                    return
                await self.connection.sent(self)
        finally:
            # Or its own `finally` would run when the collector comes by.
            await answers.aclose()
        self._finish(None)

    async def _incoming(self) -> AsyncIterator[bytes]:
        while True:
            while self._requests:
                data = self._next()
                if len(self._requests) < _MOST_WAITING:
                    self.connection.credit(self)
                yield data
            if self._ended or self._finished:
                return
            # The rest of a message that is longer than the window.
            self.connection.credit(self)
            self._news = self.connection.loop.create_future()
            await self._news

    def _send(self, data: bytes) -> None:
        length = len(data)
        if self._reader is not None and length > self._settings.message_bytes:
            raise self._reader.too_long(length)
        connection = self.connection
        if not self._headers_sent:
            self._headers_sent = True
            connection.send_headers(self, connection.response_headers())
        connection.send_data(self, b"\x00" + length.to_bytes(4, "big"), data)

    def _finish(self, error: CallError | None) -> None:
        """Send the status; None for success."""
        if self._finished:
            return
        self._finished = True
        connection = self.connection
        block = None if error is None else status_block(error.code, str(error))
        if not self._headers_sent:
            head = connection.response_headers()
            if block is not None:
                connection.send_headers(self, head + block, end=True)
                return
            connection.send_headers(self, head)
        connection.send_trailers(self, block)
        # Where the client's window holds the answer up, the deadline still counts.
        self._release()
