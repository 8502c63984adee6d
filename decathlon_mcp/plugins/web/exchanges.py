"""Values that pass between the server, the addon, its sessions and the recordings.

Server and addon send each other JSON objects, one a line. The server writes to the addon's stdin, the addon
to its stdout. The first line from the server is a `Configuration`, the first one from the addon a `Ready`.
From then on the server sends requests, and the addon answers each with its `id`, not always in their order:

    {"id": N, "do": "open", ...}                             a `SessionSpec`
    {"id": N, "do": "connect", "session": ID, "port": N}     the session's next connection comes from there
    {"id": N, "do": "counts", "episode": ID}                 -> {"id": N, ...}: `EpisodeCounts`
    {"id": N, "do": "close", "episode": ID}                  as `counts`, and ends the episode's sessions

An answer is `{"id": N, ...}`, or `{"id": N, "error": STR}`. The addon ends with its stdin.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Literal

from decathlon_mcp.plugins.web.targets import Addresses

Mode = Literal["record", "replay", "replay-or-record"]
Part = Literal["preprocess", "agent", "grader"]
"""Whose requests: each part of a recording answers its own sandbox only."""

MEBIBYTE = 1 << 20
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Headers:
    """HTTP headers in their order; a name can occur more than once."""

    items: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> str:
        """The first value of a header, empty if there is none. Names are compared without case."""
        return next((value for key, value in self.items if key.lower() == name.lower()), "")


@dataclass(frozen=True, slots=True)
class WebRequest:
    """One request as the proxy received it; `url` names the site that it is sent to."""

    method: str
    url: str
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WebResponse:
    """One response. What is recorded has no content encoding."""

    status: int
    reason: str = ""
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Counts:
    """How the requests of an episode were answered.

    `replayed`: from the recording. `recorded`: by the site, and stored. `passed`: by the site, and not
    stored, because the response was too large, a stream, or a temporary failure. `missed`: by an error,
    because the recording has no answer, or the site could not be reached.
    """

    replayed: int = 0
    recorded: int = 0
    passed: int = 0
    missed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, astuple(self), astuple(other)))

    @property
    def requests(self) -> int:
        """Their number."""
        return sum(astuple(self))


def decoded_body(body: bytes, encoding: str, max_bytes: int) -> bytes | None:
    """A body without its content encoding; None if it is longer than the limit, or cannot be decoded."""
    encoding = encoding.strip().lower()
    if not body or encoding in ("", "identity"):
        return body if len(body) <= max_bytes else None
    if encoding not in ("gzip", "x-gzip", "deflate"):
        return None
    # `deflate` should have zlib's header, but is sent without it too.
    raw_deflate = encoding == "deflate" and body[0] & 0x0F != zlib.DEFLATED
    decoded = b""
    try:
        while body:
            decoder = zlib.decompressobj(-zlib.MAX_WBITS if raw_deflate else zlib.MAX_WBITS | 32)
            decoded += decoder.decompress(body, max_bytes - len(decoded) + 1)
            if len(decoded) > max_bytes or not decoder.eof:
                return None
            body = decoder.unused_data.lstrip(b"\0")
    except zlib.error:
        return None
    return decoded


Listener = Literal["proxy", "http", "https"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the addon has to know of the server's settings."""

    addresses: Addresses
    max_response_bytes: int
    max_recording_bytes: int
    request_seconds: float = 120.0
    """How long a sandbox may take to send a request, and how long it may send nothing on a connection."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the proxy listens: for clients with a proxy setting, and for those that were led there by name.

    `authority` is the certificate of its authority (PEM).
    """

    listeners: Mapping[Listener, tuple[str, int]]
    authority: str


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """One sandbox of an episode. `recording`: path of a file that exists."""

    session: str
    episode: str
    part: Part
    mode: Mode
    recording: str


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """`problem`: why something was not recorded, empty if nothing failed.

    `missed`: the most frequent requests without an answer, `METHOD URL`, and how often each was made.
    """

    counts: Counts
    problem: str = ""
    missed: Mapping[str, int] = field(default_factory=dict[str, int])
