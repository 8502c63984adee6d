"""A recording as a HAR 1.2 file (HTTP Archive), which `mitmweb -r` and the tools of browsers open.

Request headers and bodies are not in a recording, and so not in the file. Bodies of responses are in base64,
since they are any bytes. Fields of our own begin with an underscore, as the format asks for.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from decathlon_mcp import __version__
from decathlon_mcp.plugins.web.exchanges import WebResponse
from decathlon_mcp.plugins.web.recording import Exchange, Recording

UNKNOWN = -1
"""A size or a duration that is not known (HAR 1.2)."""


def har(recording: Recording) -> Iterator[str]:
    """The parts of the file's text, one exchange at a time. Blocks. Raises RecordingError."""
    belongs_to = recording.id
    about = {
        "version": "1.2",
        "creator": {"name": "decathlon-mcp", "version": __version__},
        "comment": f"{belongs_to.suite}:{belongs_to.task}, revision {belongs_to.revision}, launch time "
        f"{recording.launch_time.isoformat()}",
    }
    yield f'{{"log": {json.dumps(about)[:-1]}, "entries": ['
    for number, exchange in enumerate(recording.exchanges()):
        yield f"{',' if number else ''}\n{json.dumps(_entry(exchange, recording.response(exchange)))}"
    yield "\n]}}\n"


def _entry(exchange: Exchange, response: WebResponse) -> dict[str, Any]:
    return {
        "startedDateTime": exchange.recorded_at,
        "time": 0,
        "request": {
            "method": exchange.method,
            "url": _text(exchange.url),
            "httpVersion": "HTTP/1.1",
            "cookies": [],
            "headers": [{"name": "Host", "value": _text(urlsplit(exchange.url).netloc)}],
            "queryString": [
                {"name": _text(name), "value": _text(value)}
                for name, value in parse_qsl(urlsplit(exchange.url).query, keep_blank_values=True)
            ],
            "headersSize": UNKNOWN,
            "bodySize": UNKNOWN,
        },
        "response": {
            "status": exchange.status,
            "statusText": _text(response.reason),
            "httpVersion": "HTTP/1.1",
            "cookies": [],
            "headers": [
                {"name": _text(name), "value": _text(value)} for name, value in response.headers.items
            ],
            "content": {
                "size": len(response.body),
                "mimeType": _text(response.headers.get("content-type")),
                "text": base64.b64encode(response.body).decode("ascii"),
                "encoding": "base64",
            },
            "redirectURL": _text(response.headers.get("location")),
            "headersSize": UNKNOWN,
            "bodySize": UNKNOWN,
        },
        "cache": {},
        "timings": {"send": 0, "wait": 0, "receive": 0},
        "_part": exchange.part,
        "_number": exchange.number,
    }


def _text(value: str) -> str:
    """What readers can encode: bytes that are not UTF-8 become replacement characters."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
