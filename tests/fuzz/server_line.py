"""Property of the server's reader of a driver's output: whatever comes, nothing but the request fails.

`check` feeds bytes to a client with pending requests and tunnels, as if a hijacked driver had sent them: each
line as a message, and all of them instead of one.
"""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from decathlon_sandbox import wire
from decathlon_sandbox.lines import NONCE_DIGITS, Lines

from decathlon_mcp.driver.driver_messages import MAX_DEPTH, Notification
from decathlon_mcp.driver.link import DriverLink
from decathlon_mcp.driver.replies import OVERLONG_KEY, OWN_PREFIX, Reply, read_reply, without_own_meta
from decathlon_mcp.driver.stream import ViolationError
from decathlon_mcp.errors import CallTimeoutError, DriverError, LimitExceededError
from decathlon_mcp.json_limits import check_json
from decathlon_mcp.plugins.tunnels import MAX_TUNNELS, Tunnels
from decathlon_mcp.types import as_json, as_object

LIMIT_BYTES = 2048
PORT = 1000
NONCE = b"0" * NONCE_DIGITS
CHUNK_BYTES = 7
"""The stream is received in chunks of this length, so that lines are put together."""


async def dial() -> Any:
    raise NotImplementedError


def check(data: bytes) -> None:
    """Raise AssertionError, or any error that the reader must not raise, if it misbehaves on these bytes."""
    dialled: list[Any] = []

    def start_soon(*arguments: Any) -> None:
        dialled.append(arguments)

    # `check` carries the bytes of the sandbox's stream, and no connection is made.
    link: Any = DriverLink(cast("Any", SimpleNamespace(stream=None)))
    link._lines = Lines(LIMIT_BYTES)
    link._tasks = SimpleNamespace(start_soon=start_soon)
    outcomes: list[Any] = []
    notifications: list[Notification] = []
    for number in (1, 2):
        read = partial(read_reply, server="files")
        link.send(number, wire.CALL, {}, read, outcomes.append, notifications.append)
    tunnels: Any = Tunnels(link.notify, link.spawn)
    link.channel = tunnels
    tunnels.forward({PORT: dial})
    tunnels.create()
    driver = Lines(1 << 20)
    driver.begin_writing(NONCE)
    link._lines.begin_reading(NONCE)
    lines = [line for line in data.split(b"\n") if line]
    if not _receive(link, b"".join(driver.frame(line) for line in lines)):
        assert max(map(len, lines)) > LIMIT_BYTES or any(line.startswith(b"unknown") for line in lines)
    counts = len(outcomes), len(notifications)
    _receive(link, data)
    assert (len(outcomes), len(notifications)) == counts
    assert len(dialled) <= MAX_TUNNELS
    for tunnel in tunnels._open.values():
        assert len(tunnel._buffer) <= wire.WINDOW_BYTES
        assert 0 <= tunnel._send_window_bytes <= wire.WINDOW_BYTES
    for notification in notifications:
        assert len(notification.params) <= wire.MAX_NOTIFICATION_BYTES
        if (params := notification.decoded()) is not None:
            _check_value(without_own_meta(params))
    assert len(outcomes) + len(link._pending) == 2
    for outcome in outcomes:
        _check_outcome(outcome)


def _receive(link: Any, data: bytes) -> bool:
    """Whether the protocol was kept."""
    try:
        for start in range(0, len(data), CHUNK_BYTES):
            link._handle(data[start : start + CHUNK_BYTES])
    except ViolationError:
        return False
    return True


def _check_outcome(outcome: Any) -> None:
    if isinstance(outcome, DriverError):
        assert outcome.data["reason"] in {*wire.REASONS.values(), "invalid_reply"}
        _check_value(outcome.data)
    elif not isinstance(outcome, CallTimeoutError | LimitExceededError):
        assert isinstance(outcome, Reply)
        (value,) = outcome.decoded().values()
        _check_value(value)
        if outcome.result is not None:
            assert not set(b"\r\n") & set(outcome.result)
            assert value == json.loads(outcome.result)
            assert outcome.meta == (as_object(value.get("_meta")) or {})
            assert outcome.is_error == bool(value.get("isError"))


def _check_value(value: Any) -> None:
    """A value that goes to clients and into the log."""
    assert type(value) is dict
    text = as_json(cast("Any", value))
    assert json.loads(text) is not None
    check_json(text.encode() if isinstance(text, str) else text, max_depth=MAX_DEPTH + 1)
    meta = as_object(cast("Any", value).get("_meta")) or {}
    assert [key for key in meta if key.lower().startswith(OWN_PREFIX)] in ([], [OVERLONG_KEY])
