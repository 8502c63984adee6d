"""Logging to stderr: constant messages with fields, as text or as JSON. Secrets are never logged.

A field can have a text of a sandbox, such as what a server answered. Nothing that a terminal obeys is logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

LogFormat = Literal["text", "json"]
EXPORT_SECONDS = 60.0
"""Time between two messages of OpenTelemetry: an exporter without its collector logs several per batch."""


def fields(**values: Any) -> dict[str, Any]:
    """Fields of a log message, to be passed as `extra=` of a logging call."""
    return {"fields": values}


class _Formatter(logging.Formatter):
    def __init__(self, style: LogFormat) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S%z")
        self._json = style == "json"

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = getattr(record, "fields", {})
        if record.exc_info:
            values = {**values, "exception": self.formatException(record.exc_info)}
        head = {
            "time": self.formatTime(record, self.datefmt),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._json:
            return _printable_json({**head, **values})
        exception = values.pop("exception", None) if record.exc_info else None
        suffix = "".join(f" {name}={_short(value)}" for name, value in values.items())
        line = f"{head['time']} {head['level']:<7} {head['message']}{suffix}"
        text = f"{line}\n{exception}" if exception else line
        return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


class _SeldomExport(logging.Filter):
    """Lets one message of OpenTelemetry through in EXPORT_SECONDS, and all others."""

    _next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry"):
            return True
        now = time.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + EXPORT_SECONDS
        return True


def _short(value: object) -> str:
    text = str(value)
    is_word = text.isprintable() and " " not in text and text != ""
    return text if is_word else _printable_json(text)


def _printable_json(value: object) -> str:
    """JSON on one line. All but ASCII is escaped where something in it is not printed, as C1's controls."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if text.isprintable() else json.dumps(value, default=str)


def configure_logging(level: str = "info", style: LogFormat = "text") -> None:
    """Log to stderr; libraries that log a lot are limited to `warning`."""
    # stdout may carry MCP messages.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(style))
    handler.addFilter(_SeldomExport())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    libraries = ("mcp", "uvicorn", "urllib3", "httpx", "httpx2", "asyncio", "sse_starlette")
    for name in (*libraries, "opentelemetry"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
