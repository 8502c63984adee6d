"""A zoo of what can be wrong with a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from decathlon_mcp.errors import DecathlonError


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with one sandbox: nothing, unless said. Methods are the wire's (`run`, `call`, ...)."""

    open_seconds: float = 0.0
    """How long it takes to open."""
    open_error: DecathlonError | None = None
    never_ready: bool = False
    """The driver takes its source and says nothing."""
    dies_on: str | None = None
    """The first process ends when it is asked for this, with exit code 137."""
    silent_on: str | None = None
    """Never answers this."""
    overlong_on: str | None = None
    """Answers this with a line that is too long."""
    garbage: bool = False
    """Lines that are no messages, before every message."""
    servers_that_fail: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of servers that do not come up, with their last words on stderr."""
    removals_refused: int = 0
    """How often it cannot be removed."""


class Died(Exception):  # noqa: N818  (it is not an error of whoever raises it)
    """Raised by a tool or a `run` of a test: the sandbox's first process ends here and now."""

    def __init__(self, exit_code: int = 137, *, out_of_memory: bool = False) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
        self.out_of_memory = out_of_memory
