"""Log lines of the server, as text or as one JSON object each."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, Final

__all__ = ["JsonFormatter", "TextFormatter", "configure_logs"]

# What every record has; the rest was passed as `extra`.
_STANDARD: Final = frozenset(
    [*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName"]
)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, event, what was passed beside it, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {"time": _time(record), "level": record.levelname, "event": record.getMessage()}
        line |= _fields(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, event, `key=value` pairs."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback if there is one."""
        pairs = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure_logs(style: str, level: str) -> None:
    """Send the server's log to stderr.

    Args:
        style: `json` or `text`.
        level: `debug`, `info`, `warning` or `error`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logger = logging.getLogger("edgeweave.server")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
