"""Runs the programs that grade an attempt, each in a sandbox prepared for it.

A sandbox for grading holds the suite's own files, the task's folder with its answers, the agent's workspace
as data, the log of the attempt and the harness that calls a rubric's function. The agent never used it,
except when grading in place: then the suite's files in the agent's sandbox are removed and unpacked again.

A program that does not exit by itself (it is killed, or runs out of time or memory) is run once more, in
another sandbox and within what remains of the deadline: the machine may have been the cause. After that the
attempt is forfeited. When grading in place there is no other sandbox, and so no second run.
"""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TypeAlias

import anyio
import anyio.to_thread
from pydantic import TypeAdapter, ValidationError

from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.unpacking import joined
from decathlon_mcp.archives.writing import ArchiveSource, Entry, StreamedArchive
from decathlon_mcp.driver.client import DriverClient, RunResult
from decathlon_mcp.driver.transfers import put_archive
from decathlon_mcp.errors import (
    BadRequestError,
    CallTimeoutError,
    DriverError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
    SuiteError,
)
from decathlon_mcp.grading.attempt import CallRecord
from decathlon_mcp.grading.fault import AgentsFaultError
from decathlon_mcp.grading.inputs import GradingInputs, GradingJob
from decathlon_mcp.grading.rubric import FUNCTION_ARGUMENTS, function_location
from decathlon_mcp.grading.verdict import OUTPUT_CHARACTERS
from decathlon_mcp.payloads import source
from decathlon_mcp.sandboxes.base import Sandbox, ended_from_inside
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

MAX_BOOTS = 3
"""Sandboxes that are opened for one run if their drivers never come up, as when an engine restarts."""
OWN_FOLDER = ".decathlon"
"""Folder of the harness, relative to the suite's root; it is never inside the workspace."""
CALLS_FILE = f"{OWN_FOLDER}/calls.jsonl"
"""The agent's calls for `tool_calls`, an argument of a rubric's function; one JSON object a line."""

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
# Some evaluators call git in a repository that the agent created. The programs that its configuration names
# are removed from the archive (`archives/repositories.py`); when grading in place, these settings alone
# protect. GIT_CONFIG_COUNT (git-config(1)) has precedence over the repository. It cannot switch off drivers,
# filters and aliases, which have arbitrary names.
_GIT_CONFIG = {
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.pager": "cat",
    "core.sshCommand": "ssh",
    "core.alternateRefsCommand": "true",
    "credential.helper": "",
    "gpg.program": "gpg",
    "gpg.openpgp.program": "gpg",
    "gpg.x509.program": "gpgsm",
    "gpg.ssh.program": "ssh-keygen",
    "gpg.ssh.defaultKeyCommand": "true",
    "log.showSignature": "false",
    "protocol.ext.allow": "never",
    # The default since git 2.38.1: no submodule is cloned from a path, also if only a commit names it.
    "protocol.file.allow": "user",
}
REPOSITORY_ENVIRONMENT = {
    "GIT_CONFIG_COUNT": str(len(_GIT_CONFIG)),
    **{f"GIT_CONFIG_KEY_{number}": name for number, name in enumerate(_GIT_CONFIG)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_GIT_CONFIG.values())},
    "GIT_PAGER": "cat",
    # Objects that are missing are not fetched from where the repository says (git 2.45 and later).
    "GIT_NO_LAZY_FETCH": "1",
    # Mercurial then reads no `.hg/hgrc`.
    "HGRCSKIPREPO": "1",
}
OPEN_SECONDS = 14_400.0
"""How long a sandbox for grading may take to open, with the wait for a place, for which a thousand other
attempts may wait too; the deadline does not run. Providers have shorter limits for what they do."""
GRACE_SECONDS = 15.0
"""Time beyond the deadline in which a run that has timed out still delivers its output."""
MIN_RETRY_SECONDS = 1.0
"""A second run needs at least this much of the deadline."""
SIGNALLED = frozenset({126, 127, *(128 + number for number in signal.valid_signals())})
"""Exit codes of a runner (a shell, `uv run`) whose program was killed by a signal or did not start."""

CHECK_SECONDS = 60.0
"""How long the check of an evaluator's module may take."""
CHECK_BYTES = 1 << 20
"""Longest output of a check of many evaluators."""
MAX_CHECKED_MODULES = 10_000
_checked_modules: set[tuple[str, ...]] = set()
"""The modules that Python can run; each is checked once for each revision of its files."""
_PROBLEMS = TypeAdapter(dict[str, str])

log = logging.getLogger("decathlon.rewards")


def evaluator_module(task: Task) -> str:
    """The name by which Python finds a task's evaluator in the suite's root."""
    return ".".join((*task.folder.parts, task.files.evaluation))


async def probe_evaluators(
    driver: DriverClient, profile: SuiteProfile, root: PurePosixPath, modules: Mapping[str, str]
) -> Mapping[str, str]:
    """Problems of modules in a sandbox with the suite's files, where Python cannot run them, by task.

    Empty, too, if the look fails.
    """
    order = {"root": str(root), "modules": dict(modules)}
    result = await driver.run(
        [*profile.python, "-c", source("evaluator_probe"), json.dumps(order)],
        cwd=str(root),
        env={**PYTHON_ENVIRONMENT, **dict(profile.environment)},
        timeout_seconds=CHECK_SECONDS,
        output_bytes=CHECK_BYTES,
    )
    try:
        return _PROBLEMS.validate_json(result.stdout)
    except ValidationError:
        log.warning("evaluators could not be checked", extra=fields(output=printed(result)))
        return {}


class ForfeitedError(Exception):
    """There is no score for a reason that the agent may have caused; `output` was printed by the program."""

    def __init__(self, detail: str, output: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.output = output


Program: TypeAlias = Callable[[PurePosixPath], tuple[Sequence[str], Mapping[str, str]]]
"""The command and the variables of a program that grades, for the suite's root in its sandbox."""


@dataclass(slots=True)
class Grader:
    """Runs the evaluator and the rubric's function of one job.

    The methods raise ForfeitedError for a program that does not exit by itself, and for a workspace that
    cannot be unpacked; otherwise what opening a sandbox, filling it and running a program in it raise.
    """

    job: GradingJob
    inputs: GradingInputs
    _seconds: float = field(init=False)
    """What remains of the job's deadline; time counts while a sandbox is open."""
    _second_runs: int = field(init=False)

    def __post_init__(self) -> None:
        self._seconds = self.job.deadline_seconds
        self._second_runs = 0 if self.job.in_place else 1

    async def run_evaluator(self) -> RunResult:
        """Run the task's evaluator as Toolathlon does (utils/evaluation/evaluator.py).

        `channel` is the exception that ended it, as JSON text; empty if there was none.
        """
        profile, module = self.job.suite.profile, evaluator_module(self.job.task)

        def program(root: PurePosixPath) -> tuple[Sequence[str], Mapping[str, str]]:
            command = [
                *(*profile.run_module, module),
                *("--res_log_file", str(root / profile.log_file)),
                *("--agent_workspace", str(root / profile.workspace)),
                # Toolathlon passes the word None for a task without a groundtruth.
                *("--groundtruth_workspace", str(self._groundtruth)),
                *("--launch_time", self._launch_time),
            ]
            # The module there reports an exception over the channel.
            paths = [str(root / OWN_FOLDER / "python"), dict(profile.environment).get("PYTHONPATH")]
            return command, {"PYTHONPATH": ":".join(filter(None, paths))}

        return await self._run("the evaluator", module, program)

    async def run_rubric_function(self, address: str) -> RunResult:
        """Call a function of the task's evaluation package; `channel` is its return value as JSON.

        With exit code 1, `channel` is the exception that it raised, as JSON text. `address` is such as
        `evaluation/evaluator.py:evaluate`.
        """
        profile, (module, function) = self.job.suite.profile, function_location(self.job.task, address)

        def program(root: PurePosixPath) -> tuple[Sequence[str], Mapping[str, str]]:
            workspace, log_file = str(root / profile.workspace), str(root / profile.log_file)
            groundtruth = None if self._groundtruth is None else str(root / self._groundtruth)
            values = (
                *(workspace, workspace, groundtruth, groundtruth),
                *(log_file, log_file, self._launch_time, str(root / CALLS_FILE)),
            )
            offers = dict(zip(FUNCTION_ARGUMENTS, values, strict=True))
            order = {"root": str(root), "module": module, "function": function, "offers": offers}
            harness = root / OWN_FOLDER / "harness.py"
            return [*profile.python, str(harness), json.dumps(order)], {}

        return await self._run(address, module, program, reads_calls=True)

    @property
    def _groundtruth(self) -> PurePosixPath | None:
        """Path of the groundtruth relative to the root, None without one."""
        groundtruth = self.job.task.files.groundtruth
        return self.job.task.folder / groundtruth if groundtruth else None

    @property
    def _launch_time(self) -> str:
        return self.job.suite.launch_time(self.job.attempt.launch_time)

    async def _run(self, what: str, module: str, program: Program, *, reads_calls: bool = False) -> RunResult:
        """Run a program, twice if need be, each time in a sandbox of its own.

        A sandbox in which nothing has run, because its driver never came up, does not count. `what` names the
        program in errors, `module` is the suite's that it runs; `reads_calls`: it needs `CALLS_FILE`.
        """
        boots = 0
        while True:
            result = None
            boots += 1
            try:
                result = await self._run_once(module, program, reads_calls)
                failure = no_exit(result)
            except AgentsFaultError as error:
                failure = f"could not run: {error.message}"
            except SandboxLostError as error:
                if not ended_from_inside(error):
                    if error.data.get("booted") is False and boots < MAX_BOOTS:
                        log.warning("a sandbox for grading never came up", extra=fields(why=error.message))
                        continue
                    raise
                failure = error.message
            except CallTimeoutError as error:
                failure = error.message
            except (BadRequestError, DriverError, LimitExceededError) as error:
                # In place, the agent may have removed the program, put something where the files go, or left
                # no room for them.
                reasons = ("spawn", "files") if isinstance(error, DriverError) else (None,)
                if not self.job.in_place or error.data.get("reason") not in reasons:
                    raise
                failure = f"could not run: {error.message}"
            if result is not None and not failure:
                return result
            if self._second_runs < 1 or self._seconds < MIN_RETRY_SECONDS:
                raise ForfeitedError(f"{what} {failure}", printed(result) if result else "")
            self._second_runs -= 1
            log.warning("graded once more", extra=fields(task=self.job.attempt.task, why=failure))

    async def _run_once(self, module: str, program: Program, reads_calls: bool) -> RunResult:
        result: RunResult | None = None
        finder = self.job.fault_finder
        try:
            async with self._open_sandbox() as (sandbox, driver), self._spending() as deadline:
                # Only what the agent's files may make fail. Other errors are about the program: see `_run`.
                kinds = (ProviderUnavailableError, OSError, MemoryError)
                async with nullcontext() if finder is None else finder.deciding(sandbox, kinds):
                    await self._fill(sandbox, driver, module, reads_calls)
                    command, variables = program(sandbox.root)
                    own = dict(self.job.suite.profile.environment)
                    result = await driver.run(
                        list(command),
                        cwd=str(sandbox.root),
                        env={**PYTHON_ENVIRONMENT, **REPOSITORY_ENVIRONMENT, **own, **variables},
                        timeout_seconds=max(1.0, deadline - anyio.current_time()),
                        output_bytes=OUTPUT_CHARACTERS // 2,
                        channel=True,
                    )
        except Exception:
            # The program has ended by itself: a sandbox that then fails to close does not change its result.
            if result is None:
                raise
            log.exception("closing a sandbox for grading failed", extra=fields(task=self.job.attempt.task))
        assert result is not None
        return result

    @asynccontextmanager
    async def _open_sandbox(self) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
        """Open a sandbox. Raises ProviderUnavailableError if that takes longer than `OPEN_SECONDS`."""
        with anyio.move_on_after(OPEN_SECONDS) as opening:
            async with self.job.open_sandbox(self.job.attempt.grader_network) as opened:
                opening.deadline = math.inf
                yield opened
        if opening.cancelled_caught:
            raise ProviderUnavailableError(
                f"no sandbox for grading could be opened within {OPEN_SECONDS:.0f} s"
            )

    @asynccontextmanager
    async def _spending(self) -> AsyncGenerator[float]:
        """Deduct the time that the body takes; yields when it must end.

        Raises CallTimeoutError if the body takes `GRACE_SECONDS` longer.
        """
        started = anyio.current_time()
        deadline = started + max(1.0, self._seconds)
        try:
            with anyio.CancelScope(deadline=deadline + GRACE_SECONDS) as scope:
                yield deadline
        finally:
            self._seconds -= anyio.current_time() - started
        if scope.cancelled_caught:
            raise CallTimeoutError("the sandbox for grading did not answer in time")

    async def _fill(self, sandbox: Sandbox, driver: DriverClient, module: str, reads_calls: bool) -> None:
        """Unpack everything. Raises SuiteError if Python cannot run the module, whatever the agent did."""
        root, top = sandbox.root, PurePosixPath()
        before: list[JsonObject] = [
            *({"remove": str(root / path)} for path in self._paths_to_remove()),
            {"make": str(root / self.job.suite.profile.workspace)},
        ]
        inside = [part for part in self.inputs.archives if not part[0].is_absolute()]
        outside = [part for part in self.inputs.archives if part[0].is_absolute()]
        own = (top, await anyio.to_thread.run_sync(self._own_files, root, reads_calls))
        if not self.job.in_place and self._module_key(module) not in _checked_modules:
            # Before anything of the agent's is there: what is found is nobody's doing but the suite's.
            await self._put(sandbox, driver, root, joined(inside), before)
            await self._check_module(driver, root, module)
            inside, before = [], []
        if self.inputs.workspace is None:
            await self._put(sandbox, driver, root, joined([*inside, own]), before)
        else:
            agents = (top, self.inputs.workspace.streamed())
            try:
                await self._put(sandbox, driver, root, joined([*inside, agents, own]), before)
            except (BadRequestError, LimitExceededError):
                # One by one, to know which it was: a workspace that cannot be unpacked is the agent's fault,
                # and so is one that leaves no room for the attempt's log.
                await self._put(sandbox, driver, root, joined(inside), before)
                try:
                    await self._put(sandbox, driver, root, agents[1])
                    await self._put(sandbox, driver, root, own[1])
                except (BadRequestError, LimitExceededError) as error:
                    raise ForfeitedError(f"the workspace cannot be unpacked: {error.message}") from error
        for folder, archive in outside:
            await self._put(sandbox, driver, folder, archive)

    def _module_key(self, module: str) -> tuple[str, ...]:
        facts, path = self.job.attempt.facts, str(self.job.suite.path)
        digest = self.inputs.evaluator_digest
        return path, facts.suite_revision, facts.image_digest or "", digest, module

    async def _check_module(self, driver: DriverClient, root: PurePosixPath, module: str) -> None:
        """Raise SuiteError if Python cannot run a module of the suite, in which nothing of the agent's is.

        It exits with 1 then, as for a failed attempt.
        """
        task = self.job.task.id
        problems = await probe_evaluators(driver, self.job.suite.profile, root, {task: module})
        if problem := problems.get(task):
            raise SuiteError(f"{task}: {problem}")
        if len(_checked_modules) >= MAX_CHECKED_MODULES:
            _checked_modules.clear()
        _checked_modules.add(self._module_key(module))

    async def _put(
        self,
        sandbox: Sandbox,
        driver: DriverClient,
        folder: PurePosixPath,
        archive: ArchiveSource,
        before: Sequence[JsonObject] = (),
    ) -> None:
        """Unpack an archive into `folder`, after the steps `before`."""
        if not self.job.in_place:
            await put_archive(sandbox, driver, folder, archive, before=before)
            return
        # The agent may have replaced what the driver would unpack with.
        if before:
            await driver.arrange(*before)
        await sandbox.put(folder, archive)

    def _paths_to_remove(self) -> list[PurePosixPath]:
        """Paths that the image or, in place, the agent may have put where the suite's files go."""
        profile = self.job.suite.profile
        paths = {*profile.purged, PurePosixPath(OWN_FOLDER)}
        if self.job.in_place:
            paths |= {path for path in profile.common if not profile.workspace.is_relative_to(path)}
            paths.add(self.job.task.folder)
        return sorted(paths)

    def _own_files(self, root: PurePosixPath, with_calls: bool) -> StreamedArchive:
        """An archive with the attempt's log, perhaps the list of calls, and our programs. Blocks."""
        job, log_file = self.job, str(self.job.suite.profile.log_file)
        texts: dict[str, Iterable[bytes]] = {
            log_file: job.log(job.attempt, job.task, root),
            f"{OWN_FOLDER}/harness.py": (source("rubric_function").encode(),),
            f"{OWN_FOLDER}/python/sitecustomize.py": (source("exception_report").encode(),),
        }
        if with_calls:
            texts[CALLS_FILE] = _CallLines(job.attempt.calls)
        # A member's size comes before its body, so long bodies are made twice instead of kept.
        sizes = {name: sum(map(len, text)) for name, text in texts.items()}

        def entries() -> Iterator[Entry]:
            for name, text in texts.items():
                if sizes[name] or name != log_file:  # a suite may have no log
                    yield Member(name=name, kind=Kind.FILE, size=sizes[name], mode=0o666), text

        return StreamedArchive(entries, sum(sizes.values()))


@dataclass(frozen=True, slots=True)
class _CallLines:
    """Calls as lines of JSON, any number of times: the tool's name, the arguments, and whether it failed."""

    calls: Iterable[CallRecord]

    def __iter__(self) -> Iterator[bytes]:
        for call in self.calls:
            line = {
                "tool": f"{call.server}__{call.tool}",
                "arguments": call.arguments,
                "failed": call.failed,
            }
            yield json.dumps(line).encode() + b"\n"


def no_exit(result: RunResult) -> str:
    """Why a program did not exit by itself; empty if it did."""
    if result.timed_out:
        return "did not end in time"
    if result.exit_code is None:
        return f"was killed: signal {result.signal}"
    if result.exit_code in SIGNALLED:
        return f"was killed or did not start: exit code {result.exit_code}"
    return ""


def printed(result: RunResult) -> str:
    """The end of what a program printed, for people."""
    # The driver was asked for no more, but it runs in a sandbox and may send more.
    half = OUTPUT_CHARACTERS // 2
    parts = (result.stdout[-half:].strip(), result.stderr[-half:].strip())
    return "\n".join(part for part in parts if part)
