"""Raw MCP messages and headers for tests that speak plain HTTP."""

from __future__ import annotations

from typing import Any

ACCEPT: dict[str, str] = {"Accept": "application/json, text/event-stream"}
"""Streamable HTTP requires clients to accept both."""

INITIALIZE: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
