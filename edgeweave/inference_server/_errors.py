"""What a request can fail with, in terms that no transport owns.

::

    EdgeweaveError
    +-- ServingError              has a `code` and a `reason` (a label for metrics)
        +-- InvalidArgumentError      the request is wrong
        +-- NotFoundError             no such model, version or graph
        +-- UnavailableError          loading, draining, queue full: try again
        +-- ResourceExhaustedError    above a limit
        +-- DeadlineExceededError     expired while it waited
        +-- UnauthenticatedError, PermissionDeniedError
        +-- FailedPreconditionError   what was asked for is switched off, or the state is another
        +-- ModelFailedError          the model raised; the text names the request alone
    +-- ModelConfigError          a model's folder is wrong (also a ValueError)

No text holds a path or a traceback: those go to the log.
"""

from __future__ import annotations

import enum

from edgeweave._errors import EdgeweaveError

__all__ = [
    "Code",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InvalidArgumentError",
    "ModelConfigError",
    "ModelFailedError",
    "NotFoundError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "ServingError",
    "UnauthenticatedError",
    "UnavailableError",
]


class Code(enum.Enum):
    """Kinds of failure, under gRPC's names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    UNAVAILABLE = "UNAVAILABLE"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    INTERNAL = "INTERNAL"


class ServingError(EdgeweaveError):
    """A request failed.

    Attributes:
        code: The kind of failure.
        reason: A short label for metrics.
    """

    code = Code.INTERNAL
    reason = "internal"

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class InvalidArgumentError(ServingError):
    """The request is wrong, whatever the state of the server."""

    code = Code.INVALID_ARGUMENT
    reason = "invalid_argument"


class NotFoundError(ServingError):
    """There is no such model or version."""

    code = Code.NOT_FOUND
    reason = "not_found"


class UnavailableError(ServingError):
    """Not now: loading, draining, or a full queue."""

    code = Code.UNAVAILABLE
    reason = "unavailable"


class ResourceExhaustedError(ServingError):
    """The request is above a limit."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "limit"


class DeadlineExceededError(ServingError):
    """The request expired while it waited."""

    code = Code.DEADLINE_EXCEEDED
    reason = "deadline"


class UnauthenticatedError(ServingError):
    """The request carries no token."""

    code = Code.UNAUTHENTICATED
    reason = "unauthenticated"


class PermissionDeniedError(ServingError):
    """The request's token is not known."""

    code = Code.PERMISSION_DENIED
    reason = "permission_denied"


class FailedPreconditionError(ServingError):
    """What was asked for is switched off, or the state is not the expected one."""

    code = Code.FAILED_PRECONDITION
    reason = "precondition"


class ModelFailedError(ServingError):
    """The model raised."""

    code = Code.INTERNAL
    reason = "model_error"


class ModelConfigError(EdgeweaveError, ValueError):
    """A model's folder or the server's settings are wrong."""
