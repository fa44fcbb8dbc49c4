"""Message classes of the protocol, in a pool of their own.

Other packages register `inference` in protobuf's process-wide pool; two descriptions of one name
there are an error, so ours never enter it.
"""

from __future__ import annotations

import base64
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from ._descriptors import FILES
from ._errors import InvalidArgumentError

__all__ = ["GRAPH_SERVICE", "HEALTH_SERVICE", "INFERENCE_SERVICE", "message_class", "parse", "pool"]

INFERENCE_SERVICE: Final = "inference.GRPCInferenceService"
GRAPH_SERVICE: Final = "edgeweave.GraphService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"


def _build_pool() -> Any:
    built = descriptor_pool.DescriptorPool()
    for text in FILES.values():
        file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text))
        built.Add(file)
    return built


pool: Final = _build_pool()


def message_class(name: str) -> Any:
    """The class of a message.

    Args:
        name: Full name, `inference.ModelInferRequest` for one.

    Returns:
        The class, from the private pool.

    Raises:
        KeyError: There is no such message.
    """
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def parse(cls: Any, data: bytes) -> Any:
    """Parse a message.

    Args:
        cls: Its class.
        data: What came over the wire.

    Returns:
        The message.

    Raises:
        InvalidArgumentError: The bytes are no such message.
    """
    try:
        return cls.FromString(data)
    except DecodeError:
        raise InvalidArgumentError(
            f"request: body must be a {cls.DESCRIPTOR.full_name}, got {len(data)} other bytes"
        ) from None
