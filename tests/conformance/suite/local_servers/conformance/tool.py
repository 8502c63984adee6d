"""What a tool of this server is, and how its answers are put."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
from mcp.server import ServerRequestContext

Answer = types.CallToolResult | types.InputRequiredResult
Context = ServerRequestContext[Any, Any]
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool, called `name` as the conformance suites call it."""

    name: str
    description: str
    run: Callable[[Context, types.CallToolRequestParams], Awaitable[Answer]]
    schema: Mapping[str, Any] = field(default_factory=lambda: NO_ARGUMENTS)

    def listed(self) -> types.Tool:
        return types.Tool(name=self.name, description=self.description, input_schema=dict(self.schema))


def text(words: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=words)])


def failed(words: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=words)], is_error=True)


def schema(*, required: tuple[str, ...] = (), **properties: Mapping[str, Any]) -> dict[str, Any]:
    """An object with these properties, as tools and elicitations want it."""
    return {"type": "object", "properties": properties, "required": list(required)}
