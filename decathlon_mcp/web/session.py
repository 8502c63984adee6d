"""Sessions: how the requests of one sandbox are answered, and what of them is recorded.

A session counts how often its sandbox has made each request, so that every sandbox sees the same responses in
the same order. In mode `replay-or-record`, sandboxes that make a request at the same time which the recording
does not have wait for the first of them, so that the site is asked once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from decathlon_mcp.web.exchanges import Counts, Headers, Mode, Part, WebRequest, WebResponse
from decathlon_mcp.web.matching import RequestKey, request_key, storable
from decathlon_mcp.web.recording import Recording, RecordingError

MISSED_STATUS = 504
"""As a cache that may only answer from what it has (RFC 9111, 5.2.1.7)."""
MARK = "Decathlon-Web"
"""Header of responses that the proxy makes: `replayed`, `missed`."""
TEMPORARY = frozenset({408, 421, 425, 429, 500, 502, 503, 504})
"""Statuses that are not recorded: a rollout at another time would not get them."""
WAIT_SECONDS = 90.0
"""How long a sandbox waits for another one that asks a site for the same."""
MAX_KEYS = 20_000
"""Different requests of one session; of more, the numbers are not kept apart."""


class Filling:
    """The requests that sandboxes are asking sites for at the moment, over all sessions of a recording."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, str, str], asyncio.Event] = {}

    def claim(self, part: Part, key: RequestKey) -> asyncio.Event | None:
        """Ask the site (None), or wait for the event of who is asking it."""
        name = (part, key.digest, key.variant)
        if (event := self._pending.get(name)) is not None:
            return event
        self._pending[name] = asyncio.Event()
        return None

    def release(self, part: Part, key: RequestKey) -> None:
        """The site has answered, or could not be reached."""
        if (event := self._pending.pop((part, key.digest, key.variant), None)) is not None:
            event.set()


@dataclass(frozen=True, slots=True)
class PendingExchange:
    """A request that the site is being asked. `claimed`: others wait for it."""

    request: WebRequest
    key: RequestKey
    number: int
    claimed: bool


@dataclass(slots=True)
class Session:
    """The requests of one sandbox. `max_response_bytes`: longest body that is recorded."""

    id: str
    mode: Mode
    part: Part
    recording: Recording
    filling: Filling
    max_response_bytes: int
    counts: Counts = field(default_factory=Counts)
    problem: str = ""
    """Why something could not be recorded, the last time."""
    _numbers: Counter[str] = field(default_factory=Counter[str])
    _keys: set[str] = field(default_factory=set[str])

    @property
    def keys(self) -> Collection[str]:
        """The different requests that were made."""
        return self._keys

    async def answer(self, request: WebRequest) -> WebResponse | PendingExchange:
        """The recorded response, an error that says that there is none, or what the site has to be asked."""
        key = request_key(request)
        number = self._next_number(key)
        if len(self._keys) < MAX_KEYS:
            self._keys.add(key.digest)
        if self.mode == "record":
            return PendingExchange(request, key, number, claimed=False)
        if (found := await self._find(key, number)) is not None:
            return found
        if self.mode == "replay":
            self.counts = replace(self.counts, missed=self.counts.missed + 1)
            return missed_response(key)
        while (event := self.filling.claim(self.part, key)) is not None:
            try:
                await asyncio.wait_for(event.wait(), WAIT_SECONDS)
            except TimeoutError:
                return PendingExchange(request, key, 0, claimed=False)
            if (found := await self._find(key, number)) is not None:
                return found
        return PendingExchange(request, key, 0, claimed=True)

    async def store(self, pending: PendingExchange, response: WebResponse | None) -> None:
        """Record the site's response. None: it is a stream, or too long to be kept in memory."""
        recorded = False
        try:
            if (
                response is not None
                and response.status not in TEMPORARY
                and response.status >= 200
                and len(response.body) <= self.max_response_bytes
            ):
                clean = await asyncio.to_thread(storable, pending.request, response)
                await asyncio.to_thread(self.recording.add, self.part, pending.key, pending.number, clean)
                recorded = True
        except RecordingError as error:
            self.problem = str(error)
        finally:
            self._finish(pending)
        if recorded:
            self.counts = replace(self.counts, recorded=self.counts.recorded + 1)
        else:
            self.counts = replace(self.counts, passed=self.counts.passed + 1)

    def fail(self, pending: PendingExchange) -> None:
        """The site could not be reached, or the sandbox went away."""
        self._finish(pending)
        self.counts = replace(self.counts, missed=self.counts.missed + 1)

    def _finish(self, pending: PendingExchange) -> None:
        if pending.claimed:
            self.filling.release(self.part, pending.key)

    async def _find(self, key: RequestKey, number: int) -> WebResponse | None:
        found = await asyncio.to_thread(self.recording.find, self.part, key, number)
        if found is None:
            return None
        self.counts = replace(self.counts, replayed=self.counts.replayed + 1)
        return replace(found, headers=Headers((*found.headers.items, (MARK, "replayed"))))

    def _next_number(self, key: RequestKey) -> int:
        name = key.digest + key.variant
        number = self._numbers[name]
        if name in self._numbers or len(self._numbers) < MAX_KEYS:
            self._numbers[name] += 1
        return number


def requests_digest(sessions: Collection[Session]) -> str:
    """What tells rollouts apart: the set of all requests of their agents."""
    keys = sorted({key for session in sessions if session.part == "agent" for key in session.keys})
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:32]


def missed_response(key: RequestKey) -> WebResponse:
    """The error that a sandbox gets for a request without a recording."""
    text = (
        f"This environment has no live web: it answers from a recording, which has no response to\n"
        f"{key.method} {key.url}\n"
        "The request was not sent to the site. Repeating it gives the same answer; try another page.\n"
    )
    headers = (("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"), (MARK, "missed"))
    return WebResponse(MISSED_STATUS, "Not In The Recording", Headers(headers), text.encode())
