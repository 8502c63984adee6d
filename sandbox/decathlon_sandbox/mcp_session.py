"""MCP client side of a session with one of the task's servers.

Nothing that a server sends can cause more than the failure of one call or of that server.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from decathlon_sandbox import wire
from decathlon_sandbox.driver_requests import RequestError
from decathlon_sandbox.strict_json import JsonObject, as_list, as_object, encode_ascii, parse

METHOD_NOT_FOUND = -32601
PROTOCOL_VERSION = "2025-11-25"
"""Newest MCP revision with a handshake. A server may answer with an older revision."""
MAX_TOOL_PAGES = 1000
MAX_ID_CHARACTERS = 20

# Where SDKs put the id of a reply: among the first fields, or last. For lines that cannot be parsed.
_ID_FIRST = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*"?(\d{1,18})"?\s*,')
_ID_LAST = re.compile(rb'"id"\s*:\s*"?(\d{1,18})"?\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


class ReplyHandler:
    """Receives the outcome of a request, exactly once, unless the request was abandoned."""

    def on_reply(self, message: JsonObject, line: bytes) -> None:
        """The server's reply (`result` or `error`), parsed and as received."""
        raise NotImplementedError

    def on_error(self, error: RequestError) -> None:
        """There will be no reply."""
        raise NotImplementedError

    def on_progress(self, params: JsonObject) -> None:
        """Called any number of times before the outcome, if the request had a progress token."""


class McpSession:
    """Sends requests and notifications to one server and dispatches what the server sends.

    `send` transmits one message: its bytes without line terminator.
    """

    def __init__(
        self,
        server_name: str,
        send: Callable[[bytes], object],
        on_notification: Callable[[str, JsonObject], object],
    ) -> None:
        self.server_name = server_name
        self._send = send
        self._on_notification = on_notification
        self._ids = itertools.count(1)
        self._pending: dict[int, ReplyHandler] = {}

    def request(self, method: str, params: JsonObject, handler: ReplyHandler) -> int:
        """Send a request and return its id, which also replaces its progress token. Raises RequestError."""
        request_id = next(self._ids)
        meta = as_object(params.get("_meta"))
        if meta is not None and "progressToken" in meta:
            params = {**params, "_meta": {**meta, "progressToken": request_id}}
        try:
            data = encode_ascii({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
        except (ValueError, RecursionError) as error:
            message = f"`params` cannot be encoded as JSON: {error}"
            raise RequestError(wire.BAD_PARAMS, message) from None
        self._pending[request_id] = handler
        try:
            self._send(data)
        except RequestError:
            self._pending.pop(request_id, None)
            raise
        return request_id

    def notify(self, method: str, params: JsonObject | None = None) -> None:
        message: JsonObject = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        self._send_ignoring_errors(message)

    def abandon(self, request_id: int, reason: str) -> None:
        """Stop waiting for a reply and send the server a cancellation."""
        if self._pending.pop(request_id, None) is not None:
            self.notify("notifications/cancelled", {"requestId": request_id, "reason": reason})

    def fail(self, request_id: int, error: RequestError) -> None:
        """Fail a request; no effect if it is not pending."""
        handler = self._pending.pop(request_id, None)
        if handler is not None:
            handler.on_error(error)

    def fail_all(self, error: RequestError) -> None:
        for request_id in tuple(self._pending):
            self.fail(request_id, error)

    # messages from the server

    def receive_line(self, line: bytes) -> None:
        """Handle one line. Lines that are not a JSON-RPC message are ignored."""
        if not line.lstrip().startswith(b"{"):
            return
        try:
            value, line = parse(line)
        except ValueError as error:
            match = _ID_FIRST.match(line[:200]) or _ID_LAST.search(line[-200:])
            if match is not None:
                what = f"answered with a line that is not JSON: {error}"
                self.fail(int(match.group(1)), self._server_error(what))
            return
        message = as_object(value)
        if message is None or message.get("jsonrpc") != "2.0":
            return
        method, params = message.get("method"), as_object(message.get("params")) or {}
        if not isinstance(method, str):
            self._receive_reply(message, line)
        elif "id" in message:
            self._decline(method, message["id"])
        elif method == "notifications/progress":
            token = _as_id(params.get("progressToken"))
            if token in self._pending:
                self._pending[token].on_progress(params)
        else:
            self._on_notification(method, params)

    def receive_overlong(self, head: bytes, tail: bytes) -> None:
        """Handle a line over the limit: fail the request it answers, or the only pending one."""
        match = _ID_FIRST.match(head) or _ID_LAST.search(tail)
        request_id = int(match.group(1)) if match is not None else self._only_pending()
        if request_id is not None:
            message = f"server {self.server_name} sent a line of more than {wire.MAX_LINE_BYTES} bytes"
            self.fail(request_id, RequestError(wire.TOO_LONG, message))

    def _receive_reply(self, message: JsonObject, line: bytes) -> None:
        request_id = message.get("id")
        if request_id is None and message.get("error") is not None:
            request_id = self._only_pending()  # the server could not even read the id of the request
        request_id = _as_id(request_id)
        if request_id not in self._pending:
            return
        if "result" not in message and not is_error(message):
            self.fail(request_id, self._server_error("answered with neither a result nor an error"))
            return
        self._pending.pop(request_id).on_reply(message, line)

    def _decline(self, method: str, request_id: object) -> None:
        """Answer a request of the server: pings succeed, everything else is not supported."""
        if method == "ping":
            self._send_ignoring_errors({"jsonrpc": "2.0", "id": request_id, "result": {}})
        else:
            error = {"code": METHOD_NOT_FOUND, "message": f"{method} is not offered by this client"}
            self._send_ignoring_errors({"jsonrpc": "2.0", "id": request_id, "error": error})

    def _send_ignoring_errors(self, message: JsonObject) -> None:
        try:
            self._send(encode_ascii(message))
        except RequestError:
            pass  # the server does not read; its calls report that

    def _only_pending(self) -> int | None:
        return next(iter(self._pending)) if len(self._pending) == 1 else None

    def _server_error(self, what: str) -> RequestError:
        data = {"server": self.server_name}
        return RequestError(wire.SERVER, f"server {self.server_name} {what}", data)


def _as_id(value: object) -> int:
    """The id in a reply or in progress; 0, which no request has, for what cannot be one.

    Servers that keep ids as text send `"1"` for 1, and the SDKs of Python and TypeScript take that.
    """
    if type(value) is str and len(value) <= MAX_ID_CHARACTERS:
        try:
            return int(value)
        except ValueError:
            return 0
    return value if type(value) is int else 0


def is_error(message: JsonObject) -> bool:
    """Whether a reply is an error, as the SDKs read it.

    Beside a result, an error counts only if it is one as MCP defines it; the result does not count then.
    """
    error = message.get("error")
    if message.get("result") is None or error is None:
        return error is not None
    fields = as_object(error) or {}
    return type(fields.get("code")) is int and isinstance(fields.get("message"), str)


class Handshake(ReplyHandler):
    """Initializes a session, then lists the server's tools page by page.

    Ends with exactly one call: `on_success(tools)` or `on_failure(error)`.
    """

    def __init__(
        self,
        session: McpSession,
        on_success: Callable[[list[JsonObject]], object],
        on_failure: Callable[[RequestError], object],
    ) -> None:
        self._session = session
        self._on_success = on_success
        self._on_failure = on_failure
        self._method = "initialize"
        self._has_no_tools = False
        self._tools: list[JsonObject] = []
        self._cursors: set[str] = set()

    def start(self) -> None:
        params = {
            "protocolVersion": PROTOCOL_VERSION,
            "capabilities": {},
            "clientInfo": {"name": "decathlon-mcp", "version": str(wire.VERSION)},
        }
        self._request("initialize", params)

    def on_error(self, error: RequestError) -> None:
        self._on_failure(error)

    def on_reply(self, message: JsonObject, line: bytes) -> None:
        result = None if is_error(message) else as_object(message.get("result"))
        if self._method == "initialize":
            self._on_initialized(message, result or {})
        elif result is not None:
            self._on_tools_page(result)
        elif self._has_no_tools and (as_object(message.get("error")) or {}).get("code") == METHOD_NOT_FOUND:
            self._on_success(self._tools)
        else:
            self._fail_with_reply(message)

    def _on_initialized(self, message: JsonObject, result: JsonObject) -> None:
        if not isinstance(result.get("protocolVersion"), str):
            self._fail_with_reply(message)
            return
        self._has_no_tools = "tools" not in (as_object(result.get("capabilities")) or {})
        self._session.notify("notifications/initialized")
        self._request("tools/list", {})

    def _on_tools_page(self, result: JsonObject) -> None:
        tools, cursor = as_list(result.get("tools")), result.get("nextCursor")
        if tools is None or not all(isinstance(tool, dict) for tool in tools):
            self._fail("answered tools/list without a list of tools")
            return
        self._tools.extend(tools)
        if cursor is None or (isinstance(cursor, str) and cursor in self._cursors):
            # A server that repeats a cursor does not know pages. The SDKs, which ask for one, take its tools.
            self._on_success(self._tools)
        elif not isinstance(cursor, str) or len(self._cursors) >= MAX_TOOL_PAGES:
            self._fail(f"has an endless list of tools (cursor {str(cursor)[:100]!r})")
        else:
            self._cursors.add(cursor)
            self._request("tools/list", {"cursor": cursor})

    def _request(self, method: str, params: JsonObject) -> None:
        self._method = method
        try:
            self._session.request(method, params, self)
        except RequestError as error:
            self._on_failure(error)

    def _fail_with_reply(self, message: JsonObject) -> None:
        text = (as_object(message.get("error")) or {}).get("message")
        reply = f"an error: {str(text)[:1000]}" if text else "an invalid result"
        self._fail(f"answered {self._method} with {reply}")

    def _fail(self, what: str) -> None:
        self._on_failure(RequestError(wire.SERVER, f"server {self._session.server_name} {what}"))
