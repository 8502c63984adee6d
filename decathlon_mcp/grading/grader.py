"""Fresh sandboxes furnished for grading, and the programs that are run in them, one in each.

Into a sandbox that the agent never touched go the suite's own files, the task's folder with its answers, the
workspace as data (`workspace.py`), a log (`trajectory_log.py`) and the harness. In place, the agent's own
sandbox takes the place of a fresh one: what is the suite's is removed there first, and put anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath

import anyio
import anyio.to_thread

from decathlon_mcp.archives.workspace import clean_workspace
from decathlon_mcp.archives.writing import pack_files
from decathlon_mcp.driver_client.driver import DriverClient, RunResult
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.digest import evaluator_digest
from decathlon_mcp.grading.job import OpenSandbox
from decathlon_mcp.grading.trajectory_log import trajectory_log
from decathlon_mcp.grading.verdict import OUTPUT_CHARACTERS
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields

WORKSPACE_BYTES = 4 << 30
WORKSPACE_MEMBERS = 250_000
OWN_FOLDER = ".decathlon"
"""Where the harness lies below the suite's root: never in the workspace."""
PROTECTED = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": "",
    "PYTHONHOME": "",
    "PYTHONOPTIMIZE": "",
    "PYTHONSAFEPATH": "",
}
"""Nothing but the image and the suite says where modules come from; empty is unset. PYTHONSAFEPATH would
take the suite's root from the path, where `-m` finds the evaluator. A profile's own words come over these."""
_GIT = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null", "core.pager": "cat"}
GIT_RUNS_NOTHING = {
    "GIT_CONFIG_COUNT": str(len(_GIT)),
    **{f"GIT_CONFIG_KEY_{number}": name for number, name in enumerate(_GIT)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_GIT.values())},
}
"""For evaluators that call git in a repository which the agent has left: its configuration may name programs
to run at every `status`, and these words are above it (git-config(1), GIT_CONFIG_COUNT). Filters and drivers
that .gitattributes names go by any name, and cannot be switched off so."""

log = logging.getLogger("decathlon.rewards")


@dataclass(frozen=True, slots=True)
class GradingInputs:
    """What goes into every sandbox of one grading: archives, and the folders below the root they are for.

    `refused` says what of the workspace is not in them, `evaluator_digest` which evaluator is.
    """

    archives: Sequence[tuple[PurePosixPath, Path | bytes]]
    refused: tuple[str, ...]
    evaluator_digest: str


def pack(
    suite: Suite,
    task: Task,
    *,
    common: Path,
    sealed: Path | None,
    workspace: Path | None,
    scratch: Path,
    credentials: Sequence[tuple[PurePosixPath, bytes]] = (),
) -> GradingInputs:
    """The archives of a grading, new ones in `scratch`. The workspace is rewritten, never unpacked."""
    here = PurePosixPath()
    archives: list[tuple[PurePosixPath, Path | bytes]] = [(here, common), *credentials]
    graded_by = suite.profile.grading
    if sealed is not None:
        archives.append((task.folder, sealed))
        digest = evaluator_digest(sealed, folder=here, names=graded_by)
    else:
        pristine = scratch / "task.tar"
        suite.task_archive(task, pristine, sealed=True)
        archives.append((here, pristine))
        digest = evaluator_digest(pristine, folder=task.folder, names=graded_by)
    refused: list[str] = []
    if workspace is not None:
        clean = scratch / "workspace.tar"
        refused = clean_workspace(
            workspace,
            clean,
            prefix=str(suite.profile.workspace),
            limit_bytes=WORKSPACE_BYTES,
            limit_members=WORKSPACE_MEMBERS,
        )
        archives.append((here, clean))
    return GradingInputs(archives, tuple(refused), digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """Runs what grades one attempt. `deadline` is by the event loop's clock.

    Its methods raise what opening a sandbox, filling it and running a program in it can raise.
    """

    attempt: Attempt
    suite: Suite
    task: Task
    open_sandbox: OpenSandbox
    baggage: GradingInputs
    in_place: bool
    deadline: float

    async def evaluate(self) -> RunResult:
        """Run the evaluator as upstream does (utils/evaluation/evaluator.py): its exit code is the answer."""
        return await self._run(self._evaluator)

    async def call(self, address: str) -> RunResult:
        """Call a function of the task's evaluation package; `channel` is what it returned, as JSON."""
        file, _, function = address.partition(":")
        module = ".".join((self._package, *PurePosixPath(file).with_suffix("").parts))

        def command(root: PurePosixPath) -> list[str]:
            order = {"root": str(root), "module": module, "function": function, "offers": self._offers(root)}
            harness = root / OWN_FOLDER / "harness.py"
            return [*self.suite.profile.python, str(harness), json.dumps(order)]

        return await self._run(command, channel=True)

    async def _run(self, argv: Callable[[PurePosixPath], list[str]], *, channel: bool = False) -> RunResult:
        """Run one program in a sandbox with its own copy of everything: evaluators write where they like."""
        result: RunResult | None = None
        try:
            async with self.open_sandbox(self.attempt.grader_network) as (sandbox, driver):
                await self._furnish(sandbox, driver)
                result = await driver.run(
                    argv(sandbox.root),
                    cwd=str(sandbox.root),
                    env={**PROTECTED, **GIT_RUNS_NOTHING, **dict(self.suite.profile.environment)},
                    timeout_seconds=max(1.0, self.deadline - anyio.current_time()),
                    output_bytes=OUTPUT_CHARACTERS // 2,
                    channel=channel,
                )
        except Exception:
            if result is None:
                raise
            log.exception("a grader's sandbox did not end well", extra=fields(task=self.attempt.task))
        assert result is not None
        return result

    async def _furnish(self, sandbox: Sandbox, driver: DriverClient) -> None:
        root = sandbox.root
        await driver.arrange(
            *({"remove": str(root / path)} for path in self._not_ours()),
            {"make": str(root / self.suite.profile.workspace)},
        )
        for folder, archive in self.baggage.archives:
            await sandbox.put(root / folder, archive)
        await sandbox.put(root, await anyio.to_thread.run_sync(self._papers, root))

    def _not_ours(self) -> list[PurePosixPath]:
        """What must not be there before our own files are: what an image brought or, in place, an agent."""
        profile = self.suite.profile
        paths = {*profile.purged, PurePosixPath(OWN_FOLDER)}
        if self.in_place:
            paths |= {path for path in profile.common if not profile.workspace.is_relative_to(path)}
            paths.add(self.task.folder)
        return sorted(paths)

    def _papers(self, root: PurePosixPath) -> bytes:
        """The log and the harness as one archive."""
        told = trajectory_log(self.attempt, suite=self.suite, task=self.task, root=root)
        return pack_files(
            {
                str(self.suite.profile.log_file): json.dumps(told).encode(),
                f"{OWN_FOLDER}/harness.py": _harness(),
            }
        )

    def _evaluator(self, root: PurePosixPath) -> list[str]:
        profile = self.suite.profile
        return [
            *profile.run_module,
            f"{self._package}.{self.task.parts.evaluation}",
            "--res_log_file",
            str(root / profile.log_file),
            "--agent_workspace",
            str(root / profile.workspace),
            "--groundtruth_workspace",
            str(self._groundtruth),
            "--launch_time",
            self.suite.launch_time(self.attempt.launch_time),
        ]

    def _offers(self, root: PurePosixPath) -> dict[str, str | None]:
        """What a rubric's function may ask for, by the names of its parameters."""
        groundtruth = None if self._groundtruth is None else str(root / self._groundtruth)
        workspace = str(root / self.suite.profile.workspace)
        log_file = str(root / self.suite.profile.log_file)
        return {
            "workspace": workspace,
            "agent_workspace": workspace,
            "groundtruth": groundtruth,
            "groundtruth_workspace": groundtruth,
            "log": log_file,
            "res_log_file": log_file,
            "launch_time": self.suite.launch_time(self.attempt.launch_time),
        }

    @property
    def _package(self) -> str:
        return ".".join(self.task.folder.parts)

    @property
    def _groundtruth(self) -> PurePosixPath | None:
        """Relative to the root, as upstream has it; its absence is the word None there."""
        return self.task.folder / self.task.parts.groundtruth if self.task.parts.groundtruth else None


@cache
def _harness() -> bytes:
    return resources.files("decathlon_mcp.payloads").joinpath("rubric_function.py").read_bytes()
