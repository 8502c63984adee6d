"""Made from the asynchronous classes by `python -m tests.clients.stubs`; not to be edited."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, Unpack

from decathlon_client.batch import Result
from decathlon_client.errors import ClientError
from decathlon_client.filters import Filters
from decathlon_client.lockstep import Call
from decathlon_client.opener import OpeningOptions
from decathlon_client.tally import Tally
from decathlon_client.values import JsonObject, Policy, Reply, Task, Tool, Verdict

T = TypeVar("T")
OnProgress: TypeAlias = Callable[[float, float | None, str | None], None]
Player: TypeAlias = Callable[[Episode], T]

class Episode:
    """Made by `Decathlon.episode` and `Decathlon.attach`; ready to be played.

    `id` is its handle and a secret: whoever knows it can play. `address` is where it can be reached from
    elsewhere (of a server in this process, the handle again), `agent_address` where it can be played and no
    more, to be handed to whoever plays (None where it was attached to). `prompt` is what to tell the model,
    `tools` what to show it: the task's own and `claim_done`. `evaluate` is not among them: it is for whoever
    trains or measures, and would be an oracle in the model's hands. `claimed`: the attempt is closed to
    tools, as far as was heard here.
    """

    id: str
    task: str
    prompt: str
    address: str
    agent_address: str | None
    tools: tuple[Tool, ...]
    claimed: bool

    def __repr__(self) -> str: ...
    def call(
        self,
        name: str,
        arguments: JsonObject | None = None,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Call a tool. A tool that fails gives a reply with `is_error`.

        `timeout` in seconds; without one it waits as long as the tool takes. Raises UnknownToolError,
        RequestError, CallTimeoutError, EpisodeEndedError, SandboxLostError, ConnectionLostError.
        """

    def act(
        self,
        name: str,
        arguments: JsonObject | str | None = None,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """As `call`, for a model: where the call was a mistake, a reply with `is_error` tells it so.

        Mistakes are a tool that is not there, arguments refused, a call past its `timeout`. `arguments` may
        be the JSON text that a model wrote. There is no `evaluate` here. Raises EpisodeEndedError,
        SandboxLostError, ConnectionLostError: what no model is to blame for.
        """

    def claim_done(self, answer: str | None = None) -> Reply:
        """Close the attempt: no tool works any more, and the server starts to grade it.

        `answer`: the agent's last words, which some tasks are graded by.
        """

    def truncate(self, answer: str | None = None, *, turns: int | None = None) -> Reply:
        """Close the attempt because the patience of whoever runs it is at an end: the agent claims nothing.

        What was done is graded, and the verdict's `truncated` is true. `turns`: how many the agent took, for
        a rubric that weighs them. Raises AccessDeniedError where another is this episode's controller.
        """

    def evaluate(self, *, on_progress: OnProgress | None = None, timeout: float | None = None) -> Verdict:
        """The verdict; graded once, later calls return the same. Closes the attempt where nobody has.

        Grading goes on when this is cancelled or times out. Raises NoVerdictError where there is none, which
        is never a reward of zero.
        """

class Slot:
    """The place of one task: its episode, or its `failure` where there is none, and its `verdict`."""

    index: int
    task: str
    failure: ClientError | None
    verdict: Verdict | None

    def __repr__(self) -> str: ...
    @property
    def episode(self) -> Episode:
        """Raises the failure where there is none."""

    @property
    def is_live(self) -> bool:
        """Can it still be played: neither claimed nor failed."""

class Lockstep:
    """The slots, in the tasks' order. Made by `Decathlon.episodes`."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Slot]: ...
    def __getitem__(self, index: int) -> Slot: ...
    @property
    def live(self) -> list[Slot]:
        """Those that can still be played."""

    def call(
        self, calls: Mapping[Slot, Sequence[Call]], *, timeout: float | None = None
    ) -> dict[Slot, list[Reply]]:
        """A turn: each slot's calls in their order, the slots side by side; waits for the last of them.

        A reply for every call, as `Episode.act` gives it: a tool that failed, and a call that was a mistake,
        are replies too. Where an episode could not go on there are fewer, and the slot's `failure` says why.
        `timeout` is each call's, in seconds.
        """

    def evaluate(self) -> list[Verdict | None]:
        """The verdicts, in the tasks' order; None where there is none, and the slot's `failure` says why.

        Closes the attempts that nobody has. Graded once: later calls return the same.
        """

class Batch:
    """Made by `Decathlon.batch`. `tally` says how far it is, at any time."""

    tally: Tally

    def run(self, player: Player[T]) -> Generator[Result[T]]:
        """The results, as they come. To stop early, leave the loop, then the batch's `async with`.

        A failure is its own result's. Raises what drawing a task raises. Once for each batch.
        """

class Decathlon:
    """A connection to a decathlon-mcp server: `async with Decathlon("http://127.0.0.1:8765") as d:`.

    `url` is the server's root or its lobby (`.../mcp`), `token` one of its tokens, if it wants any. Entered
    and left in one task; what is in between, episodes too, can be used from any.
    """

    def __init__(self, url: str, token: str | None = None) -> None: ...
    @classmethod
    def embedded(
        cls,
        suite: str | PathLike[str] | Sequence[str | PathLike[str]] = "starter",
        provider: str | None = None,
        task: str | None = None,
        **settings: Any,
    ) -> Self:
        """The same with the server in this process, without a port; needs `decathlon-mcp[server]`.

        `task` is what `episode()` plays when it is not told. `settings` are the server's, by name
        (`state=...`, `max_sandboxes=...`). Raises on entering what the server says of them.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def tasks(
        self, split: str | None = None, *, prompts: bool = True, **filters: Unpack[Filters]
    ) -> list[Task]:
        """The tasks there are, with their prompts; no sandbox is opened for them.

        Raises RequestError, naming what there is, for a split or a need that no task has.
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
        """So many of the tasks that can run, all different as long as there are enough.

        The same for the same seed; without one a new draw each time. With an `order`, the seed is the number
        of the page of `count` tasks, from 0, and without one each draw goes on where the last has stopped.
        Raises RequestError where there is nothing to draw from.
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
        on_progress: OnProgress | None = None,
        **filters: Unpack[Filters],
    ) -> AbstractContextManager[Episode]:
        """An episode of the task, or of one drawn, as `sample` draws it.

        `policy`: who sees the reward, if it is to be fewer than the server says. Waits until it is ready;
        `on_progress` hears of the waiting. On exit it is closed: its sandbox goes; an attempt that was
        claimed is graded all the same. Raises UnknownTaskError, NotRunnableError, AtCapacityError,
        SetUpError.
        """

    def opened(self, task: str | Task, **options: Unpack[OpeningOptions]) -> AbstractContextManager[Episode]:
        """An episode opened as those of a batch are: with patience, and more than one try."""

    def episodes(
        self, tasks: Iterable[str | Task], **options: Unpack[OpeningOptions]
    ) -> AbstractContextManager[Lockstep]:
        """An episode of each of these tasks, all at once and held together, for whoever generates for all.

        Waits until each is ready or has failed; a failure is its own slot's (`slot.failure`). On exit all are
        closed. The server must have room for all of them.
        """

    def batch(
        self,
        tasks: Iterable[str | Task],
        *,
        concurrency: int,
        progress: bool = True,
        player_seconds: float | None = None,
        **options: Unpack[OpeningOptions],
    ) -> AbstractContextManager[Batch]:
        """So many episodes at a time until the tasks, which are drawn as they are needed, are played.

        `progress`: a bar on stderr (with `rich`, on a terminal), or else a line now and then. An attempt
        whose player takes longer than `player_seconds` is truncated, and graded as it is. Left early or
        interrupted, it closes what is open, when interrupted within 5 s.
        """

    def ask(
        self, tool: str, arguments: JsonObject | None = None, *, on_progress: OnProgress | None = None
    ) -> Reply:
        """One of the lobby's own tools, its reply as it came: for episodes that outlive this connection.

        Raises ClientError where the server refuses; a reply with `is_error` is the tool's own.
        """

    def attach(self, episode: str) -> AbstractContextManager[Episode]:
        """An episode that is there already, by its handle or address; it goes on when this is left.

        By its agent's address it can be played, and neither evaluated nor truncated. Raises
        UnknownEpisodeError, EpisodeEndedError.
        """
