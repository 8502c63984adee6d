"""A connection with our limits: responses come whole and in order, whatever follows their requests."""

from __future__ import annotations

import asyncio
import socket

import anyio
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from decathlon_mcp.http.protocol import ConnectionLimits, Connections, LimitedHttpProtocol

pytestmark = pytest.mark.anyio


HEAD = b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("requests", [HEAD, HEAD + POST], ids=["alone", "with another behind it"])
@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "shut down"])
async def test_a_response_without_a_body_is_sent_before_the_connection_ends(
    is_refused: bool, requests: bytes
) -> None:
    """Its head waits for a body in the same write, until the loop's next iteration."""
    answered = failed = 0

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal answered
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
            answered += 1
        else:
            await receive()

    def on_failure(*_: object) -> None:
        nonlocal failed
        failed += 1

    connections = Connections(ConnectionLimits())
    config = uvicorn.Config(answer, log_config=None, ws="none", lifespan="off")
    config.load()
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(on_failure)
    with theirs:
        transport, protocol = await loop.connect_accepted_socket(
            lambda: connections.protocol(config=config, server_state=ServerState(), app_state={}), ours
        )
        assert isinstance(protocol, LimitedHttpProtocol)
        protocol.data_received(requests)
        while not answered:  # noqa: ASYNC110  (until then, step by step)
            await asyncio.sleep(0)
        if is_refused:
            protocol.data_received(b"\0\r\n\r\n")
        else:
            protocol.shutdown()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        transport.close()
        with anyio.fail_after(10):
            received = await anyio.to_thread.run_sync(lambda: b"".join(iter(lambda: theirs.recv(4096), b"")))
    loop.set_exception_handler(None)
    statuses = [line for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert statuses == [b"HTTP/1.1 204 No Content", *[b"HTTP/1.1 400 Bad Request"] * is_refused]
    assert failed == 0
