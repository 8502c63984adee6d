"""The socket in the state folder at which the verdict on an episode can be had that an agent plays elsewhere.

Everyone who can read the state folder can ask. The address at which the episode is played leads elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import SocketStream
from decathlon_client import ClientError, Episode, NoVerdictError

from decathlon_mcp.background import background_tasks
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.types import JsonObject

REQUEST = b"verdict\n"
"""Without it nothing is graded: another server connects only to learn whether this one lives."""
SOCKET = "episode.sock"
"""Name of the socket in the state folder. It is there while its episode can be played."""


@asynccontextmanager
async def giving_verdict(episode: Episode, state: Path) -> AsyncGenerator[None]:
    """Grade the episode when somebody asks at the socket, and answer with its verdict, always the same.

    Raises BadRequestError if the state folder has the socket of an episode that is served now.
    """

    async def answer(client: SocketStream) -> None:
        async with client:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):  # nobody waits any more
                if await client.receive(len(REQUEST)) == REQUEST:
                    await client.send(json.dumps(await _verdict(episode)).encode())

    with _short_path(state) as path:
        with suppress(OSError):
            async with await anyio.connect_unix(path):
                raise BadRequestError(
                    f"another episode is served with the state folder {state}: name another with --state"
                )
        # A socket that a killed server left is replaced.
        async with (
            await anyio.create_unix_listener(path, mode=0o600) as listener,
            background_tasks() as tasks,
        ):
            tasks.start_soon(listener.serve, answer)
            try:
                yield
            finally:
                _remove(path)


async def ask_for_verdict(state: Path) -> tuple[JsonObject | None, str]:
    """The verdict on the episode that is served with this state folder, and why it has no reward.

    Waits while the attempt is graded. Raises DecathlonError if none is served, or if its server ends.
    """
    answer = b""
    try:
        with _short_path(state) as path:
            async with await anyio.connect_unix(path) as stream:
                await stream.send(REQUEST)
                async for chunk in stream:
                    answer += chunk
    except OSError as error:
        raise DecathlonError(
            f"no episode is served with the state folder {state} ({error.strerror}): "
            "`decathlon-mcp serve-episode TASK` serves one"
        ) from None
    except anyio.BrokenResourceError:
        answer = b""
    if not answer:
        raise DecathlonError("the server of the episode ended before there was a verdict")
    reply = json.loads(answer)
    return reply["verdict"], reply["problem"]


async def _verdict(episode: Episode) -> JsonObject:
    try:
        return {"verdict": (await episode.evaluate()).raw, "problem": ""}
    except NoVerdictError as error:
        return {"verdict": error.verdict or None, "problem": error.message}
    except ClientError as error:
        return {"verdict": None, "problem": error.message}


def _remove(path: str) -> None:
    # Not by a thread: it is also called when this task is cancelled.
    Path(path).unlink(missing_ok=True)


@contextmanager
def _short_path(state: Path) -> Generator[str]:
    """A path of the socket for bind(2) and connect(2), which take 107 bytes. Raises OSError."""
    folder = os.open(state, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)
