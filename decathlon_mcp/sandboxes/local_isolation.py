"""How the local sandboxes of a state folder are isolated: found out at its first start, and kept with it.

Decided 2026-11-27: a server never isolates less than the servers before it on the same folder, unless it is
told to. A probe that failed once, while the machine was busy, has ended every episode of a restarted server
and let the next ones run as ordinary processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import msgspec

from decathlon_mcp.errors import ProviderUnavailableError, SettingsError
from decathlon_mcp.sandboxes.bubblewrap.host_provider import why_no_own_network, why_unavailable
from decathlon_mcp.sandboxes.local import LOCAL
from decathlon_mcp.settings import IsolationMode
from decathlon_mcp.storage.disk import new_file, open_regular
from decathlon_mcp.storage.store import SandboxRow

FILE_NAME = "isolation.json"
MAX_BYTES = 64 << 10
"""Longest file that is read; a server writes some 500 bytes."""


@dataclass(frozen=True, slots=True)
class LocalIsolation:
    """How local sandboxes are isolated.

    `why`: why they are not; None if somebody chose that. `why_shared`: why those in namespaces that have a
    network share this machine's; None if they have one of their own.
    """

    isolation: Literal["namespaces", "none"]
    why: str | None = None
    why_shared: str | None = None

    @classmethod
    def read(cls, state: Path) -> Self | None:
        """What the state folder has been served with; None if that is not known.

        Raises SettingsError for a file that cannot be read.
        """
        file = state / FILE_NAME
        try:
            with open_regular(file) as content:
                return msgspec.json.decode(content.read(MAX_BYTES), type=cls)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"--state: {file}, how the sandboxes of this folder are isolated, cannot be read: {error}; "
                "remove it to have that decided again"
            ) from None

    def keep(self, state: Path) -> None:
        """Write the file, if it has something else. Raises SettingsError."""
        if self.read(state) == self:
            return
        file = state / FILE_NAME
        try:
            with new_file(file, state / f".{FILE_NAME}.{os.getpid()}") as content:
                content.write(msgspec.json.encode(self))
        except OSError as error:
            raise SettingsError(f"--state: {file} cannot be written: {error.strerror}") from None


def decide_isolation(
    mode: IsolationMode, state: Path, continued: Callable[[], Iterable[SandboxRow]]
) -> LocalIsolation:
    """How the local sandboxes of a server are isolated. Asks the machine, for some 50 ms.

    `continued`: the sandboxes of episodes that the server may continue; what they have, the next ones have.
    Raises SettingsError if the sandboxes must be isolated, which the machine does not allow, and
    ProviderUnavailableError if what it allows could not be found out.
    """
    if mode == "none":
        return LocalIsolation("none")
    kept = LocalIsolation.read(state)
    rows = [row for row in continued() if row.provider == LOCAL] if kept is None or _is_less(kept) else []
    if mode == "auto" and any(row.isolation == "none" for row in rows) and not _has_namespaces(kept):
        return kept or LocalIsolation("none", why="the episodes of this state folder have none")
    try:
        reason = why_unavailable()
    except ProviderUnavailableError as error:
        raise ProviderUnavailableError(f"{error.message}, or choose --isolation none") from None
    if reason is not None:
        if mode == "namespaces":
            raise SettingsError(f"--isolation namespaces: {reason}")
        if _has_namespaces(kept):
            raise _weaker(state, "sandboxes in namespaces", reason, "choose --isolation none, or ")
        return LocalIsolation("none", why=reason)
    if kept is not None and kept.why_shared and any(row.spec.get("network") != "none" for row in rows):
        return kept
    why_shared = why_no_own_network()
    if why_shared is not None and kept is not None and _has_namespaces(kept) and kept.why_shared is None:
        raise _weaker(state, "sandboxes with networks of their own", why_shared, "")
    return LocalIsolation("namespaces", why_shared=why_shared)


def _has_namespaces(kept: LocalIsolation | None) -> bool:
    return kept is not None and kept.isolation == "namespaces"


def _is_less(kept: LocalIsolation) -> bool:
    """Whether it could be more than what it was."""
    return kept.isolation == "none" or kept.why_shared is not None


def _weaker(state: Path, what: str, reason: str, choice: str) -> SettingsError:
    return SettingsError(
        f"--isolation auto: this state folder has been served with {what}, which this machine does not allow "
        f"now: {reason}. To go on with less isolation, {choice}remove {state / FILE_NAME}"
    )
