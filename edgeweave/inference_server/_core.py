"""The data plane: what each rpc does, in terms of bytes and `ServingError`, for any transport."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from edgeweave._version import __version__

from ._decode import RequestDecoder
from ._encode import encode_infer_response
from ._errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    ServingError,
)
from ._graph_wire import describe, read_update
from ._messages import message_class, parse
from ._registry import Registry
from ._resident import ResidentRunner
from ._settings import ServerSettings
from ._statistics import model_statistics
from ._types import DATATYPES, InferRequest, InferResult

__all__ = ["SERVER_NAME", "InferenceCore"]

SERVER_NAME: Final = "edgeweave"
_EXTENSIONS: Final = ("model_configuration", "statistics", "parameters")
# What clients send to say that a feature is not used.
_HARMLESS: Final = frozenset(("triton_enable_empty_final_response", "binary_data_output"))
_log = logging.getLogger("edgeweave.server")


def _m(name: str) -> Any:
    return message_class(f"inference.{name}")


class InferenceCore:
    """Answers requests, given as bytes, with bytes.

    Args:
        settings: Of the server.
        registry: The models.
    """

    def __init__(self, settings: ServerSettings, registry: Registry) -> None:
        self.registry = registry
        self.rejects: Counter[str] = Counter()
        self.in_flight = 0
        self.ready = False
        self._settings = settings
        self.limits = settings.limits
        self._decode = RequestDecoder(settings.limits).decode
        # Ids of requests that bring none: unique among restarts without a global count.
        self._id_prefix = secrets.token_hex(4)
        self._ids = itertools.count(1)

    # --- inference ---

    async def infer(self, data: bytes, remaining_s: float | None = None) -> bytes:
        """Answer a ModelInferRequest.

        Args:
            data: The request.
            remaining_s: Time until the caller gives up; None for never.

        Returns:
            The ModelInferResponse.

        Raises:
            ServingError: What went wrong.
        """
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def answer(encoded: bytes | None, error: Exception | None) -> None:
            if future.done():
                return
            if encoded is not None:
                future.set_result(encoded)
            elif error is not None:
                future.set_exception(error)

        cancel = self.begin(data, remaining_s, answer)
        try:
            return await future
        except asyncio.CancelledError:
            cancel()
            raise

    def begin(
        self,
        data: bytes,
        remaining_s: float | None,
        answer: Callable[[bytes | None, Exception | None], None],
    ) -> Callable[[], None]:
        """As `infer`, for who does not want to wait in a coroutine.

        Args:
            data: The request.
            remaining_s: As in `infer`.
            answer: Gets the response or the error, in the event loop.

        Returns:
            To be called when nobody waits any more; does nothing after the answer.

        Raises:
            ServingError: What is wrong with the request, or with the moment.
        """
        arrived_ns = time.monotonic_ns()
        if self.in_flight >= self.limits.concurrent_rpcs:
            self.rejects["concurrency"] += 1
            raise ResourceExhaustedError(
                f"server: requests inside must be at most {self.limits.concurrent_rpcs}",
                "concurrency",
            )
        try:
            request = self._decode(data)
            client_id = request.id
            request.id = client_id or self.new_id()
            version, entry, served = self.registry.resolve(
                request.model_name, request.model_version
            )
        except ServingError as error:
            self.rejects[error.reason] += 1
            raise
        inside = True

        def leave() -> bool:
            """Whether the request was inside until now."""
            nonlocal inside
            was, inside = inside, False
            self.in_flight -= was
            return was

        def finished(result: InferResult | None, error: ServingError | None) -> None:
            leave()
            if result is None:
                answer(None, error)
                return
            try:
                encoded = encode_infer_response(request.model_name, version, client_id, result)
            # Whatever a model's output does to the encoder is this request's alone.
            except Exception as failure:
                answer(None, failure)
                return
            if _log.isEnabledFor(logging.DEBUG):
                self._log_answer(request, version, arrived_ns)
            answer(encoded, None)

        scheduler = served.scheduler
        try:
            priority, timeout_us = self._check_parameters(
                request, served.runner.parameters, scheduler.settings.priority_levels
            )
            work = served.runner.admit(request)
            timeout_us = timeout_us or scheduler.settings.timeout_us
            cancel = scheduler.enqueue(
                work,
                finished,
                deadline_ns=_deadline(arrived_ns, remaining_s, timeout_us),
                priority=priority,
                watched=not timeout_us,
            )
        except ServingError as error:
            entry.stats.record_failure(error.reason)
            raise
        self.in_flight += 1

        def gone() -> None:
            if leave():
                cancel()

        return gone

    @staticmethod
    def _log_answer(request: InferRequest, version: str, arrived_ns: int) -> None:
        duration_us = (time.monotonic_ns() - arrived_ns) // 1000
        _log.debug(
            "answered",
            extra={
                "model": request.model_name,
                "version": version,
                "request": request.id,
                "duration_us": duration_us,
            },
        )

    def new_id(self) -> str:
        """An id for a request that brings none."""
        return f"{self._id_prefix}-{next(self._ids)}"

    @staticmethod
    def _check_parameters(
        request: InferRequest, known: frozenset[str], levels: int
    ) -> tuple[int | None, int]:
        """Priority and time-out; whatever else is not known is refused."""
        if not request.parameters:
            return None, 0
        for name in request.parameters:
            if name not in known and name not in _HARMLESS:
                raise InvalidArgumentError(
                    f"request: parameters must be among {', '.join(sorted(known))}, "
                    f"got {name[:64]!r}"
                )
        priority = _natural(request.parameters, "priority")
        if priority > levels:
            raise InvalidArgumentError(
                f"request: priority must be at most {levels}, got {priority}"
            )
        return priority or None, _natural(request.parameters, "timeout")

    # --- what is there ---

    def server_live(self, data: bytes) -> Any:
        """Whether the process answers."""
        parse(_m("ServerLiveRequest"), data)
        return _m("ServerLiveResponse")(live=True)

    def server_ready(self, data: bytes) -> Any:
        """Whether every model that was to be loaded is."""
        parse(_m("ServerReadyRequest"), data)
        return _m("ServerReadyResponse")(ready=self.is_ready)

    @property
    def is_ready(self) -> bool:
        """Every model that was to be loaded is, and the server is not about to end."""
        return self.ready and not self.registry.closing and not self.registry.failures

    def server_metadata(self, data: bytes) -> Any:
        """Name, version, extensions that are really there."""
        parse(_m("ServerMetadataRequest"), data)
        extensions = list(_EXTENSIONS)
        if self._settings.allow_repository_control:
            extensions.append("model_repository")
        if self._settings.allow_graph_updates:
            extensions.append("edgeweave_graph_updates")
        return _m("ServerMetadataResponse")(
            name=SERVER_NAME, version=__version__, extensions=extensions
        )

    def model_is_ready(self, name: str, version: str = "") -> bool:
        """Whether a model takes requests."""
        try:
            self.registry.resolve(name, version)
        except ServingError:
            return False
        return True

    def model_ready(self, data: bytes) -> Any:
        """Whether a model takes requests; an unknown one does not."""
        message = parse(_m("ModelReadyRequest"), data)
        ready = self.model_is_ready(message.name, message.version)
        return _m("ModelReadyResponse")(ready=ready)

    def model_metadata(self, data: bytes) -> Any:
        """Inputs and outputs of a model."""
        message = parse(_m("ModelMetadataRequest"), data)
        _, _, served = self.registry.resolve(message.name, message.version)
        answer = _m("ModelMetadataResponse")(
            name=message.name,
            versions=self.registry.versions(message.name),
            platform=f"edgeweave_{served.loaded.config.kind}",
        )
        runner = served.runner
        for target, specs in (
            (answer.inputs, (*runner.inputs, *runner.optional_inputs)),
            (answer.outputs, runner.outputs),
        ):
            for spec in specs:
                target.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
        if runner.optional_inputs:
            names = (spec.name for spec in runner.optional_inputs)
            answer.properties["optional_inputs"] = ",".join(names)
        return answer

    def model_config(self, data: bytes) -> Any:
        """A model's configuration, as far as Triton's message has words for it."""
        message = parse(_m("ModelConfigRequest"), data)
        version, _, served = self.registry.resolve(message.name, message.version)
        config = served.loaded.config
        answer = _m("ModelConfigResponse")()
        out = answer.config
        out.name, out.platform, out.backend = message.name, f"edgeweave_{config.kind}", SERVER_NAME
        out.max_batch_size = config.max_batch_size
        # The batch dimension is implied by max_batch_size.
        first = 1 if config.max_batch_size else 0
        for target, specs in (
            (out.input, served.runner.inputs),
            (out.output, served.runner.outputs),
        ):
            for spec in specs:
                target.add(
                    name=spec.name,
                    data_type=DATATYPES[spec.datatype].config,
                    dims=spec.shape[first:],
                )
        for spec in served.runner.optional_inputs:
            # Without the word, clients such as perf_analyzer take every input to be needed.
            out.input.add(
                name=spec.name,
                data_type=DATATYPES[spec.datatype].config,
                dims=spec.shape[first:],
                optional=True,
            )
        out.instance_group.add(
            name=f"{message.name}_{version}", count=served.instances, kind="KIND_CPU"
        )
        if config.max_batch_size or config.kind != "tensors":
            out.dynamic_batching.max_queue_delay_microseconds = config.batching.max_queue_delay_us
            out.dynamic_batching.priority_levels = config.batching.priority_levels
            out.dynamic_batching.default_priority_level = config.batching.priority_levels
        for key, value in (
            ("engine", config.engine),
            ("precision", config.precision),
            ("threads", served.threads),
        ):
            out.parameters[key].string_value = str(value)
        return answer

    def model_statistics(self, data: bytes) -> Any:
        """Counts and times of one version, one model, or all."""
        message = parse(_m("ModelStatisticsRequest"), data)
        if message.name:
            self.registry.resolve(message.name, message.version)
        answer = _m("ModelStatisticsResponse")()
        for name, version, entry in self.registry.entries():
            if message.name in ("", name) and message.version in ("", version):
                model_statistics(answer.model_stats.add(), name, version, entry.stats)
        return answer

    # --- the repository ---

    def repository_index(self, data: bytes) -> Any:
        """All models and their states."""
        message = parse(_m("RepositoryIndexRequest"), data)
        _check_repository_name(message)
        answer = _m("RepositoryIndexResponse")()
        for name, version, state, reason in self.registry.index(message.ready):
            answer.models.add(name=name, version=version, state=state, reason=reason)
        return answer

    async def repository_load(self, data: bytes) -> Any:
        """Load or reload a model."""
        message = parse(_m("RepositoryModelLoadRequest"), data)
        self.registry.check_control()
        _check_repository_name(message)
        if message.parameters:
            raise InvalidArgumentError(
                "repository: parameters must be left out; a model's configuration is its file"
            )
        await self.registry.load(message.model_name)
        return _m("RepositoryModelLoadResponse")()

    async def repository_unload(self, data: bytes) -> Any:
        """Take a model out of service."""
        message = parse(_m("RepositoryModelUnloadRequest"), data)
        self.registry.check_control()
        _check_repository_name(message)
        await self.registry.unload(message.model_name)
        return _m("RepositoryModelUnloadResponse")()

    # --- resident graphs ---

    def _resident(self, name: str, version: str) -> tuple[str, ResidentRunner]:
        version, _, served = self.registry.resolve(name, version)
        if not isinstance(served.runner, ResidentRunner):
            raise NotFoundError(f"model {name}: must own a graph")
        return version, served.runner

    def graph_describe(self, data: bytes) -> Any:
        """Size and version of a model's graph."""
        message = parse(message_class("edgeweave.GraphDescribeRequest"), data)
        version, runner = self._resident(message.model_name, message.model_version)
        return describe(message.model_name, version, runner.graph)

    async def graph_update(self, data: bytes) -> Any:
        """Make a new version of a model's graph."""
        message = parse(message_class("edgeweave.GraphUpdateRequest"), data)
        if not self._settings.allow_graph_updates:
            raise FailedPreconditionError(
                "graph: updates must be switched on; start the server with --allow-graph-updates"
            )
        version, runner = self._resident(message.model_name, message.model_version)
        update = read_update(message, int(runner.graph.x.shape[1]))
        graph = await asyncio.to_thread(runner.update, update, message.expected_graph_version)
        _log.info(
            "graph updated", extra={"model": message.model_name, "graph_version": graph.version}
        )
        return describe(message.model_name, version, graph)


def _check_repository_name(message: Any) -> None:
    if message.repository_name:
        raise InvalidArgumentError("repository: name must be left out; there is one repository")


def _natural(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise InvalidArgumentError(f"request: {name} must be 0 or more, got {value!r}")
    return value


def _deadline(arrived_ns: int, remaining_s: float | None, timeout_us: int) -> int | None:
    caller = None if remaining_s is None else arrived_ns + int(remaining_s * 1e9)
    if not timeout_us:
        return caller
    own = arrived_ns + timeout_us * 1000
    return own if caller is None else min(own, caller)
