"""Values that pass between the proxy, its sessions and the recordings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["record", "replay", "replay-or-record"]
Part = Literal["preprocess", "agent", "grader"]
"""Whose requests: each part of a recording answers its own sandbox only."""

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Headers:
    """HTTP headers in their order; a name can occur more than once."""

    items: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> str:
        """The first value of a header, empty if there is none. Names are compared without case."""
        return next((value for key, value in self.items if key.lower() == name.lower()), "")


@dataclass(frozen=True, slots=True)
class WebRequest:
    """One request as the proxy received it, its body decoded from any content encoding."""

    method: str
    url: str
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WebResponse:
    """One response, its body decoded from any content encoding."""

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
        return Counts(
            self.replayed + other.replayed,
            self.recorded + other.recorded,
            self.passed + other.passed,
            self.missed + other.missed,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, int]) -> Counts:
        """Read what `to_json` wrote."""
        return cls(*(int(value[name]) for name in ("replayed", "recorded", "passed", "missed")))

    def to_json(self) -> dict[str, int]:
        """A member for each number."""
        return {
            "replayed": self.replayed,
            "recorded": self.recorded,
            "passed": self.passed,
            "missed": self.missed,
        }
