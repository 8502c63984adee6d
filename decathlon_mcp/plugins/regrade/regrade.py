"""`regrade`: grades kept attempts again with the present evaluators, and shows what changed."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import anyio
import anyio.to_thread
from cyclopts import Parameter

from decathlon_mcp.app import bootstrap
from decathlon_mcp.background import background_tasks
from decathlon_mcp.cli.options import SANDBOX_SETTINGS, Flag, run_async, settings_model
from decathlon_mcp.cli.output import print_json, print_lines, print_table
from decathlon_mcp.cli.readiness import require_ready
from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import BadRequestError, DecathlonError, UnknownEpisodeError
from decathlon_mcp.grading.verdict import REWARDED, Verdict
from decathlon_mcp.plugins.regrade.kept_attempts import ATTEMPT_FILE, AttemptFiles, KeptAttempt
from decathlon_mcp.plugins.regrade.regrading import Regraded, Regrader, is_open, read_kept
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.lock import check_state_folder, running_servers
from decathlon_mcp.telemetry.logs import configure_logging, fields
from decathlon_mcp.types import HANDLE, JsonObject, as_object, public_id
from decathlon_mcp.validation import quoted

RegradeOptions = settings_model(
    "RegradeOptions",
    (
        *(*SANDBOX_SETTINGS, "language", "network", "web"),
        *("memory_mib", "cpus", "pids", "workspace_mib"),
        *("max_sandboxes", "max_opening", "evaluation_seconds"),
    ),
)
RegradeSettings = Annotated[RegradeOptions, Parameter(name="*")]
REGRADE_DEFAULTS = RegradeOptions.model_validate({})


def regrade(
    *episodes: Annotated[str, Parameter(name="EPISODE")],
    all: Flag = False,  # noqa: A002
    task: Annotated[tuple[str, ...], Parameter(metavar="ID", negative=(), show_default=False)] = (),
    write: Flag = False,
    json: Flag = False,
    settings: RegradeSettings = REGRADE_DEFAULTS,
) -> int:
    """Grade kept attempts again with the current evaluators.

    Prints what changed. The exit status is 0 only if every attempt could be graded. `serve --keep workspace`
    keeps attempts.

    Parameters
    ----------
    episodes
        Handles of episodes, or unique beginnings of them.
    all
        All attempts that are kept in the state folder.
    task
        All kept attempts at this task. Can be repeated.
    write
        Keep each new verdict next to the old one, as `verdict-2.json` and so on.
    json
        Print one JSON object per episode and line, with the new verdict.
    """
    return run_async(regrade_selected, settings, Selection(episodes, all, task), write, json)


log = logging.getLogger("decathlon.cli")

COMPARED = ("status", "success", "reward", "metrics", "evaluator_digest", "suite_revision")
"""What a line of JSON has of both verdicts."""
HEADINGS = ("episode", "task", "outcome", "reward", "metrics", "evaluator", "suite")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which attempts: `episodes` by public id or its beginning, `every` kept one, or all at the `tasks`."""

    episodes: tuple[str, ...]
    every: bool
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one episode: a new verdict, or an error.

    `episode`: the public id, or what the user wrote. `file`: the file to which the new verdict was written.
    """

    episode: str
    kept: KeptAttempt | None = None
    regraded: Regraded | None = None
    file: str | None = None
    error: DecathlonError | None = None

    @property
    def is_graded(self) -> bool:
        return self.regraded is not None and self.regraded.after.status in REWARDED

    @property
    def changed(self) -> list[str]:
        """The names of `COMPARED` in which the new verdict differs."""
        if self.regraded is None:
            return []
        before, after = _compared(self.regraded.before), _compared(self.regraded.after)
        return [name for name in COMPARED if before.get(name) != after.get(name)]

    def to_json(self) -> JsonObject:
        task = {"task": self.kept.attempt.task, "suite": self.kept.attempt.suite} if self.kept else {}
        if self.regraded is None:
            assert self.error is not None
            error = {"code": self.error.code, "message": self.error.message}
            return {"episode": self.episode, **task, "error": error}
        return {
            "episode": self.episode,
            **task,
            "changed": self.changed,
            "before": _compared(self.regraded.before) or None,
            "after": _compared(self.regraded.after),
            "verdict": self.regraded.after.to_json(),
            "file": self.file,
        }

    def cells(self) -> list[str]:
        """A row of the table: what is the same once, what changed as `before → after`."""
        assert self.regraded is not None
        assert self.kept is not None
        before, after = self.regraded.before, self.regraded.after
        return [
            self.episode,
            self.kept.attempt.task,
            _arrow(_outcome(before), _outcome(after)),
            _arrow(_number(before and before.reward), _number(after.reward)),
            ", ".join(_changed_metrics(before, after)),
            _arrow(_digest(before), _digest(after)),
            _arrow(_revision(before), _revision(after)),
        ]


async def regrade_selected(settings: Settings, selection: Selection, write: bool, as_json: bool) -> int:
    """Grade the selected attempts again; print a line each on stdout, on a terminal a table at the end.

    Returns 0 only if all of them could be graded, 2 if there is no such episode, 143 after SIGTERM. Raises
    SuiteError, SettingsError, ProviderUnavailableError, and BadRequestError if nothing is selected.
    """
    configure_logging(settings.log_level, settings.log_format)
    if bool(selection.episodes) + selection.every + bool(selection.tasks) != 1:
        raise BadRequestError("name the episodes, or select them with either --all or --task")
    check_state_folder(settings.state)
    # Asked before this process has a lock of its own.
    others = await anyio.to_thread.run_sync(running_servers, settings.state)
    folders, results = await anyio.to_thread.run_sync(
        _select, settings.state / "episodes", selection, bool(others)
    )
    if not folders and not results:
        raise BadRequestError(f"no attempt is kept in {settings.state / 'episodes'} that is selected")
    output = _Output(as_json)
    for result in results:
        output.add(result)
    try:
        with anyio.CancelScope() as scope:
            async with background_tasks() as background:
                background.start_soon(_cancel_at_sigterm, scope)
                if folders:
                    await _regrade_all(settings, folders, write, output)
    finally:
        # After an interrupt too: a terminal gets its table only here.
        if output.results:
            output.finish()
    if scope.cancelled_caught:
        return 128 + signal.SIGTERM
    if any(isinstance(result.error, UnknownEpisodeError) for result in results):
        return 2
    return 0 if all(result.is_graded for result in output.results) else 1


def _select(journals: Path, selection: Selection, others: bool) -> tuple[list[Path], list[Result]]:
    """The folders of the selected episodes, and the results of episodes that cannot be graded. Blocks.

    `others`: another server uses the state folder, so that an episode without an end may be one of its own.
    """
    handles = sorted(entry.name for entry in journals.glob("*") if HANDLE.fullmatch(entry.name))
    if not selection.episodes:
        kept = [journals / handle for handle in handles if (journals / handle / ATTEMPT_FILE).is_file()]
        closed = [folder for folder in kept if not (others and is_open(folder))]
        return [folder for folder in closed if _is_of(folder, selection.tasks)], []
    folders: dict[Path, None] = {}
    failed: list[Result] = []
    for text in selection.episodes:
        try:
            folder = journals / _handle(text, handles)
            if others and is_open(folder):
                raise BadRequestError("it is still running, or its server was killed: wait for its verdict")
            folders[folder] = None
        except DecathlonError as error:
            failed.append(Result(episode=text, error=error))
    return list(folders), failed


def _handle(text: str, handles: list[str]) -> str:
    """The handle whose public id begins with a text. Raises UnknownEpisodeError unless there is one."""
    found = [handle for handle in handles if text and public_id(handle).startswith(text.lower())]
    if len(found) > 1:
        raise UnknownEpisodeError(f"{len(found)} episodes begin with {quoted(text)}: write more of the id")
    if not found:
        raise UnknownEpisodeError(f"the state folder has no episode {quoted(text)}")
    return found[0]


def _is_of(folder: Path, tasks: tuple[str, ...]) -> bool:
    """Whether a kept attempt is at one of the tasks; without tasks, and if it cannot be read, it is."""
    if not tasks:
        return True
    try:
        kept = read_kept(folder)
    except BadRequestError:
        return True  # reported later
    names = {kept.attempt.task, kept.task_id, f"{kept.attempt.suite}:{kept.task_id}"}
    return not names.isdisjoint(tasks)


async def _regrade_all(settings: Settings, folders: list[Path], write: bool, output: _Output) -> None:
    """Grade the attempts of these folders again, at most `max_sandboxes` at the same time."""
    places = anyio.CapacityLimiter(settings.max_sandboxes)
    async with bootstrap(settings) as registry:
        await require_ready(registry, settings.max_sandboxes)
        regrader = Regrader(registry, other_image=settings.image is not None)

        async def regrade_one(folder: Path) -> None:
            async with places:
                output.add(await _regrade_one(regrader, folder, write))

        async with anyio.create_task_group() as tasks:
            for folder in folders:
                tasks.start_soon(regrade_one, folder)


async def _regrade_one(regrader: Regrader, folder: Path, write: bool) -> Result:
    result = Result(episode=public_id(folder.name))
    try:
        result = replace(result, kept=(kept := await anyio.to_thread.run_sync(read_kept, folder)))
        regraded = await regrader.regrade(folder, kept)
        file = None
        if write and regraded.after.status in REWARDED:
            verdict = regraded.after.to_json()
            file = await anyio.to_thread.run_sync(AttemptFiles(folder).add_verdict, verdict)
        return replace(result, regraded=regraded, file=file)
    except DecathlonError as error:
        fault = error
    except OSError as error:
        fault = BadRequestError(f"{error.filename or folder}: {error.strerror}")
    except Exception as error:
        # The others go on.
        log.exception("regrading failed", extra=fields(episode=result.episode))
        fault = DecathlonError(f"a fault of this program: {type(error).__name__}")
    return replace(result, error=fault)


async def _cancel_at_sigterm(scope: anyio.CancelScope) -> None:
    # SIGINT cancels the event loop's main task by itself.
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


class _Output:
    """Prints results as they come, on a terminal as a table at the end."""

    def __init__(self, as_json: bool) -> None:
        self.results: list[Result] = []
        self._as_json = as_json
        self._as_table = not as_json and sys.stdout.isatty()

    def add(self, result: Result) -> None:
        self.results.append(result)
        if self._as_json:
            print_json(result.to_json(), indent=None)
        elif result.regraded is not None and not self._as_table:
            print_lines([result.cells()])
        sys.stdout.flush()
        if not (self._as_json or result.is_graded):
            detail = result.error.message if result.error else _detail(result)
            report(f"{result.episode}: {detail}")

    def finish(self) -> None:
        if self._as_table:
            print_table(HEADINGS, [result.cells() for result in self.results if result.regraded])
        graded = [result for result in self.results if result.is_graded]
        other = sum(not {"status", "success", "reward"}.isdisjoint(result.changed) for result in graded)
        failed = len(self.results) - len(graded)
        sys.stderr.write(
            f"{len(graded)} graded again, {other} of them with another result"
            f"{f'; {failed} could not be graded' if failed else ''}\n"
        )


def _compared(verdict: Verdict | None) -> JsonObject:
    if verdict is None:
        return {}
    values = verdict.model_dump(mode="json", include=set(COMPARED))
    return {**values, "suite_revision": _revision(verdict)}


def _revision(verdict: Verdict | None) -> str:
    """The revision of the files that an attempt was graded with."""
    if verdict is None:
        return "none"
    regrading = as_object(verdict.to_json().get("regrading")) or {}
    return str(regrading.get("suite_revision", verdict.suite_revision))


def _outcome(verdict: Verdict | None) -> str:
    if verdict is None:
        return "none"
    if verdict.status != "scored":
        return verdict.status
    return "passed" if verdict.success else "failed"


def _digest(verdict: Verdict | None) -> str:
    digest = (verdict and verdict.evaluator_digest) or "none"
    return digest.removeprefix("sha256:")[:8]


def _changed_metrics(before: Verdict | None, after: Verdict) -> Iterator[str]:
    old, new = before.metrics if before else {}, after.metrics
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield f"{name} {_arrow(_number(old.get(name)), _number(new.get(name)))}"


def _number(number: float | None) -> str:
    return "none" if number is None else f"{number:.6g}"


def _arrow(before: str, after: str) -> str:
    return after if before == after else f"{before} → {after}"


def _detail(result: Result) -> str:
    assert result.regraded is not None
    return f"{result.regraded.after.status}: {result.regraded.after.detail}"
