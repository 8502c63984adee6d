"""Reading requests: the body twice, header values without spaces."""

from __future__ import annotations

import pytest
from starlette.types import Message, Receive, Scope, Send

from decathlon_mcp.http.requests import MAX_BODY_BYTES, RawEndpoint, read_body

pytestmark = pytest.mark.anyio

DISCONNECT: Message = {"type": "http.disconnect"}


def body_part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def receive_from(*messages: Message) -> Receive:
    unread = iter(messages)

    async def receive() -> Message:
        return next(unread)

    return receive


async def test_a_body_that_was_read_is_delivered_again() -> None:
    parts = (body_part(b"one ", more=True), body_part(b"two", more=False))
    body, receive = await read_body(receive_from(*parts, DISCONNECT))
    assert body == b"one two"
    assert [await receive() for _ in range(3)] == [*parts, DISCONNECT]


async def test_reading_stops_at_a_disconnect() -> None:
    body, receive = await read_body(receive_from(body_part(b"half", more=True), DISCONNECT))
    assert body == b"half"
    assert [(await receive())["type"] for _ in range(2)] == ["http.request", "http.disconnect"]


async def test_reading_stops_past_the_limit() -> None:
    large, rest = body_part(bytes(MAX_BODY_BYTES + 1), more=True), body_part(b"rest", more=False)
    body, receive = await read_body(receive_from(large, rest))
    assert len(body) == MAX_BODY_BYTES + 1
    assert [await receive() for _ in range(2)] == [large, rest]


async def test_spaces_around_header_values_are_removed() -> None:
    scopes: list[Scope] = []

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "headers": [(b"mcp-session-id", b" abc \t"), (b"accept", b"a, b")]}
    await RawEndpoint(endpoint)(scope, receive_from(), send)
    assert scopes[0]["headers"] == [(b"mcp-session-id", b"abc"), (b"accept", b"a, b")]
