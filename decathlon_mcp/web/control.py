"""Messages between the server and the addon, JSON objects with one line each.

The server writes to the addon's stdin, the addon to its stdout. The first line from the server is a
`Configuration`, the first one from the addon `{"ready": {...}}` (a `Ready`). From then on the server sends
requests, and the addon answers each with its `id`:

    {"id": N, "do": "open", "session": ID, "episode": ID, "part": ..., "mode": ..., "recording": PATH}
    {"id": N, "do": "connect", "session": ID, "port": N}     the session's next connection comes from there
    {"id": N, "do": "counts", "episode": ID}                 -> {"id": N, "counts": {...},
                                                                 "problem": STR, "missed": {...}}
    {"id": N, "do": "close", "episode": ID}                  as `counts`, and ends the episode's sessions

`missed` are the most frequent requests without an answer: `METHOD URL` and how often it was made.
An answer is `{"id": N, ...}`, or `{"id": N, "error": STR}`. The addon ends with its stdin.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Configuration:
    """`addresses` as for `targets.Targets`."""

    addresses: dict[str, tuple[str, int | None]]
    max_response_bytes: int
    max_recording_bytes: int
    request_seconds: float = 120.0
    """How long a sandbox may take to send a request, and how long it may send nothing on a connection."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Configuration:
        return cls(**value)


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the proxy listens: for clients with a proxy setting, and for those that were led there by name.

    `authority` is the certificate of its authority (PEM).
    """

    proxy: tuple[str, int]
    http: tuple[str, int]
    https: tuple[str, int]
    authority: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Ready:
        proxy, http, https = ((str(host), int(port)) for host, port in (value[n] for n in LISTENERS))
        return cls(proxy, http, https, str(value["authority"]))


LISTENERS = ("proxy", "http", "https")
