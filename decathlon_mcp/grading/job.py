"""The input of grading: everything that is known before the first sandbox is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.fault import FaultFinder
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import Network

OpenSandbox: TypeAlias = Callable[[Network], AbstractAsyncContextManager[tuple[Sandbox, DriverClient]]]
"""Opens a sandbox and its driver for one run. When grading in place, it yields the agent's own sandbox."""


EvaluatorLog: TypeAlias = Callable[[Attempt, Task, PurePosixPath], Iterable[bytes]]
"""The file that an evaluator reads about an attempt at a task, in chunks that are the same every time; empty
if it gets none. The path is the suite's folder in its sandbox. Iterating blocks."""


@dataclass(frozen=True, slots=True)
class CapturedWorkspace:
    """The files of a closed attempt, as archives on the server's disk.

    `workspace` is a tar of the agent's workspace. It comes out of a sandbox, so nothing in it is trusted;
    None if it could not be captured, and then `refused` says why. `task_folder_archive` is a tar of the
    task's folder after preprocess, with names relative to that folder; None means the suite's own files.
    `location`: where the workspace was in its sandbox; None: where graders have it.
    """

    workspace: Path | None
    task_folder_archive: Path | None
    refused: tuple[str, ...] = ()
    location: PurePosixPath | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingJob:
    """One closed attempt to grade."""

    attempt: Attempt
    suite: Suite
    task: Task
    open_sandbox: OpenSandbox
    captured: CapturedWorkspace
    common: Path
    """The suite's common archive."""
    deadline_seconds: float
    """Deadline for all runs together; the time counts while a sandbox is open."""
    log: EvaluatorLog
    credentials: Sequence[tuple[PurePosixPath, bytes]] = ()
    """Archives that are unpacked over `common`, each with its target folder."""
    in_place: bool = False
    """Whether the evaluator runs in the agent's own sandbox, on the workspace as it is there."""
    grades_truncated: bool = True
    """Whether an attempt that a limit ended is graded; if not, it is forfeited."""
    fault_finder: FaultFinder | None = None
    """Decides whose fault a failure of the provider is; without it such a failure gives no reward."""
