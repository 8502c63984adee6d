"""Tools that answer with content of each kind, and one whose input schema uses all of JSON Schema 2020-12."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from typing import Any

import mcp_types as types
from tool import Answer, Context, Tool, failed, schema, text


def png() -> str:
    """One red pixel, base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixel = zlib.compress(b"\x00\xff\x00\x00")
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")
    return base64.b64encode(image).decode()


def wav() -> str:
    """A millisecond of silence, base64."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(1)
        sound.setframerate(8000)
        sound.writeframes(b"\x80" * 8)
    return base64.b64encode(buffer.getvalue()).decode()


def resource(uri: str, mime_type: str, words: str) -> types.EmbeddedResource:
    return types.EmbeddedResource(
        resource=types.TextResourceContents(uri=uri, mime_type=mime_type, text=words)
    )


TEXT = types.TextContent(text="This is a simple text response for testing.")
IMAGE = types.ImageContent(data=png(), mime_type="image/png")
AUDIO = types.AudioContent(data=wav(), mime_type="audio/wav")
EMBEDDED = resource("test://embedded-resource", "text/plain", "This is an embedded resource content.")
MIXED = resource("test://mixed-content-resource", "application/json", '{"test": "data", "value": 123}')


def answering(name: str, description: str, *content: types.ContentBlock) -> Tool:
    async def run(ctx: Context, params: types.CallToolRequestParams) -> Answer:
        return types.CallToolResult(content=list(content))

    return Tool(name, description, run)


async def fail(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    return failed("This tool intentionally returns an error for testing")


async def echo(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    return text(f"arguments: {params.arguments or {}}")


# The schema is the suites' own, word for word: they compare it.
EVERY_KEYWORD: dict[str, Any] = {
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
    answering("test_simple_text", "Answers with text.", TEXT),
    answering("test_image_content", "Answers with an image.", IMAGE),
    answering("test_audio_content", "Answers with a sound.", AUDIO),
    answering("test_embedded_resource", "Answers with a resource.", EMBEDDED),
    answering("test_multiple_content_types", "Answers with text, image and resource.", TEXT, IMAGE, MIXED),
    Tool("test_error_handling", "Always fails.", fail),
    Tool("json_schema_2020_12_tool", "Has a schema with every keyword.", echo, EVERY_KEYWORD),
    Tool("test_x_mcp_header", "Has a parameter that is repeated in a header.", echo, schema(region=REGION)),
)
