"""The parts of Prime's SDK that are used, with types. It is imported when a provider is created.

Checked with prime-sandboxes 0.5.1.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from decathlon_mcp.errors import (
    DecathlonError,
    ImageError,
    ProviderUnavailableError,
    SandboxLostError,
    SettingsError,
)
from decathlon_mcp.sandboxes.base import OUT_OF_MEMORY
from decathlon_mcp.telemetry.logs import fields

ENDED = frozenset({"ERROR", "TERMINATED", "TIMEOUT", "STOPPED"})
"""Statuses of sandboxes that never run again."""

_log = logging.getLogger(__name__)


class Facts(Protocol):
    """What the service says about a sandbox."""

    id: str
    status: str
    labels: list[str]


class Listing(Protocol):
    sandboxes: Sequence[Facts]
    has_next: bool


class EgressPolicy(Protocol):
    """What the service lets out of a sandbox; an empty `policy.allowlist` lets nothing out."""

    policy: Any
    applied: bool


class CommandResult(Protocol):
    stdout: str
    stderr: str
    exit_code: int


class Client(Protocol):
    """The part of `AsyncSandboxClient` that is used."""

    client: Any

    async def create(self, request: Any) -> Facts: ...
    async def wait_for_creation(self, sandbox_id: str, max_attempts: int = 60) -> None: ...
    async def get(self, sandbox_id: str) -> Facts: ...
    async def list(
        self, *, labels: list[str], page: int = 1, per_page: int = 50, exclude_terminated: bool
    ) -> Listing: ...
    async def delete(self, sandbox_id: str) -> Any: ...
    async def bulk_delete(self, sandbox_ids: list[str]) -> Any: ...
    async def execute_command(self, sandbox_id: str, command: str, *, timeout: int) -> CommandResult: ...
    async def open_process(self, sandbox_id: str, command: str) -> Any: ...
    async def upload_bytes(
        self, sandbox_id: str, file_path: str, file_bytes: bytes, filename: str, timeout: int
    ) -> Any: ...
    async def download_file(
        self, sandbox_id: str, file_path: str, local_file_path: str, timeout: int
    ) -> None: ...
    async def get_network(self, sandbox_id: str) -> EgressPolicy: ...
    async def set_network(self, sandbox_id: str, *, deny: list[str]) -> EgressPolicy: ...
    async def aclose(self) -> None: ...


class Sdk:
    """The imported package. Raises SettingsError if it is not installed."""

    def __init__(self) -> None:
        try:
            self._package = importlib.import_module("prime_sandboxes")
        except ImportError as error:
            raise SettingsError(
                f"--provider prime needs Prime's SDK ({error}); in the clone: pip install '.[server,prime]'"
            ) from error

    def client(self, auth_file: Path) -> Client:
        """A client of the account in PRIME_API_KEY or ~/.prime/config.json."""
        client: Any = self._package.AsyncSandboxClient()
        # By default it is one file for all processes of a user, which they overwrite while others read it.
        client._auth_cache._cache_file = auth_file
        return client

    def request(self, **values: Any) -> Any:
        """A request for a sandbox. Raises SettingsError for values that the service does not take."""
        try:
            return self._package.CreateSandboxRequest(**values)
        except ValueError as error:
            raise SettingsError(f"Prime takes no such sandbox: {error}") from error

    @contextmanager
    def errors(self, *, opening: bool = False) -> Generator[None]:
        """Replace the SDK's errors by ours. `opening`: the sandbox does not exist yet."""
        try:
            yield
        except DecathlonError:
            raise
        except Exception as error:
            # The SDK reports a cancellation as a failed request, which would keep the caller from ending.
            if (cancelled := _cancellation(error)) is not None:
                raise cancelled from None
            raise self._replaced(error, opening) from error

    def _replaced(self, error: Exception, opening: bool) -> DecathlonError:
        package = self._package
        # The service's own text may name anything of its machines: clients get a sentence of ours.
        _log.warning("Prime refused a request", extra=fields(error=type(error).__name__, why=_text(error)))
        if isinstance(error, package.SandboxImagePullError):
            return ImageError("Prime cannot get the image; the server's log has its reason")
        if isinstance(error, package.SandboxOOMError):
            return SandboxLostError("the sandbox is gone", cause=OUT_OF_MEMORY)
        if isinstance(error, package.SandboxNotRunningError):
            if opening:
                return ProviderUnavailableError(
                    "Prime did not start a sandbox; the server's log has its reason"
                )
            return SandboxLostError("the sandbox is gone")
        if isinstance(error, package.UnauthorizedError):
            return ProviderUnavailableError(
                "Prime refused the key; set PRIME_API_KEY",
                cure="set PRIME_API_KEY to a key that may create sandboxes",
            )
        if not opening and "HTTP 404" in str(error):
            return SandboxLostError("the sandbox is gone")
        # Also the SDK's time-outs, which are RuntimeErrors, and answers that it cannot read.
        return ProviderUnavailableError("Prime does not answer as expected; the server's log has its reason")


def _cancellation(error: BaseException | None) -> asyncio.CancelledError | None:
    """The cancellation that led to an error, if one did."""
    for _ in range(10):
        if error is None or isinstance(error, asyncio.CancelledError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _text(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
