"""What a server cannot do to its clients: fill their memory, or keep them busy."""

from __future__ import annotations

import asyncio
import gzip
from itertools import count

import pytest
from decathlon_client import AtCapacityError, ClientError, Decathlon, sdk
from decathlon_client.client_errors import RETRY_SECONDS
from decathlon_client.client_session import error_from_response

pytestmark = pytest.mark.anyio

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n%b\r\n"
PART = b"x" * (1 << 16)
EVENT = b": nothing\r\n\r\n"


@pytest.mark.parametrize(
    ("kind", "encoding", "beginning", "part"),
    [
        (b"application/json", b"", b"", b"[" * len(PART)),
        (b"text/event-stream", b"", b"data: ", PART),
        (b"text/event-stream", b"", EVENT * 1000 + b"data: ", PART),
        (b"application/json", b"Content-Encoding: gzip\r\n", gzip.compress(bytes(1 << 20)), b""),
    ],
    ids=["json", "event", "later event", "compressed"],
)
async def test_a_message_without_end_fails(
    monkeypatch: pytest.MonkeyPatch, kind: bytes, encoding: bytes, beginning: bytes, part: bytes
) -> None:
    monkeypatch.setattr(sdk, "MAX_MESSAGE_BYTES", 1 << 20)
    sent: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(0)
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD % (kind, encoding))
            writer.write(b"%x\r\n%b\r\n" % (len(beginning), beginning) if beginning else b"")
            for _ in count():
                writer.write(b"%x\r\n%b\r\n" % (len(part), part) if part else b"")
                await writer.drain()
                sent[-1] += len(part)
                if not part and not await reader.read(1 << 16):
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ClientError):
            async with asyncio.timeout(30), Decathlon(f"http://127.0.0.1:{port}", resend_seconds=0):
                pass
    # With what buffers of the system take.
    assert max(sent) < 32 << 20


async def test_a_long_stream_of_events_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk, "MAX_MESSAGE_BYTES", 1000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        # In parts of any length, so that an end is in two of them.
        stream = EVENT * 2000
        for place in range(0, len(stream), 17):
            writer.write(stream[place : place + 17])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, sdk.http_client({}) as client:
        port = server.sockets[0].getsockname()[1]
        assert (await client.get(f"http://127.0.0.1:{port}/")).content == EVENT * 2000


@pytest.mark.parametrize("seconds", ["-1", "0", "1e-300", "NaN", "Infinity", "1" + "0" * 400, '"1"', "[1]"])
def test_a_full_server_is_asked_again_after_a_pause(seconds: str) -> None:
    data = f'{{"code": "at_capacity", "retryAfterSeconds": {seconds}}}'
    body = f'{{"error": {{"code": "full", "message": "full", "data": {data}}}}}'
    error = error_from_response(sdk.ErrorResponse(503, body.encode()))
    assert isinstance(error, AtCapacityError)
    assert error.retry_after_seconds == RETRY_SECONDS
