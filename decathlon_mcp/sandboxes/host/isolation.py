"""Isolation of sandboxes with this machine's files: found out, and kept with the state folder.

Decided 2026-11-22: `why_unavailable` opens no sandbox of a provider but runs bubblewrap once with the same
command line. The answer is needed before there is a provider, by the list of tasks.

Decided 2026-11-27: only what the kernel refuses, or a program that is missing, means that this machine cannot
isolate. Everything else (a time-out, no memory, no process, no descriptor, a signal) is a failed look, which
is repeated and then an error. A machine that is busy when a server starts isolates a second later.

Decided 2026-11-27: a server never isolates less than the servers before it on the same folder, unless a
setting demands it. A probe that failed once, while the machine was busy, has ended every episode of a
restarted server and let the next ones run as ordinary processes.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal, Self

import msgspec

from decathlon_mcp.errors import ProviderUnavailableError, SettingsError
from decathlon_mcp.sandboxes.base import PYTHON_CHECK, Limits, SandboxSpec
from decathlon_mcp.sandboxes.host.command import (
    ALLOW,
    INSTALL,
    PROBE_SECONDS,
    find_program,
    isolated_command,
    lacks_namespaces,
    program_version,
)
from decathlon_mcp.sandboxes.host.host_files import HostFiles
from decathlon_mcp.sandboxes.host.network import OwnNetwork
from decathlon_mcp.settings import IsolationMode
from decathlon_mcp.storage.disk import new_file, open_regular
from decathlon_mcp.storage.store import SandboxRow

FILE_NAME = "isolation.json"
MAX_BYTES = 64 << 10
"""Longest file that is read; a server writes some 500 bytes."""
HOST = "host"
PLAIN = "--isolation none runs sandboxes as ordinary processes, without isolation"
PROBE_ATTEMPTS = 3
PROBE_PAUSE_SECONDS = 1.0
"""How often the machine is asked what it allows, until it answers, and the pause between two tries."""
_MESSAGE_CHARACTERS = 500
_REFUSALS = (
    *(errno.EPERM, errno.EACCES, errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.ENODEV, errno.EOPNOTSUPP),
    errno.EROFS,
)
"""What a kernel or a container that does not allow a sandbox answers, at every try."""
_USER_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")


@dataclass(frozen=True, slots=True)
class HostIsolation:
    """How sandboxes with this machine's files are isolated.

    `why`: why they are not; None if somebody chose that. `why_shared`: why sandboxes in namespaces share this
    machine's network, if any; None if they have their own.
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
) -> HostIsolation:
    """How a server isolates sandboxes with this machine's files. Asks the machine, for some 50 ms.

    `continued`: the sandboxes of episodes that the server may continue; what they have, the next sandboxes
    have. Raises SettingsError if the sandboxes must be isolated, which the machine does not allow, and
    ProviderUnavailableError if what it allows could not be found out.
    """
    if mode == "none":
        return HostIsolation("none")
    kept = HostIsolation.read(state)
    rows = [row for row in continued() if row.provider == HOST] if kept is None or _is_less(kept) else []
    if mode == "auto" and any(row.isolation == "none" for row in rows) and not _has_namespaces(kept):
        return kept or HostIsolation("none", why="the episodes of this state folder have none")
    try:
        reason = why_unavailable()
    except ProviderUnavailableError as error:
        raise ProviderUnavailableError(f"{error.message}, or choose --isolation none") from None
    if reason is not None:
        if mode == "namespaces":
            raise SettingsError(f"--isolation namespaces: {reason}")
        if _has_namespaces(kept):
            raise _weaker(state, "sandboxes in namespaces", reason, "choose --isolation none, or ")
        return HostIsolation("none", why=reason)
    if kept is not None and kept.why_shared and any(row.spec.get("network") != "none" for row in rows):
        return kept
    why_shared = why_no_own_network()
    if why_shared is not None and kept is not None and _has_namespaces(kept) and kept.why_shared is None:
        raise _weaker(state, "sandboxes with networks of their own", why_shared, "")
    return HostIsolation("namespaces", why_shared=why_shared)


def _has_namespaces(kept: HostIsolation | None) -> bool:
    return kept is not None and kept.isolation == "namespaces"


def _is_less(kept: HostIsolation) -> bool:
    """Whether it could be more than what it was."""
    return kept.isolation == "none" or kept.why_shared is not None


def _weaker(state: Path, what: str, reason: str, choice: str) -> SettingsError:
    return SettingsError(
        f"--isolation auto: this state folder has been served with {what}, which this machine does not allow "
        f"now: {reason}. To go on with less isolation, {choice}remove {state / FILE_NAME}"
    )


@cache
def why_no_own_network() -> str | None:
    """Why sandboxes here cannot have a network of their own, and what to do; None if they can.

    Raises ProviderUnavailableError if that could not be found out.
    """

    def look() -> None:
        OwnNetwork.of_this_machine()

    return _asked(look, "a network of their own")


@cache
def why_unavailable() -> str | None:
    """Why sandboxes here cannot have namespaces, and what to do; None if they can.

    Runs bubblewrap once, for some 50 ms. Raises ProviderUnavailableError if that could not be found out.
    """
    return _asked(_probe, "namespaces")


def _asked(look: Callable[[], str | None], what: str) -> str | None:
    """The answer of `look`, which is tried again if it failed for a reason that passes."""
    reason = ""
    for attempt in range(PROBE_ATTEMPTS):
        if attempt:
            time.sleep(PROBE_PAUSE_SECONDS)
        try:
            return look()
        except ProviderUnavailableError as error:
            cause = error.__cause__
            if cause is None or _is_refusal(cause):
                return error.message
            reason = error.message
        except subprocess.TimeoutExpired as error:
            reason = f"{Path(error.cmd[0]).name} did not end within {error.timeout:g} s"
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:  # RuntimeError: no new thread
            if _is_refusal(error):
                return f"bubblewrap cannot be run: {error}"
            reason = str(error)
    raise ProviderUnavailableError(
        f"whether sandboxes can have {what} here could not be found out in {PROBE_ATTEMPTS} tries: "
        f"{reason}; try again"
    )


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _REFUSALS


def _refuses(message: str) -> bool:
    """Whether bubblewrap failed with this message because of what this machine is, and not of its load."""
    # bubblewrap explains EPERM and EINVAL in words of its own, without the error's.
    words = ("No permissions to create", "does not support user namespaces")
    if any(text in message for text in (*words, *map(os.strerror, _REFUSALS))):
        return True
    try:
        # With ENOSPC, the kernel says that there are too many of them.
        return lacks_namespaces(message) and int(_USER_NAMESPACES.read_text("ascii")) == 0
    except (OSError, ValueError):
        return False


def _probe() -> str | None:
    program = find_program()
    version, is_recent = program_version(program)
    if not is_recent:
        return f"{version} is too old: {INSTALL}"
    spec = SandboxSpec("probe", PYTHON_CHECK, PurePosixPath("/decathlon"), limits=Limits(memory_mib=256))
    with isolated_command(spec, HostFiles.of_this_server()) as command:
        result = subprocess.run(
            command.argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            timeout=PROBE_SECONDS,
            pass_fds=command.descriptors,
            check=False,
        )
    if result.returncode == 0:
        return None
    message = " ".join(result.stderr.decode("utf-8", "replace").split())[-_MESSAGE_CHARACTERS:]
    reason = f"bubblewrap created no sandbox: {message or f'exit code {result.returncode}'}"
    if not _refuses(message):
        raise subprocess.SubprocessError(reason)
    return f"{reason}; {cure_of(message)}"


def cure_of(message: str) -> str:
    """What to do if bubblewrap failed with this message on this machine's files."""
    if lacks_namespaces(message):
        return ALLOW
    if "ermission denied" in message:
        return "the folder of the server's Python must be accessible to other users"
    return "bubblewrap needs more than this machine allows, as in most containers"
