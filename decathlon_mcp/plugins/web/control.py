"""Messages between the server and the addon, JSON objects with one line each.

The server writes to the addon's stdin, the addon to its stdout. The first line from the server is a
`Configuration`, the first one from the addon a `Ready`. From then on the server sends requests, and the addon
answers each with its `id`, not always in their order:

    {"id": N, "do": "open", ...}                             a `SessionSpec`
    {"id": N, "do": "connect", "session": ID, "port": N}     the session's next connection comes from there
    {"id": N, "do": "counts", "episode": ID}                 -> {"id": N, ...}: `EpisodeCounts`
    {"id": N, "do": "close", "episode": ID}                  as `counts`, and ends the episode's sessions

An answer is `{"id": N, ...}`, or `{"id": N, "error": STR}`. The addon ends with its stdin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from decathlon_mcp.plugins.web.exchanges import Counts, Mode, Part
from decathlon_mcp.plugins.web.targets import Addresses

MAX_LINE_BYTES = 1 << 20

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
