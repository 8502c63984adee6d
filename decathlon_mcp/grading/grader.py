"""Runs the programs that grade an attempt, each in a sandbox prepared for it.

A sandbox for grading holds the suite's own files, the task's folder with its answers, the agent's workspace
as data, Toolathlon's log (`traj_log.py`) and the harness that calls a rubric's function. It is one that the
agent never used, except when grading in place: then the suite's files in the agent's sandbox are removed and
unpacked again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from uuid import uuid4

import anyio
import anyio.to_thread

from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.writing import archive_chunks, save
from decathlon_mcp.driver_client.driver import DriverClient, RunResult
from decathlon_mcp.grading.inputs import GradingInputs
from decathlon_mcp.grading.job import GradingJob
from decathlon_mcp.grading.traj_log import TrajectoryLog
from decathlon_mcp.grading.verdict import OUTPUT_CHARACTERS
from decathlon_mcp.payloads import source
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.storage.disk import SMALL_BYTES
from decathlon_mcp.telemetry.logs import fields

OWN_FOLDER = ".decathlon"
"""Folder of the harness, relative to the suite's root; it is never inside the workspace."""

# Only the image and the suite decide where Python finds modules; an empty value unsets a variable. With
# PYTHONSAFEPATH set, `python -m` would not search the suite's root, where the evaluator is. A profile's own
# environment overrides these.
PYTHON_ENVIRONMENT = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": "",
    "PYTHONHOME": "",
    "PYTHONOPTIMIZE": "",
    "PYTHONSAFEPATH": "",
}
# Some evaluators call git in a repository that the agent created, and a repository's configuration may name
# programs that every `git status` runs. GIT_CONFIG_COUNT (git-config(1)) has precedence over it. It cannot
# switch off filters and merge drivers, because .gitattributes refers to them by arbitrary names.
_GIT_CONFIG = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null", "core.pager": "cat"}
GIT_ENVIRONMENT = {
    "GIT_CONFIG_COUNT": str(len(_GIT_CONFIG)),
    **{f"GIT_CONFIG_KEY_{number}": name for number, name in enumerate(_GIT_CONFIG)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_GIT_CONFIG.values())},
}

log = logging.getLogger("decathlon.rewards")


@dataclass(frozen=True, slots=True)
class Grader:
    """Runs the evaluator and the rubric's function of one job.

    `deadline` is a time of the event loop's clock. The methods raise whatever opening a sandbox, filling it
    and running a program in it raise.
    """

    job: GradingJob
    inputs: GradingInputs
    deadline: float

    async def run_evaluator(self) -> RunResult:
        """Run the task's evaluator as Toolathlon does (utils/evaluation/evaluator.py)."""
        return await self._run(self._evaluator_command)

    async def run_rubric_function(self, address: str) -> RunResult:
        """Call a function of the task's evaluation package; `channel` is its return value as JSON.

        `address` is such as `evaluation/evaluator.py:evaluate`.
        """
        file, _, function = address.partition(":")
        module = ".".join((self._package, *PurePosixPath(file).with_suffix("").parts))

        def command(root: PurePosixPath) -> list[str]:
            order = {
                "root": str(root),
                "module": module,
                "function": function,
                "offers": self._function_arguments(root),
            }
            harness = root / OWN_FOLDER / "harness.py"
            return [*self.job.suite.profile.python, str(harness), json.dumps(order)]

        return await self._run(command, channel=True)

    async def _run(
        self, command: Callable[[PurePosixPath], list[str]], *, channel: bool = False
    ) -> RunResult:
        """Run one program in a sandbox of its own; `command` is called with the suite's root in it."""
        result: RunResult | None = None
        profile = self.job.suite.profile
        try:
            async with self.job.open_sandbox(self.job.attempt.grader_network) as (sandbox, driver):
                await self._fill(sandbox, driver)
                result = await driver.run(
                    command(sandbox.root),
                    cwd=str(sandbox.root),
                    env={**PYTHON_ENVIRONMENT, **GIT_ENVIRONMENT, **dict(profile.environment)},
                    timeout_seconds=max(1.0, self.deadline - anyio.current_time()),
                    output_bytes=OUTPUT_CHARACTERS // 2,
                    channel=channel,
                )
        except Exception:
            # The program has ended by itself: a sandbox that then fails to close does not change its result.
            if result is None:
                raise
            log.exception("closing a sandbox for grading failed", extra=fields(task=self.job.attempt.task))
        assert result is not None
        return result

    async def _fill(self, sandbox: Sandbox, driver: DriverClient) -> None:
        root = sandbox.root
        await driver.arrange(
            *({"remove": str(root / path)} for path in self._paths_to_remove()),
            {"make": str(root / self.job.suite.profile.workspace)},
        )
        for folder, archive in self.inputs.archives:
            await sandbox.put(root / folder, archive)
        log_and_harness = await anyio.to_thread.run_sync(self._log_and_harness, root)
        await sandbox.put(root, log_and_harness)
        if isinstance(log_and_harness, Path):
            log_and_harness.unlink()

    def _paths_to_remove(self) -> list[PurePosixPath]:
        """Paths that the image or, in place, the agent may have put where the suite's files go."""
        profile = self.job.suite.profile
        paths = {*profile.purged, PurePosixPath(OWN_FOLDER)}
        if self.job.in_place:
            paths |= {path for path in profile.common if not profile.workspace.is_relative_to(path)}
            paths.add(self.job.task.folder)
        return sorted(paths)

    def _log_and_harness(self, root: PurePosixPath) -> Path | bytes:
        """A tar archive with Toolathlon's log and the harness: in memory, or a file if the log is large."""
        suite, task = self.job.suite, self.job.task
        log = TrajectoryLog(self.job.attempt, suite=suite, task=task, root=root)
        # A member's size comes before its body, so the log is made twice instead of kept.
        size = sum(map(len, log))
        harness = source("rubric_function").encode()
        chunks = archive_chunks(
            (
                (Member(name=str(suite.profile.log_file), kind=Kind.FILE, size=size, mode=0o666), log),
                (
                    Member(name=f"{OWN_FOLDER}/harness.py", kind=Kind.FILE, size=len(harness), mode=0o666),
                    (harness,),
                ),
            )
        )
        if size <= SMALL_BYTES:
            return b"".join(chunks)
        archive = self.inputs.scratch / f"{uuid4().hex}.tar"
        save(chunks if self.job.disk is None else self.job.disk.guard(chunks), archive)
        return archive

    def _evaluator_command(self, root: PurePosixPath) -> list[str]:
        profile = self.job.suite.profile
        return [
            *profile.run_module,
            f"{self._package}.{self.job.task.files.evaluation}",
            "--res_log_file",
            str(root / profile.log_file),
            "--agent_workspace",
            str(root / profile.workspace),
            # Toolathlon passes the word None for a task without a groundtruth.
            "--groundtruth_workspace",
            str(self._groundtruth),
            "--launch_time",
            self._launch_time,
        ]

    def _function_arguments(self, root: PurePosixPath) -> dict[str, str | None]:
        """The values that a rubric's function may take, by the names of its parameters."""
        profile = self.job.suite.profile
        groundtruth = None if self._groundtruth is None else str(root / self._groundtruth)
        workspace = str(root / profile.workspace)
        log_file = str(root / profile.log_file)
        return {
            "workspace": workspace,
            "agent_workspace": workspace,
            "groundtruth": groundtruth,
            "groundtruth_workspace": groundtruth,
            "log": log_file,
            "res_log_file": log_file,
            "launch_time": self._launch_time,
        }

    @property
    def _package(self) -> str:
        return ".".join(self.job.task.folder.parts)

    @property
    def _groundtruth(self) -> PurePosixPath | None:
        """Path of the groundtruth relative to the root, None without one."""
        groundtruth = self.job.task.files.groundtruth
        return self.job.task.folder / groundtruth if groundtruth else None

    @property
    def _launch_time(self) -> str:
        return self.job.suite.launch_time(self.job.attempt.launch_time)
