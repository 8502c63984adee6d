"""Prime's SDK, which is imported when a provider is created, and its errors.

Checked with prime-sandboxes 0.5.1.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from decathlon_mcp.errors import (
    DecathlonError,
    ImageError,
    ProviderUnavailableError,
    SandboxLostError,
    SettingsError,
)
from decathlon_mcp.sandboxes.base import OUT_OF_MEMORY
from decathlon_mcp.telemetry.logs import fields

if TYPE_CHECKING:
    from prime_sandboxes import AsyncSandboxClient, CreateSandboxRequest

ENDED = frozenset({"ERROR", "TERMINATED", "TIMEOUT", "STOPPED"})
"""Statuses of sandboxes that never run again."""

_log = logging.getLogger(__name__)


class Sdk:
    """The imported package. Raises SettingsError if it is not installed."""

    def __init__(self) -> None:
        try:
            self._package = importlib.import_module("prime_sandboxes")
        except ImportError as error:
            raise SettingsError(
                f"--provider prime needs Prime's SDK ({error}); in the clone: pip install '.[server,prime]'"
            ) from error

    def client(self, auth_file: Path) -> AsyncSandboxClient:
        """A client of the account in PRIME_API_KEY or ~/.prime/config.json."""
        client: AsyncSandboxClient = self._package.AsyncSandboxClient()
        # By default it is one file for all processes of a user, which they overwrite while others read it.
        cast("Any", client)._auth_cache._cache_file = auth_file
        return client

    def request(self, **values: Any) -> CreateSandboxRequest:
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
