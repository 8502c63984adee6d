"""Helpers of checks: what first processes say, and errors that are expected."""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any

import anyio

from decathlon_mcp.sandboxes.base import Sandbox


@contextmanager
def raises(expected: type[Exception], text: str = "") -> Generator[None]:
    message: str | None = None
    try:
        yield
    except expected as error:
        message = str(error)
    assert message is not None, f"{expected.__name__} was not raised"
    assert text in message, f"{message!r} does not mention {text!r}"


class Probe:
    """Talks to `PROBE_COMMAND` in a sandbox. `reopened`: torn and old lines may come before an answer."""

    def __init__(self, sandbox: Sandbox, *, reopened: bool = False) -> None:
        self._sandbox = sandbox
        self._reopened = reopened

    async def ping(self) -> None:
        await self._request({})

    async def write(self, path: PurePosixPath, text: str) -> None:
        await self._request({"write": str(path), "text": text})

    async def _request(self, request: dict[str, str]) -> None:
        token = secrets.token_hex(8)
        # The line feed ends a torn line.
        await self._sandbox.stream.send(b"\n" + json.dumps(request | {"echo": token}).encode() + b"\n")
        reply: Any = None
        while reply is None:
            for line in (await receive_line(self._sandbox)).split("\n"):
                with suppress(*[ValueError] * self._reopened):
                    answer = json.loads(line)
                    if answer["echo"] == token or not self._reopened:
                        reply = answer
        assert reply["python"] >= [3, 10]
        assert reply["echo"] == token


async def receive_line(sandbox: Sandbox) -> str:
    """The next line of the first process, without its end. Nothing may follow it yet."""
    data = b""
    while not data.endswith(b"\n"):
        data += await sandbox.stream.receive()
    return data.decode().rstrip("\n")


async def receive_all(sandbox: Sandbox) -> bytes:
    """Everything that the first process still writes to stdout."""
    chunks: list[bytes] = []
    with suppress(anyio.EndOfStream):
        while True:
            chunks.append(await sandbox.stream.receive())
    return b"".join(chunks)
