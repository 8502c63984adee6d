"""Tools that return each kind of content, and one whose input schema has many JSON Schema keywords."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from typing import Any

import mcp_types as types
from tool import Context, Result, Tool, error_result, object_schema, text_result


def png() -> str:
    """An image of one red pixel, in base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixel = zlib.compress(b"\x00\xff\x00\x00")
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")
    return base64.b64encode(image).decode()


def wav() -> str:
    """A sound of one millisecond of silence, in base64."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(1)
        sound.setframerate(8000)
        sound.writeframes(b"\x80" * 8)
    return base64.b64encode(buffer.getvalue()).decode()


def resource(uri: str, mime_type: str, text: str) -> types.EmbeddedResource:
    return types.EmbeddedResource(
        resource=types.TextResourceContents(uri=uri, mime_type=mime_type, text=text)
    )


TEXT = types.TextContent(text="This is a simple text response for testing.")
IMAGE = types.ImageContent(data=png(), mime_type="image/png")
AUDIO = types.AudioContent(data=wav(), mime_type="audio/wav")
EMBEDDED = resource("test://embedded-resource", "text/plain", "This is an embedded resource content.")
MIXED = resource("test://mixed-content-resource", "application/json", '{"test": "data", "value": 123}')


def constant_tool(name: str, description: str, *content: types.ContentBlock) -> Tool:
    async def run(ctx: Context, params: types.CallToolRequestParams) -> Result:
        return types.CallToolResult(content=list(content))

    return Tool(name, description, run)


async def fail(ctx: Context, params: types.CallToolRequestParams) -> Result:
    return error_result("This tool intentionally returns an error for testing")


async def echo(ctx: Context, params: types.CallToolRequestParams) -> Result:
    return text_result(f"arguments: {params.arguments or {}}")


# Copied from the suites, which compare it.
SCHEMA_2020_12: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
REGION = {"type": "string", "description": "Repeated in a header.", "x-mcp-header": "Region"}

TOOLS = (
    constant_tool("test_simple_text", "Returns text.", TEXT),
    constant_tool("test_image_content", "Returns an image.", IMAGE),
    constant_tool("test_audio_content", "Returns audio.", AUDIO),
    constant_tool("test_embedded_resource", "Returns a resource.", EMBEDDED),
    constant_tool(
        "test_multiple_content_types", "Returns text, an image and a resource.", TEXT, IMAGE, MIXED
    ),
    Tool("test_error_handling", "Always returns an error.", fail),
    # What it would request of the client does not reach a client.
    Tool("test_streaming_elicitation", "Always returns an error.", fail),
    Tool("json_schema_2020_12_tool", "Has a schema with many keywords.", echo, SCHEMA_2020_12),
    Tool(
        "test_x_mcp_header",
        "Has a parameter that is repeated in a header.",
        echo,
        object_schema(region=REGION),
    ),
)
