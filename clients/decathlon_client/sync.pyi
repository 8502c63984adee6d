"""Generated from the asynchronous classes by `python -m tests.clients.stubs`. Do not edit."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, Unpack, overload

from decathlon_client.attempts import Late
from decathlon_client.batch_results import Result, Summary, Tally
from decathlon_client.client_errors import ClientError
from decathlon_client.client_session import ServerEndpoint
from decathlon_client.client_values import (
    Filters,
    JsonObject,
    NoteRole,
    OnDifference,
    Policy,
    Reply,
    Task,
    Tool,
    Verdict,
)
from decathlon_client.lockstep import Call
from decathlon_client.opener import OpeningOptions
from decathlon_client.resends import RESEND_SECONDS
from decathlon_client.resume import VerdictRecord

T = TypeVar("T")
OnProgress: TypeAlias = Callable[[float, float | None, str | None], None]
Player: TypeAlias = Callable[[Episode], T]

class Episode:
    """An episode that is ready to be played; made by `Decathlon.episode` and `Decathlon.attach`.

    Show `prompt` and `tools` to the model.
    """

    id: str
    "The handle, a secret: everybody who knows it can play."
    public_id: str
    "Names it in results, verdicts and logs; gives no access."
    page: str | None
    "Address where people watch it; None for an embedded server."
    task: str
    labels: Mapping[str, str]
    "What it was opened with; in a batch also `run`, `group` and `attempt`. Empty after `attach`."
    prompt: str
    address: str
    "Where other clients reach it; for an embedded server the handle again."
    agent_address: str | None
    "Allows playing, not evaluating, for an agent that runs elsewhere; None after `attach`."
    tools: tuple[Tool, ...]
    "The task's own and `claim_done`, without `evaluate`, by which a model could check guesses."
    claimed: bool
    "Whether the attempt is closed to tools, as far as this client knows."

    def __repr__(self) -> str: ...
    def call(
        self,
        name: str,
        arguments: JsonObject | None = None,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Call a tool. A tool that fails, or whose result is not MCP, returns a reply with `is_error`.

        `timeout` is in seconds; None waits as long as the tool takes. After a lost connection the call is
        sent again and runs once; `on_progress` may then repeat itself. Raises UnknownToolError, RequestError,
        CallTimeoutError, EpisodeEndedError, SandboxLostError, ConnectionLostError, and ClientError with code
        `provider_unavailable` if the server has not reached the sandbox for `resend_seconds`.
        """

    def act(
        self,
        name: str,
        arguments: JsonObject | str | None = None,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Make a model's call: as `call`, but the model's mistakes are replies with `is_error`.

        Mistakes are an unknown tool, refused arguments, and a call past its `timeout`; also a call by which,
        or before which, the episode ended with a reward of 0: then `claimed` is true. Refused are also
        arguments that no server can read: half of a surrogate pair, NaN, more than 4,300 digits, 128 levels,
        100,000 values, or the server's `--max-body-mib`. `arguments` may be the JSON text that the model
        wrote. `evaluate` cannot be called. Raises EpisodeEndedError,
        SandboxLostError, ConnectionLostError, which are not the model's fault.
        """

    def claim_done(self, answer: str | None = None) -> Reply:
        """Close the attempt. No tool works after that, and the server starts grading.

        `answer`: the agent's final answer, which some tasks are graded by. An answer that cannot be sent is a
        reply with `is_error`, as in `act`: the attempt is still open.
        """

    def truncate(self, answer: str | None = None, *, turns: int | None = None) -> Reply:
        """Close the attempt because the agent may not go on; the agent claims nothing.

        The verdict's `truncated` is true. The work so far is graded, or the reward is 0:
        `grades_truncated` in its suite's `suite.yaml` decides. By default the reward is 0 for the tasks of
        Toolathlon and toolathlon_gym, as upstream.
        `turns`: the turns that the agent took, for rubrics that use them; counted only with policy
        `controller` or a controller's token. Raises AccessDeniedError if another client controls this
        episode. If the episode has ended with a reward of 0 before, the reply has `is_error`. An answer that
        cannot be sent is left out.
        """

    def note(
        self,
        text: str,
        *,
        role: NoteRole = "assistant",
        usage: Mapping[str, float] | None = None,
        calls: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Add a message of the model to the episode's record, for people who read it.

        Evaluators do not see it. Possible until the episode ends. `usage`: token counts and their cost, such
        as `{"input_tokens": 1200, "output_tokens": 80, "cost_usd": 0.0048}`; the page shows their sums.
        `calls`: how many calls came before it; by default all until now. A long text becomes several notes.
        `timeout` is in seconds, for all of them. Raises ClientError, also if the episode has too many, and
        CallTimeoutError: then the last one may be there.
        """

    def evaluate(self, *, on_progress: OnProgress | None = None, timeout: float | None = None) -> Verdict:
        """Grade the attempt and return the verdict; later calls return the same. Claims an open attempt.

        Grading continues on the server if this is cancelled or times out. An attempt that cannot be graded
        for a reason that the agent may have caused has status `forfeited` and a reward of 0.0. Raises
        NoVerdictError if the infrastructure or the task failed, which is never a reward of zero, and
        AccessDeniedError if this client may not see the reward.
        """

class Slot:
    """One task of a lockstep: its episode, or its `failure` if there is none, and its `verdict`."""

    index: int
    task: str
    failure: ClientError | None
    verdict: Verdict | None

    def __repr__(self) -> str: ...
    @property
    def episode(self) -> Episode:
        """The episode. Raises the failure if there is none."""

    @property
    def is_live(self) -> bool:
        """Whether the episode can be played: neither claimed nor failed."""

class Lockstep:
    """The slots of a lockstep, in the order of the tasks; made by `Decathlon.lockstep`."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Slot]: ...
    def __getitem__(self, index: int) -> Slot: ...
    @property
    def live(self) -> list[Slot]:
        """The slots that can still be played."""

    def call(
        self, calls: Mapping[Slot, Sequence[Call]], *, timeout: float | None = None
    ) -> dict[Slot, list[Reply]]:
        """Play one turn: each slot's calls in order, the slots in parallel. Waits for the last one.

        Returns a reply for every call, as `Episode.act` does: failures of tools and mistakes of the model are
        replies too. If an episode cannot go on there are fewer replies, and the slot's `failure` says why.
        `timeout` applies to each call, in seconds.
        """

    def evaluate(self) -> list[Verdict | None]:
        """Grade all attempts in parallel; later calls return the same. Claims open attempts.

        Returns the verdicts in the order of the tasks; None if there is none, and the slot's `failure` says
        why.
        """

class Batch:
    """A batch of episodes; made by `Decathlon.batch`."""

    @property
    def tally(self) -> Tally:
        """The current progress."""

    @property
    def summary(self) -> Summary:
        """Mean, spread and pass@k of each task, over the episodes that have ended until now."""

    @property
    def run_name(self) -> str:
        """The label `run` of the batch's episodes."""

    def run(self, player: Player[T]) -> Generator[Result[T]]:
        """Play the tasks and yield the results as they are ready. May be called once, or `run_groups`.

        To stop early, leave the loop, then the batch's `async with`. A failed episode is a result with a
        `failure`. An error of the iterable of tasks is raised after the results of drawn tasks; so is
        ConnectionLostError if the server stayed away for `patience_seconds`: the other tasks are not drawn.
        Raises RuntimeError if it was called before.
        """

    def run_groups(self, player: Player[T]) -> Generator[list[Result[T]]]:
        """Play the tasks and yield the `n` results of each task together, as soon as its last one is ready.

        Otherwise as `run`. A group is in the order of its attempts; groups come as they are ready. A group
        that is not complete, because an error ended the batch, is not yielded.
        """

class Decathlon:
    """A connection to a decathlon-mcp server: `async with Decathlon("http://127.0.0.1:8765") as d:`.

    `url` is the root of a server or of a cluster, or its lobby (`.../mcp`). Without it, the environment
    variable `DECATHLON_URL` is read; without both it is http://127.0.0.1:8765. `token` is one of its tokens,
    if it requires one; without it, `DECATHLON_TOKEN` is read. An empty token is none. Raises ValueError if
    either cannot be right.

    Enter and leave it in the same task; in between, any task may use it and its episodes.

    A request whose connection is lost is sent again until the server answers, for up to `resend_seconds` (0:
    never), and is carried out once; so is a call whose sandbox the server does not reach. Only entering fails
    at once if there is no server.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, resend_seconds: float = RESEND_SECONDS
    ) -> None: ...
    @classmethod
    def embedded(
        cls,
        suite: str | PathLike[str] | Sequence[str | PathLike[str]] = "starter",
        provider: str | None = None,
        task: str | None = None,
        **settings: Any,
    ) -> Self:
        """Run the server in this process, without a port. Requires `decathlon-mcp[server]`, and for the
        bundled tasks `decathlon-mcp[starter]` too; ClientError on entering names what is missing.

        `task` is the task of `episode()` without arguments. `settings` are the server's settings by name
        (`state=...`, `max_sandboxes=...`). Errors in them are raised on entering.
        """

    @classmethod
    def at_endpoint(cls, server: ServerEndpoint, task: str | None = None) -> Self:
        """A connection to a server that lives as long as this connection; `task` as for `embedded`."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def tasks(
        self, split: str | None = None, *, prompts: bool = True, **filters: Unpack[Filters]
    ) -> list[Task]:
        """List the server's tasks, with their prompts. Opens no sandbox.

        Raises RequestError for a split or a need that no task has; the message names the valid values.
        """

    def tools(self, task: str | Task) -> tuple[Tool, ...]:
        """The tools that an episode of the task shows to a model: its own and `claim_done`.

        They come from the lists that the server has cached. For a task of which it has none, an episode is
        opened, listed and closed, once for each set of servers. This connection remembers the answers.
        Raises UnknownTaskError, NotRunnableError, SetUpError.
        """

    def sample(
        self,
        count: int = 1,
        split: str | None = None,
        *,
        seed: int | None = None,
        prompts: bool = True,
        **filters: Unpack[Filters],
    ) -> list[Task]:
        """Draw `count` runnable tasks, all different as long as there are enough.

        The same seed gives the same tasks; without a seed every draw is new. With an `order`, the seed is the
        page number (pages of `count` tasks, from 0), and without a seed each draw continues after the last
        one. Raises RequestError if no task matches.
        """

    def episode(
        self,
        task: str | Task | None = None,
        *,
        split: str | None = None,
        seed: int | None = None,
        launch_time: datetime | str | None = None,
        max_calls: int | None = None,
        policy: Policy | None = None,
        tries: int = 1,
        patience_seconds: float = 0.0,
        labels: Mapping[str, str] | None = None,
        outside: bool = False,
        snapshots: int | None = None,
        on_progress: OnProgress | None = None,
        **filters: Unpack[Filters],
    ) -> AbstractContextManager[Episode]:
        """Open an episode of a task, or of a task drawn as by `sample`. Waits until it is ready.

        `policy` may restrict who sees the reward further than the server does. `tries`: how often opening is
        tried before its failure counts. `patience_seconds`: how long a full server is asked again, at the
        intervals that it names, and how long an absent server is waited for. `labels`: names and short texts
        by which the episode is found later, such as `run` and `step`. `outside`: with the label `replay_of`,
        also a task that reaches what episodes share. `snapshots`: the episode's state is saved after every so
        many calls, for `branch`. `on_progress` is called while waiting. On exit the episode is closed and its
        sandbox removed; a claimed attempt is still graded. Raises UnknownTaskError, NotRunnableError,
        AtCapacityError, SetUpError.
        """

    @overload
    def branch(
        self,
        episode: Episode | str,
        *,
        at: int,
        count: None = None,
        on_difference: OnDifference = "refuse",
        outside: bool = False,
        snapshots: int | None = None,
        tries: int = 1,
        patience_seconds: float = 0.0,
        labels: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> AbstractContextManager[Episode]: ...
    @overload
    def branch(
        self,
        episode: Episode | str,
        *,
        at: int,
        count: int,
        on_difference: OnDifference = "refuse",
        outside: bool = False,
        snapshots: int | None = None,
        tries: int = 1,
        patience_seconds: float = 0.0,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractContextManager[Lockstep]: ...
    def snapshot(self, episode: Episode | str) -> int:
        """Save an episode's state with all its processes; returns the number of its last call.

        `branch` copies it for that `at`. A call that runs may end before, and later calls wait. Raises
        NotRunnableError where sandboxes cannot be saved, and RequestError for an attempt that is closed.
        """

    def rewards_along(
        self, episode: Episode | str, *, concurrency: int = 8, outside: bool = False
    ) -> list[Verdict | None]:
        """The verdicts that a finished attempt would have had, had it ended after each of its calls.

        The first is for no call at all, the last for all of them. Each is of a branch, which is graded as it
        stands, without an answer; `concurrency` of them play at a time, and none counts in the numbers of a
        run. None stands for a call after which there can be no branch, whose repetition had another reply,
        or whose branch was lost. `outside` is as for `branch`. Raises AccessDeniedError, UnknownEpisodeError,
        and ValueError for a `concurrency` below 1.
        """

    def lockstep(
        self, tasks: Iterable[str | Task], **options: Unpack[OpeningOptions]
    ) -> AbstractContextManager[Lockstep]:
        """Open an episode of each task at once, for trainers that generate for all of them together.

        Waits until each is ready or has failed; a failure is its slot's (`slot.failure`). On exit all are
        closed. The server must have room for all of them.
        """

    def batch(
        self,
        tasks: Iterable[str | Task],
        *,
        concurrency: int,
        n: int = 1,
        run: str | None = None,
        progress: bool = True,
        player_seconds: float | None = None,
        group_seconds: float | None = None,
        late: Late = "truncate",
        resume: str | PathLike[str] | VerdictRecord | None = None,
        **options: Unpack[OpeningOptions],
    ) -> AbstractContextManager[Batch]:
        """Play `concurrency` episodes at a time until all tasks, which are drawn as needed, are played.

        Each task is played `n` times; these episodes are a group, with the same launch time and thus the same
        prompt: the time of the `Task`, if it has one, or else now. The episodes are labelled with the name of
        the `run` (by default the date, the time and four letters; printed once), their `group` and `attempt`.
        `progress`: show a bar on stderr (on a terminal, with `rich`), or else a line now and then. An attempt
        whose player takes longer than `player_seconds` is truncated: see `Episode.truncate`. `group_seconds`
        after the first attempt of a group began, its attempts in play are truncated too; attempts that are
        still opening or have not begun are dropped: their results have a TimeoutError and the fault
        `deadline`. With `late="drop"` every attempt without a verdict is dropped. The time in which the
        caller does not wait for a result does not count. Leaving early closes the open episodes, after an
        interrupt within 5 s.

        `resume` names a file to which each verdict is appended. A batch that is started again with it plays
        only what has no verdict there, and yields the others first, with `resumed` and without `played`.
        Entering raises ValueError if the file is not one of these, or another batch uses it; so does a task
        whose verdicts in it are of another revision of the suite, once the results that there are were taken.
        """

    def call_lobby(
        self, tool: str, arguments: JsonObject | None = None, *, on_progress: OnProgress | None = None
    ) -> Reply:
        """Call one of the lobby's tools and return its reply, for episodes that outlive this connection.

        Raises ClientError if the server refuses the request; a tool that fails returns a reply with
        `is_error`.
        """

    def attach(self, episode: str) -> AbstractContextManager[Episode]:
        """Connect to an existing episode by its handle or address. It stays open on exit.

        At its agent's address it can be played, but neither evaluated nor truncated. Raises
        UnknownEpisodeError, EpisodeEndedError.
        """
