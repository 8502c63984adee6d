"""MCP with one of the task's servers, as its client: requests, their replies, what it says unasked.

Whatever the server sends is an error of one call or of this server, never more.
"""

from __future__ import annotations

import itertools
import re

from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.strict_json import as_object, encode_ascii, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

METHOD_NOT_FOUND = -32601

# Where SDKs put a reply's id: among the first fields, or last. For lines that cannot be parsed.
_ID_FIRST = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)\s*,')
_ID_LAST = re.compile(rb'"id"\s*:\s*(\d+)\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


class Waiter:
    """Who sent a request: told exactly once how it ended, unless it gave up."""

    def replied(self, message: dict[str, Any], line: bytes) -> None:
        """The server's reply, `result` or `error`, parsed and as it came."""
        raise NotImplementedError

    def failed(self, fault: Fault) -> None:
        """There will be no reply."""
        raise NotImplementedError

    def progressed(self, params: dict[str, Any]) -> None:
        """Any number of times before the end; only where the request had a progress token."""


class Session:
    """Messages to one server go out through `post` (data without line end, the request's id or None)."""

    def __init__(
        self,
        name: str,
        post: Callable[[bytes, int | None], object],
        on_notice: Callable[[str, dict[str, Any]], object],
    ) -> None:
        self._name = name
        self._post = post
        self._on_notice = on_notice
        self._ids = itertools.count(1)
        self._waiting: dict[int, Waiter] = {}

    def request(self, method: str, params: dict[str, Any], waiter: Waiter) -> int:
        """Send a request; its id, which is also what its progress token is replaced by. Raises Fault."""
        number = next(self._ids)
        meta = as_object(params.get("_meta"))
        if meta is not None and "progressToken" in meta:
            params = {**params, "_meta": {**meta, "progressToken": number}}
        try:
            data = encode_ascii({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        except (ValueError, RecursionError) as error:
            raise Fault(wire.BAD_PARAMS, f"not to be written as JSON: {error}") from None
        self._waiting[number] = waiter
        try:
            self._post(data, number)
        except Fault:
            self._waiting.pop(number, None)
            raise
        return number

    def notify(self, method: str, params: dict[str, Any] | None = None) -> None:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        self._try_post(message)

    def give_up(self, number: int, why: str) -> None:
        """Wait no more for a reply, and tell the server."""
        if self._waiting.pop(number, None) is not None:
            self.notify("notifications/cancelled", {"requestId": number, "reason": why})

    def fail(self, number: int, fault: Fault) -> None:
        """There will be no reply to this one; nothing when there was."""
        waiter = self._waiting.pop(number, None)
        if waiter is not None:
            waiter.failed(fault)

    def fail_all(self, fault: Fault) -> None:
        for number in tuple(self._waiting):
            self.fail(number, fault)

    # what the server sends

    def receive(self, line: bytes) -> None:
        if not line.lstrip().startswith(b"{"):
            return  # noise
        try:
            value, line = parse(line)
        except ValueError as error:
            found = _ID_FIRST.match(line[:200]) or _ID_LAST.search(line[-200:])
            if found is not None:
                self.fail(int(found.group(1)), self._bad(f"answered with a line that is not JSON: {error}"))
            return
        self.take(value, line)

    def take(self, value: Any, line: bytes) -> None:
        """A parsed message, and the line it came as. Noise is passed over."""
        message = as_object(value)
        if message is None or message.get("jsonrpc") != "2.0":
            return
        method, params = message.get("method"), as_object(message.get("params")) or {}
        if not isinstance(method, str):
            self._take_reply(message, line)
        elif "id" in message:
            self._decline(method, message["id"])
        elif method == "notifications/progress":
            token = params.get("progressToken")
            if type(token) is int and token in self._waiting:
                self._waiting[token].progressed(params)
        else:
            self._on_notice(method, params)

    def overlong(self, head: bytes, tail: bytes) -> None:
        """A line too long to keep: fails the call it answers, or the only one there is."""
        found = _ID_FIRST.match(head) or _ID_LAST.search(tail)
        number = int(found.group(1)) if found is not None else self._only()
        if number is not None:
            self.fail(
                number,
                Fault(
                    wire.TOO_LONG, f"server {self._name} sent a line of more than {wire.MAX_LINE_BYTES} bytes"
                ),
            )

    def _take_reply(self, message: dict[str, Any], line: bytes) -> None:
        number = message.get("id")
        if number is None and "error" in message:
            number = self._only()  # it could not even read whose request it was
        if type(number) is not int or number not in self._waiting:
            return
        if ("result" in message) == ("error" in message):
            self.fail(number, self._bad("answered with neither a result nor an error"))
            return
        self._waiting.pop(number).replied(message, line)

    def _decline(self, method: str, number: Any) -> None:
        if method == "ping":
            self._try_post({"jsonrpc": "2.0", "id": number, "result": {}})
        else:
            error = {"code": METHOD_NOT_FOUND, "message": f"{method} is not offered by this client"}
            self._try_post({"jsonrpc": "2.0", "id": number, "error": error})

    def _try_post(self, message: dict[str, Any]) -> None:
        try:
            self._post(encode_ascii(message), None)
        except Fault:
            pass  # a server that does not read: its calls say so

    def _only(self) -> int | None:
        return next(iter(self._waiting)) if len(self._waiting) == 1 else None

    def _bad(self, what: str) -> Fault:
        return Fault(wire.SERVER, f"server {self._name} {what}", server=self._name)
