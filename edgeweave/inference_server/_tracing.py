"""OpenTelemetry spans, where its package is installed and they were asked for."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from ._errors import ModelConfigError

__all__ = ["Tracer"]


class Tracer:
    """Makes a span per request, in the trace that the caller names.

    Args:
        enabled: Whether to make any.

    Raises:
        ModelConfigError: Spans are asked for and `opentelemetry` is not installed.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._tracer: Any = None
        if not enabled:
            return
        try:
            self._trace = importlib.import_module("opentelemetry.trace")
            self._propagate = importlib.import_module("opentelemetry.propagate")
        except ImportError as error:
            raise ModelConfigError(
                f"settings: tracing needs OpenTelemetry ({error}); pip install opentelemetry-sdk"
            ) from error
        self._tracer = self._trace.get_tracer("edgeweave.inference_server")

    def span(self, name: str, context: Any) -> contextlib.AbstractContextManager[Any]:
        """A span around one request.

        Args:
            name: The rpc.
            context: gRPC's; its metadata may carry `traceparent`.

        Returns:
            To be entered; does nothing where tracing is off.
        """
        if self._tracer is None:
            return contextlib.nullcontext()
        carrier = {
            key: value
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        span: contextlib.AbstractContextManager[Any] = self._tracer.start_as_current_span(
            f"inference/{name}",
            context=self._propagate.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.method": name},
        )
        return span
