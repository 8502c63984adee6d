"""The type of this server's tools, and functions that create results and schemas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
from mcp.server import ServerRequestContext

Result = types.CallToolResult | types.InputRequiredResult
Context = ServerRequestContext[Any, Any]
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool; the conformance suites prescribe `name`."""

    name: str
    description: str
    run: Callable[[Context, types.CallToolRequestParams], Awaitable[Result]]
    schema: Mapping[str, Any] = field(default_factory=lambda: NO_ARGUMENTS)

    def definition(self) -> types.Tool:
        return types.Tool(name=self.name, description=self.description, input_schema=dict(self.schema))


def text_result(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)])


def error_result(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)


def object_schema(*, required: tuple[str, ...] = (), **properties: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of an object with these properties, for tools and elicitations."""
    return {"type": "object", "properties": properties, "required": list(required)}
