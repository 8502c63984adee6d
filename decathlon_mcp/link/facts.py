"""What a driver says of things it did, checked: it may have been taken over by whoever is in its sandbox."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class RunResult(_Said):
    """How a process ended. `stdout` and `stderr` are the last of what it wrote, `channel` is all."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    stdout: str
    stderr: str
    truncated: bool = False
    channel: str | None = None
    seconds: float


class ServerFacts(_Said):
    """What one of the task's servers said of itself. `tools` are its own words, unparsed."""

    protocol_version: str = Field(alias="protocolVersion")
    server_info: dict[str, Any] = Field(alias="serverInfo")
    capabilities: dict[str, Any]
    tools: list[dict[str, Any]]
    seconds: float
