"""Decides whose fault a failure is in a sandbox in which an agent could act.

What an agent may have caused is forfeited, a reward of 0: otherwise a policy in training would learn to break
what grades it. What it cannot have caused gives no reward. The type of an error says neither: an engine is
silent because it is broken, or because of an agent's files. So evidence decides, in this order:

1. A budget of this sandbox is exceeded (entries, bytes, levels, seconds, memory), or its first process ended
   by itself or by what ran inside: the agent's, whatever else fails.
2. A process outside ended the sandbox, or the machine's disk failed: lost.
3. A capture or an opening of another episode on the same provider succeeded meanwhile: the agent's.
4. A control sandbox of the server's own works: the agent's. If it fails too, the agent's sandbox is measured:
   over its share of memory, processes or disk it is the agent's, else lost.

The detail of the verdict has the rule.
"""

from __future__ import annotations

import errno
import logging
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from decathlon_mcp.archives.writing import pack_files
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.errors import (
    BadRequestError,
    CallTimeoutError,
    DecathlonError,
    DriverError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.sandboxes.base import Sandbox, ended_from_inside
from decathlon_mcp.sandboxes.capabilities import over_share
from decathlon_mcp.storage.disk import is_full
from decathlon_mcp.telemetry.logs import fields

CONTROL_SECONDS = 30.0
"""How long a control sandbox may take to be opened, filled, paused and copied."""
CONTROL_VALID_SECONDS = 10.0
"""How long the answer of a control sandbox holds, for all who ask."""
MEANWHILE_SECONDS = 60.0
"""A success of another episode counts for so long where nothing says when the failure began."""
_CONTROL_BYTES = 1 << 20
_ERRORS_OF_THE_DISK = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_DECIDED = (
    *(LimitExceededError, SandboxLostError, CallTimeoutError, DriverError, ProviderUnavailableError),
    *(BadRequestError, OSError, MemoryError),
)
"""Failures that an agent, a provider or the machine can cause. All others are the server's or the suite's."""

OpenControl = Callable[[], AbstractAsyncContextManager[tuple[Sandbox, DriverClient]]]
"""Opens a sandbox that belongs to no episode and takes no place of one."""

_log = logging.getLogger("decathlon.rewards")


@dataclass(frozen=True, slots=True)
class Fault:
    """Whether a failure is the agent's, and the rule that decided it."""

    is_agents: bool
    rule: str


class AgentsFaultError(DriverError):
    """A failure that is the agent's; its message ends with the rule that decided it."""


class ProviderHealth:
    """What is known of a provider from the episodes that use it. `sandboxes`: how many share its machine."""

    def __init__(self, sandboxes: int = 1) -> None:
        self.sandboxes = sandboxes
        # Of the two episodes that succeeded last, so that one can be left out.
        self._successes: dict[str, float] = {}
        self._control = anyio.Lock()
        self._control_works = False
        self._control_ended: float | None = None

    def note_success(self, public_id: str) -> None:
        """A sandbox of this episode was opened, or its workspace copied."""
        self._successes.pop(public_id, None)
        self._successes[public_id] = anyio.current_time()
        if len(self._successes) > 2:
            del self._successes[next(iter(self._successes))]

    def others_succeeded(self, public_id: str, since: float) -> bool:
        """Whether something succeeded since then for another episode."""
        return any(at >= since for other, at in self._successes.items() if other != public_id)

    async def control_works(self, open_control: OpenControl) -> bool:
        """Whether a sandbox of the server's own works, by a trial that all who ask meanwhile share."""
        async with self._control:
            ended = self._control_ended
            if ended is None or anyio.current_time() - ended > CONTROL_VALID_SECONDS:
                self._control_works = await _works(open_control)
                self._control_ended = anyio.current_time()
            return self._control_works


async def _works(open_control: OpenControl) -> bool:
    """Do with a new sandbox what is done with an agent's sandbox."""
    works = False
    with anyio.move_on_after(CONTROL_SECONDS):
        try:
            async with open_control() as (sandbox, driver):
                await sandbox.put(sandbox.root, pack_files({"control": b"1"}))
                await driver.freeze()
                await sandbox.pause()
                with tempfile.TemporaryDirectory(prefix="control-") as folder:
                    await sandbox.get(sandbox.root, Path(folder) / "control.tar", _CONTROL_BYTES)
                works = True
        except Exception as error:  # noqa: BLE001  (whatever it is, the answer is no)
            why = error.message if isinstance(error, DecathlonError) else type(error).__name__
            _log.warning("a control sandbox failed", extra=fields(why=why))
    return works


@dataclass(frozen=True, slots=True)
class FaultFinder:
    """Decides for the sandboxes of one episode."""

    public_id: str
    health: ProviderHealth
    open_control: OpenControl

    @asynccontextmanager
    async def deciding(
        self, sandbox: Sandbox, kinds: tuple[type[Exception], ...] = _DECIDED
    ) -> AsyncGenerator[None]:
        """Around one operation on the open sandbox; decides about errors of these `kinds`.

        Raises AgentsFaultError for a failure that is the agent's. Another failure is raised again with the
        rule in its message, as a SandboxLostError if it was no DecathlonError.
        """
        began = anyio.current_time()
        try:
            yield
        except kinds as error:
            if isinstance(error, AgentsFaultError) or is_full(error):
                raise  # decided before, or to be tried again when the server's disk has room
            fault = await self._decide(error, sandbox, began)
            message = f"{described(error)} ({fault.rule})"
            if fault.is_agents:
                raise AgentsFaultError(message) from error
            if not isinstance(error, DecathlonError):
                raise SandboxLostError(message) from error
            error.message = message
            raise

    async def _decide(self, error: Exception, sandbox: Sandbox, began: float) -> Fault:
        if isinstance(error, SandboxLostError):
            await _add_cause(error, sandbox)
        if (fault := fault_by_evidence(error)) is not None:
            return fault
        since = max(began, anyio.current_time() - MEANWHILE_SECONDS)
        if not isinstance(error, DecathlonError):
            _log.warning("an operation on a sandbox failed", exc_info=error)
        if self.health.others_succeeded(self.public_id, since):
            return Fault(True, "sandboxes of other episodes worked meanwhile")
        if await self.health.control_works(self.open_control):
            return Fault(True, "a control sandbox worked")
        if (resource := await over_share(sandbox, self.health.sandboxes)) is not None:
            return Fault(True, f"a control sandbox failed too, and this one is over its share of {resource}")
        return Fault(False, "a control sandbox failed too, and this one is not over its share")


async def _add_cause(error: SandboxLostError, sandbox: Sandbox) -> None:
    """Add why the first process ended, which the copying of files finds gone without a reason."""
    if not error.data.get("cause") and (cause := await sandbox.cause_of_end()) is not None:
        error.data["cause"] = cause
        error.message += f" ({cause})"


def fault_by_evidence(error: Exception) -> Fault | None:
    """What the error itself shows, by the first two rules; None if it shows nothing."""
    match error:
        case AgentsFaultError():
            return Fault(True, "decided before")
        case LimitExceededError():
            budget = str(error.data.get("budget", "bytes")).replace("_", " ")
            return Fault(True, f"it exceeded its limit of {budget}")
        case SandboxLostError() if ended_from_inside(error):
            return Fault(True, "what ran inside ended it, or kept it from answering")
        case SandboxLostError():
            return Fault(False, "nothing inside is known to have ended it")
        case DecathlonError() if reason := error.data.get("outside"):
            return Fault(False, str(reason))
        case OSError() if error.errno in _ERRORS_OF_THE_DISK:
            return Fault(False, "the server's disk failed")
        case _:
            return None


def described(error: Exception) -> str:
    """What failed, for the verdict: no paths, and nothing of the server's memory."""
    match error:
        case DecathlonError():
            return error.message
        case OSError():
            return f"the server could not reach the sandbox's files: {error.strerror or type(error).__name__}"
        case _:
            return f"the server could not reach the sandbox's files: {type(error).__name__}"
