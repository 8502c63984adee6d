"""What an entry is to start."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from decathlon_mcp.errors import BadRequestError

TOKEN = "DECATHLON_TOKEN"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the entry is to start: tasks of this machine, or a bridge to the server at `url`."""

    task: str | None = None
    url: str | None = None
    suite: tuple[str, ...] = ()
    provider: str | None = None
    config: Path | None = None
    with_token: bool = False

    def command(self) -> list[str]:
        """Raises BadRequestError, UnknownTaskError, SuiteError for what would not start."""
        if self.url:
            from decathlon_client.bridge import address

            try:
                return [*_this_command(), "stdio", "--url", address(self.url, self.task)]
            except ValueError as error:
                raise BadRequestError(str(error)) from None
        suites = [suite if suite == "starter" else str(Path(suite).resolve()) for suite in self.suite]
        if self.task:
            _require_task(self.task, suites)
        options: list[tuple[str, str | None]] = [
            *(("--suite", suite) for suite in suites),
            ("--provider", self.provider),
            ("--config", str(self.config.resolve()) if self.config else None),
            ("--task", self.task),
        ]
        return [
            *_this_command(),
            "stdio",
            *(word for name, value in options if value for word in (name, value)),
        ]

    def environment(self) -> dict[str, str]:
        """Raises BadRequestError where a token is wished for and none is set."""
        if not self.with_token:
            return {}
        if not os.environ.get(TOKEN):
            raise BadRequestError(f"--with-token: {TOKEN} is not set")
        return {TOKEN: os.environ[TOKEN]}


def _this_command() -> list[str]:
    """How a program that knows no PATH of ours starts this one."""
    script = Path(sys.executable).parent / ("decathlon-mcp.exe" if os.name == "nt" else "decathlon-mcp")
    return [str(script)] if script.exists() else [sys.executable, "-m", "decathlon_mcp.cli"]


def _require_task(task: str, suites: list[str]) -> None:
    from decathlon_mcp.catalogue.catalogue import Catalogue
    from decathlon_mcp.suites.loading import load_suite

    Catalogue([load_suite(suite) for suite in suites or ["starter"]]).find(task)
