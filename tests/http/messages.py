"""Raw MCP messages and headers for tests that speak plain HTTP."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from decathlon_mcp.http.authentication import Tokens

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

TASK = "find-answer"
MODERN = "2026-07-28"
PREFIX = "io.modelcontextprotocol/"
META: dict[str, Any] = {PREFIX + "protocolVersion": MODERN, PREFIX + "clientCapabilities": {}}
"""The `_meta` of a request without a session."""


def tokens_of(folder: Path, **roles: str) -> Tokens:
    """Tokens with these names and roles, whose secrets are their names."""
    file = folder / "tokens"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in roles}
    file.write_text("".join(f"{name} {digests[name]} {role}\n" for name, role in roles.items()))
    return Tokens.read(file)
