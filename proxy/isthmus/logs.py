"""Structured logs with a fixed vocabulary.

Every line is one event: a message out of a small set of constant phrases, and fields beside it. Nothing variable is
ever formatted into the message, no contents of records and no secrets into the fields; a test reads the sources for it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

_STANDARD: frozenset[str] = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The ``extra`` fields of a record."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event, then the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """The same for a person: ``time level logger: event key=value ...``."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"
        pairs = "".join(f" {key}={value!r}" for key, value in fields_of(record).items())
        text = f"{stamp} {record.levelname.lower():7} {record.name}: {record.getMessage()}{pairs}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def configure(style: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send the project's logs to ``stream`` (standard error by default). ``style`` is ``text`` or ``json``."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    for name in ("isthmus", "isthmus_plugins", "isthmus_control", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    logging.getLogger("uvicorn.error").setLevel("WARNING")
