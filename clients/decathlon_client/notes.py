"""Notes: messages of a model's own in the record of its episode, sent while the model plays on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import anyio

from decathlon_client.client_episode import Episode
from decathlon_client.client_errors import ClientError
from decathlon_client.client_values import NoteRole, as_objects
from decathlon_client.task_groups import background_tasks

if TYPE_CHECKING:
    from decathlon_client import sync

MAX_WAITING = 10_000
"""Notes that wait to be sent; further notes are dropped."""
FLUSH_SECONDS = 3.0
"""How long the notes that wait may take at the end, when grading waits for them."""

log = logging.getLogger("decathlon.client")


@dataclass(frozen=True, slots=True)
class Note:
    """One message. `calls`: how many calls came before it."""

    text: str
    role: NoteRole = "assistant"
    usage: Mapping[str, float] | None = None
    calls: int | None = None


class NoteSender:
    """Sends an episode's notes one after the other. `add` never waits and never raises.

    `counts_calls`: whether this client makes the calls; otherwise a note's place is where it arrives.
    """

    def __init__(self, episode: Episode, *, counts_calls: bool = True) -> None:
        self._episode = episode
        self._counts_calls = counts_calls
        self._waiting: deque[Note] = deque()
        self._added = anyio.Event()
        self._sending = anyio.Lock()
        self._has_failed = False
        # A note that is being sent when the player is cancelled is sent to its end.
        self._running = anyio.CancelScope(shield=True)

    def add(self, text: str, role: NoteRole = "assistant", usage: Mapping[str, float] | None = None) -> None:
        """Send a note soon, placed after the calls that were made until now."""
        if text and len(self._waiting) < MAX_WAITING and not self._has_failed:
            calls = self._episode._calls if self._counts_calls else None  # pyright: ignore[reportPrivateUsage]
            self._waiting.append(Note(text, role, usage, calls))
            self._added.set()

    async def run(self) -> None:
        """Send the notes until `stop`."""
        with self._running:
            while True:
                await self._added.wait()
                self._added = anyio.Event()
                await self.flush()

    def stop(self) -> None:
        """End `run`."""
        self._running.cancel()

    async def flush(self) -> None:
        """Send what waits. After an error, which is logged, no more notes are sent."""
        async with self._sending:
            while self._waiting and not self._has_failed:
                note = self._waiting.popleft()
                try:
                    await self._episode.note(note.text, role=note.role, usage=note.usage, calls=note.calls)
                except ClientError as error:
                    self._has_failed = True
                    _log_loss(self._episode, error.message)


@asynccontextmanager
async def sending_notes(episode: Episode, *, counts_calls: bool = True) -> AsyncGenerator[NoteSender]:
    """A sender for the time of the context; at its end, what waits is sent, for at most `FLUSH_SECONDS`."""
    sender = NoteSender(episode, counts_calls=counts_calls)
    async with background_tasks() as tasks:
        tasks.start_soon(sender.run)
        try:
            yield sender
        finally:
            with anyio.move_on_after(FLUSH_SECONDS, shield=True):
                await sender.flush()
            sender.stop()


async def send_conversation(episode: Episode, messages: Iterable[Mapping[str, Any]]) -> None:
    """Send the notes of a finished conversation, before its grading, for at most `FLUSH_SECONDS`.

    Never raises a ClientError: what cannot be sent is logged.
    """
    try:
        with anyio.fail_after(FLUSH_SECONDS):
            for note in notes_of(messages):
                await episode.note(note.text, role=note.role, calls=note.calls)
    except ClientError as error:
        _log_loss(episode, error.message)
    except TimeoutError:
        _log_loss(episode, f"they took longer than {FLUSH_SECONDS:g} s")


def send_notes(episode: sync.Episode, messages: Iterable[Mapping[str, Any]]) -> None:
    """As `send_conversation`, of a synchronous episode."""
    cast("Any", episode)._loop.run(send_conversation, episode, list(messages))


def notes_of(messages: Iterable[Mapping[str, Any]]) -> Iterator[Note]:
    """The texts of a model in a finished conversation, in OpenAI's format."""
    calls = 0
    for message in messages:
        if message.get("role") != "assistant":
            continue
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning:
            yield Note(reasoning, "reasoning", calls=calls)
        if text := text_of(message.get("content")):
            yield Note(text, calls=calls)
        calls += len(as_objects(message.get("tool_calls")))


def text_of(content: object) -> str:
    """The text of a message's content, which is a text or a list of parts."""
    if isinstance(content, str):
        return content
    parts = as_objects(content)
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _log_loss(episode: Episode, reason: str) -> None:
    log.warning("Notes of episode %s are lost: %s", episode.page or episode.public_id, reason)
