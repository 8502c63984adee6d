"""The beginning of a session: initialize, then the list of tools, page by page."""

from __future__ import annotations

from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.session import METHOD_NOT_FOUND, Waiter
from decathlon_sandbox.strict_json import as_list, as_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.server import Server

PROTOCOL = "2025-11-25"
"""The newest revision with a handshake; whatever older one a server answers with is then spoken."""
MAX_PAGES = 1000


class Handshake(Waiter):
    """Ends with `on_up(facts)` or `on_fault(fault)`, once."""

    def __init__(
        self, server: Server, on_up: Callable[[dict[str, Any]], object], on_fault: Callable[[Fault], object]
    ) -> None:
        self._server = server
        self._on_up = on_up
        self._on_fault = on_fault
        self._asking = "initialize"
        self._facts: dict[str, Any] = {}
        self._tools: list[dict[str, Any]] = []
        self._cursors: set[str] = set()

    def begin(self) -> None:
        hello = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "decathlon-mcp", "version": str(wire.VERSION)},
        }
        self._ask("initialize", hello)

    def failed(self, fault: Fault) -> None:
        self._on_fault(fault)

    def replied(self, message: dict[str, Any], line: bytes) -> None:
        result = as_object(message.get("result"))
        if self._asking == "initialize":
            self._greeted(message, result or {})
        elif result is not None:
            self._page(result)
        elif self._has_no_tools(as_object(message.get("error")) or {}):
            self._up()
        else:
            self._refused(message)

    def _greeted(self, message: dict[str, Any], result: dict[str, Any]) -> None:
        protocol = result.get("protocolVersion")
        if not isinstance(protocol, str):
            self._refused(message)
            return
        self._facts = {
            "protocolVersion": protocol,
            "serverInfo": as_object(result.get("serverInfo")) or {},
            "capabilities": as_object(result.get("capabilities")) or {},
        }
        self._server.agreed(protocol)
        self._server.session.notify("notifications/initialized")
        self._ask("tools/list", {})

    def _page(self, result: dict[str, Any]) -> None:
        tools, cursor = as_list(result.get("tools")), result.get("nextCursor")
        if tools is None or not all(isinstance(tool, dict) for tool in tools):
            self._fault("answered tools/list without a list of tools")
            return
        self._tools.extend(tools)
        if cursor is None:
            self._up()
        elif not isinstance(cursor, str) or cursor in self._cursors or len(self._cursors) >= MAX_PAGES:
            self._fault(f"lists its tools on pages without an end (cursor {str(cursor)[:100]!r})")
        else:
            self._cursors.add(cursor)
            self._ask("tools/list", {"cursor": cursor})

    def _ask(self, method: str, params: dict[str, Any]) -> None:
        self._asking = method
        try:
            self._server.session.request(method, params, self)
        except Fault as fault:
            self._on_fault(fault)

    def _up(self) -> None:
        self._on_up({**self._facts, "tools": self._tools})

    def _has_no_tools(self, error: dict[str, Any]) -> bool:
        return error.get("code") == METHOD_NOT_FOUND and "tools" not in self._facts["capabilities"]

    def _refused(self, message: dict[str, Any]) -> None:
        said = (as_object(message.get("error")) or {}).get("message")
        how = f"an error: {str(said)[:1000]}" if said else "something else than the protocol's"
        self._fault(f"answered {self._asking} with {how}")

    def _fault(self, what: str) -> None:
        self._on_fault(Fault(wire.SERVER, f"server {self._server.name} {what}"))
