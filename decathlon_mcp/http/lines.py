"""Responses of a line of text or JSON. The line feed keeps a shell's prompt off the line that curl prints."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse, PlainTextResponse


class TextLine(PlainTextResponse):
    """A response with a text and a line feed."""

    def render(self, content: str) -> bytes:
        return f"{content}\n".encode()


class JsonLine(JSONResponse):
    """A response with a JSON object and a line feed."""

    def render(self, content: Mapping[str, object]) -> bytes:
        return super().render(content) + b"\n"
