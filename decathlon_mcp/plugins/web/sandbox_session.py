"""Sessions: answers to the requests of one sandbox, and their recording.

A session counts how often its sandbox has made each request, so that every sandbox sees the same responses in
the same order. In mode `replay-or-record`, sandboxes that make a request at the same time which the recording
does not have wait for the first of them, so that the site is asked once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

from decathlon_mcp.plugins.web.exchanges import (
    Counts,
    Headers,
    Mode,
    Part,
    RequestKey,
    WebRequest,
    WebResponse,
    decoded_body,
    request_key,
    storable,
)
from decathlon_mcp.plugins.web.recording import Recording, RecordingError

P = ParamSpec("P")
T = TypeVar("T")
USAGE_HOSTS = (
    # Microsoft's libraries, such as ONNX Runtime, which converters of PDF files load.
    *("events.data.microsoft.com", "in.applicationinsights.azure.com", "dc.services.visualstudio.com"),
    # Libraries and pages.
    *("google-analytics.com", "analytics.google.com", "stats.g.doubleclick.net"),
    *("ingest.sentry.io", "ingest.us.sentry.io", "ingest.de.sentry.io"),
    *("i.posthog.com", "app.posthog.com", "api.segment.io"),
    *("api.mixpanel.com", "api-js.mixpanel.com", "api.amplitude.com", "api2.amplitude.com"),
    # Chromium: updates, the time, experiments, dictionaries, forms, and lists of dangerous sites.
    *("update.googleapis.com", "safebrowsing.googleapis.com", "optimizationguide-pa.googleapis.com"),
    *("clients2.google.com", "clientservices.googleapis.com", "content-autofill.googleapis.com"),
    *("redirector.gvt1.com", "edgedl.me.gvt1.com"),
)
"""Hosts that only receive reports about the use of programs and pages, with their subdomains.

Such requests are no part of what a task sees of the web. They differ each time and their times depend on the
machine, so that no recording could answer them. The proxy accepts them in every mode: they are not sent, not
recorded and not counted."""

Room = Callable[[], AbstractAsyncContextManager[object]]
"""Waits until there is memory for a recorded response."""

MISSED_STATUS = 504
"""As a cache that may only answer from what it has (RFC 9111, 5.2.1.7)."""
MARK = "Decathlon-Web"
"""Header of responses that the proxy makes: `replayed`, `missed`, `accepted`, `refused`."""
TEMPORARY = frozenset({408, 421, 425, 429, 500, 502, 503, 504})
"""Statuses that are not recorded: a rollout at another time would not get them."""
UNREACHABLE_STATUS = 502
"""Of sites that could not be reached: what the proxy answers while recording, and therefore in a replay."""
MAX_MISSES = 200
"""Different requests without an answer that a session remembers."""
WAIT_SECONDS = 20.0
"""How long a sandbox waits for another that asks a site for the same, and may never read the answer."""
SETTLE_SECONDS = 10.0
"""How long the counts of a session wait for what is being recorded."""
MAX_KEYS = 20_000
"""Different requests of one session; of more, the numbers are not kept apart."""


class SharedRecording:
    """A recording and what all sessions that use it share.

    Its thread is its own: what is slow here, such as a lock on the file, delays no other recording.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, "recording")
        self._recording: Recording | None = None
        self._asking: dict[tuple[str, str, str], asyncio.Event] = {}

    async def run(
        self, method: Callable[Concatenate[Recording, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of the recording, which is opened first. Raises RecordingError."""

        def call() -> T:
            if self._recording is None:
                self._recording = Recording(self.path, max_bytes=self._max_bytes)
            return method(self._recording, *args, **kwargs)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RuntimeError as error:  # by connections that outlive their episode
            raise RecordingError(f"{self.path} is closed") from error

    def close(self) -> None:
        """Close the file after everything that was called before; the process ends after that."""
        self._thread.submit(lambda: self._recording and self._recording.close())
        self._thread.shutdown(wait=False)

    def claim(self, part: Part, key: RequestKey) -> asyncio.Event | None:
        """Ask the site (None), or wait for the event of the sandbox that is asking it."""
        event = self._asking.get((part, key.digest, key.variant))
        if event is None:
            self._asking[part, key.digest, key.variant] = asyncio.Event()
        return event

    def answered(self, part: Part, key: RequestKey) -> None:
        """The site has answered, or could not be reached."""
        self._asking.pop((part, key.digest, key.variant)).set()


@dataclass(frozen=True, slots=True)
class PendingExchange:
    """A request that the site is being asked. `claimed`: others wait for it."""

    request: WebRequest
    key: RequestKey
    number: int
    claimed: bool


@dataclass(slots=True)
class Session:
    """The requests of one sandbox."""

    episode: str
    mode: Mode
    part: Part
    recording: SharedRecording
    max_response_bytes: int
    """Longest body that is recorded."""
    counts: Counts = field(default_factory=Counts)
    problem: str = ""
    """Why something could not be recorded, the last time."""
    keys: set[str] = field(default_factory=set[str])
    """The different requests that were made."""
    missed: Counter[RequestKey] = field(default_factory=Counter[RequestKey])
    """The requests without an answer, and how often each was made."""
    _numbers: Counter[str] = field(default_factory=Counter[str])
    _storing: int = 0
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: WebRequest, room: Room = nullcontext) -> WebResponse | PendingExchange:
        """The recorded response, an error that says that there is none, or what the site has to be asked."""
        if is_usage_report(request.url):
            return WebResponse(204, "No Content", Headers(((MARK, "accepted"),)))
        key = request_key(request)
        number = self._next_number(key)
        if len(self.keys) < MAX_KEYS:
            self.keys.add(key.digest)
        if self.mode == "record":
            return PendingExchange(request, key, number, claimed=False)
        if (found := await self._find(key, number, room)) is not None:
            return found
        if self.mode == "replay":
            failure = await self.recording.run(Recording.find_failure, self.part, key)
            if failure is not None:
                self.counts += Counts(replayed=1)
                return failed_response(key, failure)
            self._miss(key)
            return missed_response(key)
        while (event := self.recording.claim(self.part, key)) is not None:
            try:
                await asyncio.wait_for(event.wait(), WAIT_SECONDS)
            except TimeoutError:
                return PendingExchange(request, key, 0, claimed=False)
            if (found := await self._find(key, number, room)) is not None:
                return found
        return PendingExchange(request, key, 0, claimed=True)

    async def store(self, pending: PendingExchange, response: WebResponse | None) -> None:
        """Record the site's response, as it was sent. None: it is a stream, or cannot be kept in memory.

        It is not recorded if it is too long, or cannot be decoded.
        """
        recorded = False
        self._storing += 1
        self._settled.clear()
        try:
            if response is not None and response.status not in TEMPORARY and response.status >= 200:
                clean = await asyncio.to_thread(self._cleaned, pending.request, response)
                if clean is not None:
                    await self.recording.run(Recording.add, self.part, pending.key, pending.number, clean)
                    recorded = True
        except RecordingError as error:
            self.problem = str(error)
        finally:
            self._finish(pending)
            self.counts += Counts(recorded=1) if recorded else Counts(passed=1)
            self._storing -= 1
            if not self._storing:
                self._settled.set()

    def _cleaned(self, request: WebRequest, response: WebResponse) -> WebResponse | None:
        encoding = response.headers.get("content-encoding")
        body = decoded_body(response.body, encoding, self.max_response_bytes)
        return None if body is None else storable(request, replace(response, body=body))

    async def settled(self) -> None:
        """Wait until the responses that have been received are recorded: their bytes are passed on before."""
        if self._storing:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), SETTLE_SECONDS)

    def refuse(self, problem: str = "") -> None:
        """Count a request that is answered by an error, whatever the recording has."""
        self.counts += Counts(missed=1)
        self.problem = problem or self.problem

    async def fail(self, pending: PendingExchange, failure: str = "") -> None:
        """There is no response. `failure`: why the site could not be reached; empty if something else failed.

        Failures are recorded, since programs of the task may ask for what cannot be reached in every episode.
        """
        key, repeats = pending.key, False
        try:
            if failure:
                found = await self.recording.run(Recording.find_failure, self.part, key)
                repeats = found is not None and self.mode == "replay-or-record"
                await self.recording.run(Recording.add_unanswered, self.part, key, 1, failure)
        except RecordingError as error:
            self.problem = str(error)
        finally:
            self._finish(pending)
        if repeats:
            self.counts += Counts(replayed=1)
        else:
            self._miss(key, noted=bool(failure))

    def _miss(self, key: RequestKey, *, noted: bool = False) -> None:
        """Count a request without an answer. `noted`: the recording lists it already."""
        self.counts += Counts(missed=1)
        if not noted and (key in self.missed or len(self.missed) < MAX_MISSES):
            self.missed[key] += 1

    def _finish(self, pending: PendingExchange) -> None:
        if pending.claimed:
            self.recording.answered(self.part, pending.key)

    async def _find(self, key: RequestKey, number: int, room: Room) -> WebResponse | None:
        async with room():
            found = await self.recording.run(Recording.find, self.part, key, number)
        if found is None:
            return None
        self.counts += Counts(replayed=1)
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


def refused_response(why: str) -> WebResponse:
    """The error that a sandbox gets for a request that does not name the site that it is sent to."""
    return _error(421, "Misdirected Request", "refused", f"{why}\n")


def failed_response(key: RequestKey, failure: str) -> WebResponse:
    """The error that a sandbox gets for a site that could not be reached while recording either."""
    text = f"{key.method} {key.url}\nThe site could not be reached while this was recorded: {failure}\n"
    return _error(UNREACHABLE_STATUS, "Bad Gateway", "replayed", text)


def missed_response(key: RequestKey) -> WebResponse:
    """The error that a sandbox gets for a request without a recording."""
    text = (
        f"This environment has no live web: it answers from a recording, which has no response to\n"
        f"{key.method} {key.url}\n"
        "The request was not sent to the site. Repeating it gives the same answer; try another page.\n"
    )
    return _error(MISSED_STATUS, "Not In The Recording", "missed", text)


def _error(status: int, reason: str, mark: str, text: str) -> WebResponse:
    headers = (("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"), (MARK, mark))
    return WebResponse(status, reason, Headers(headers), text.encode())


def is_usage_report(url: str) -> bool:
    """Whether a request to this address is a report about the use of a program."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return False
    return any(host == name or host.endswith(f".{name}") for name in USAGE_HOSTS)
