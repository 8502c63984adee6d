"""Attempts of a batch: playing and grading, the limits of a group, and errors that players raise."""

from __future__ import annotations

import inspect
import math
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar, cast, get_args

import anyio
from anyio import CancelScope

from decathlon_client.batch_results import Fault, Tally
from decathlon_client.client_episode import MISTAKES, Episode
from decathlon_client.client_errors import ClientError, RequestError
from decathlon_client.client_values import Task, Verdict
from decathlon_client.resume import AttemptKey
from decathlon_client.task_groups import own_cancellations

T = TypeVar("T")
Late: TypeAlias = Literal["truncate", "drop"]
"""What a batch does with the attempts that play at the deadline of their group."""
Player: TypeAlias = Callable[[Episode], Awaitable[T]]
"""Plays one episode; its return value is kept in the result. An unclaimed attempt is graded as it is.

So is an attempt whose player raises the RequestError that a task's server answered with. What else a player
raises is a PlayerFailedError of the result, and the reason for which the episode is closed.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch plays its tasks: see `Decathlon.batch`. Raises ValueError for wrong values."""

    run: str
    concurrency: int
    n: int
    player_seconds: float | None
    group_seconds: float | None
    late: Late

    def __post_init__(self) -> None:
        for name, value in (("concurrency", self.concurrency), ("n", self.n)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        limits = {"player_seconds": self.player_seconds, "group_seconds": self.group_seconds}
        for name, seconds in limits.items():
            if seconds is not None and not seconds > 0:  # also for NaN
                raise ValueError(f"{name} must be more than 0, not {seconds}")
        if self.late not in get_args(Late):
            raise ValueError(f"late must be one of {', '.join(get_args(Late))}, not {self.late!r}")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One episode to be played. `launch_time` is the same for its group; None for the server's clock."""

    index: int
    task: str | Task
    group: int
    number: int
    launch_time: str | None
    occurrence: int = 0

    @property
    def key(self) -> AttemptKey:
        task = self.task if isinstance(self.task, str) else self.task.id
        return AttemptKey(task, self.occurrence, self.number)


class GroupLimits:
    """Gives each group `seconds` from the start of its first attempt; None: no limit.

    The clock stands still while the caller does not wait for results: while a trainer updates its weights, no
    attempts are drawn, and attempts of a group that has begun must not be late for that.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        # By the clock that stands still; to these the scopes' deadlines are set again after a pause.
        self._deadlines: dict[int, float] = {}
        self._scopes: dict[CancelScope, float] = {}
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    @contextmanager
    def limit(self, group: int) -> Generator[CancelScope]:
        """Cancel the body at the group's deadline, or `lift` it before. The first use starts the clock."""
        with CancelScope() as scope:
            if self._seconds is not None:
                now = anyio.current_time() if self._paused_at is None else self._paused_at
                deadline = now - self._paused_seconds + self._seconds
                self._scopes[scope] = self._deadlines.setdefault(group, deadline)
                self._set(scope)
            try:
                yield scope
            finally:
                self._scopes.pop(scope, None)

    def lift(self, scope: CancelScope) -> None:
        """Do not cancel the body of `limit` any more."""
        self._scopes.pop(scope, None)
        scope.deadline = math.inf

    @contextmanager
    def paused(self) -> Generator[None]:
        """Let the clock stand still."""
        self._paused_at = anyio.current_time()
        for scope in self._scopes:
            self._set(scope)
        try:
            yield
        finally:
            self._paused_seconds += anyio.current_time() - self._paused_at
            self._paused_at = None
            for scope in self._scopes:
                self._set(scope)

    def _set(self, scope: CancelScope) -> None:
        is_running = self._paused_at is None
        scope.deadline = self._scopes[scope] + self._paused_seconds if is_running else math.inf


class AttemptRun(Generic[T]):
    """Plays and grades one episode, and keeps the tally up to date.

    `lost`: the episode, if its node of a cluster was lost before it had a verdict.
    """

    def __init__(
        self,
        tally: Tally,
        show: Callable[[], None],
        plan: Plan,
        group_limits: GroupLimits,
        attempt: Attempt,
        player: Player[T],
    ) -> None:
        self.episode: str | None = None
        self.page: str | None = None
        self.lost: str | None = None
        self.played: T | None = None
        self.verdict: Verdict | None = None
        self._tally = tally
        self._show = show
        self._plan = plan
        self._group_limits = group_limits
        self._attempt = attempt
        self._player = player
        self._is_late = False
        self._phase: Literal["opening", "playing", "grading"] = "opening"
        self._count("opening", 1)

    async def play(self, episode: Episode) -> None:
        """Play the episode and grade it. Raises what fails."""
        self.episode = episode.public_id
        self.page = episode.page
        try:
            await self._play(episode)
        finally:
            loss = episode._loss  # pyright: ignore[reportPrivateUsage]
            self.lost = episode.public_id if loss is not None and self.verdict is None else None

    def discard(self) -> None:
        """Do not count this run, which is followed by another run of the same attempt."""
        self._count(self._phase, -1)

    async def _play(self, episode: Episode) -> None:
        self._enter("playing")
        with (
            self._group_limits.limit(self._attempt.group) as group_limit,
            anyio.move_on_after(self._plan.player_seconds) as time_limit,
        ):
            try:
                with own_cancellations("the player"):
                    self.played = await awaitable(self._player(episode))
            except Exception as error:
                # An agent can end its own episode; this is a reward of 0, and no failure. So is what a player
                # does not catch of the errors that a task's server, or an agent in its place, answers with.
                ended_with_reward = episode._ended_with_reward  # pyright: ignore[reportPrivateUsage]
                if not _is_from_task(error):
                    if is_players_fault(error):
                        raise player_failure(error) from error
                    if not await ended_with_reward():
                        raise
        self._enter("grading")
        if (group_limit.cancelled_caught or time_limit.cancelled_caught) and not episode.claimed:
            await episode.truncate()
        self.verdict = await episode.evaluate()

    def late_error(self) -> TimeoutError:
        """The failure of an attempt that is dropped at the deadline of its group."""
        self._is_late = True
        key = self._attempt.key
        return TimeoutError(
            f"attempt {key.attempt} of {key.task} is dropped: it was {self._phase} when the "
            f"{self._plan.group_seconds:g} s of its group were over"
        )

    def outcome(self, failure: Exception | None) -> Fault | None:
        """Count the outcome. Returns whose fault it is that there is no verdict; None if there is one."""
        self._count(self._phase, -1)
        fault: Fault | None = None
        if self.verdict is not None:
            self._tally.rewards += self.verdict.reward
        elif self._is_late:
            fault = "deadline"
        else:
            fault = "player" if self._phase == "playing" and is_players_fault(failure) else "infrastructure"
        state = {None: "scored", "player": "broken", "infrastructure": "lost", "deadline": "dropped"}[fault]
        self._count(state, 1)
        return fault

    def _enter(self, phase: Literal["playing", "grading"]) -> None:
        self._count(self._phase, -1)
        self._count(phase, 1)
        self._phase = phase
        self._show()

    def _count(self, state: str, change: int) -> None:
        setattr(self._tally, state, getattr(self._tally, state) + change)


def awaitable(played: Awaitable[T]) -> Awaitable[T]:
    """What a player returned. Raises TypeError for a function that is not asynchronous, which has played."""
    if not inspect.isawaitable(played):
        kind = type(cast("object", played)).__name__
        raise TypeError(
            f"a player must be an `async def` function without `yield`, and this one returned {kind}; "
            "`decathlon_client.sync` plays with plain functions"
        )
    return played


def _is_from_task(error: BaseException) -> bool:
    """Whether the error is a reply of a task's server."""
    return isinstance(error, RequestError) and error.data.get("source") == "task"


MAX_CHARACTERS = 400
"""Longest description. The server keeps 500 of the reason for which an episode is closed."""
MAX_TRACEBACK_CHARACTERS = 16_000
_LIBRARIES = tuple(
    Path(folder)
    for folder in {
        str(Path(__file__).parent),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
"""Folders whose code is nobody's player."""


class PlayerFailedError(Exception):
    """A player raised an error of its own, which is the `__cause__`.

    As a text: `KeyError: 'tool_calls' (agent.py:31)`. `traceback` is the end of that error's traceback.
    """

    def __init__(self, description: str, traceback: str = "") -> None:
        super().__init__(description, traceback)
        self.traceback = traceback

    def __str__(self) -> str:
        return str(self.args[0])


def player_failure(error: Exception) -> PlayerFailedError:
    """The failure of a player that raised this error."""
    if isinstance(error, PlayerFailedError):
        return error
    text = "".join(traceback.format_exception(error))
    failure = PlayerFailedError(describe(error), text[-MAX_TRACEBACK_CHARACTERS:])
    failure.__cause__ = error
    return failure


def is_players_fault(error: BaseException | None) -> bool:
    """Whether the player caused the error; for a group, whether it caused any error in it."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return any(is_players_fault(inner) for inner in group.exceptions)
    return not isinstance(error, ClientError) or isinstance(error, MISTAKES)


def describe(error: BaseException) -> str:
    """Type, message, file and line of an error, on one line of at most MAX_CHARACTERS.

    The line is the innermost one outside of libraries. A group of one error is that error. An error without a
    message, such as an assertion's, is described by the line of code.
    """
    error = _only(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, _LIBRARIES))]
    frame = next(iter(reversed(own or frames)), None)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  (of a class of the player's)
        message = ""
    message = " ".join(message.split()) or (frame and frame.line) or ""
    where = "" if frame is None else f" ({Path(frame.filename).name}:{frame.lineno})"
    what = f"{type(error).__name__}{': ' if message else ''}{message}"
    described = f"{what[: MAX_CHARACTERS - len(where)]}{where}"[:MAX_CHARACTERS]
    # JSON in UTF-8 has no lone surrogates.
    return described.encode("utf-8", "replace").decode()


def _only(error: BaseException) -> BaseException:
    """The error itself; of a group with one error, this error."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return _only(group.exceptions[0]) if len(group.exceptions) == 1 else group
