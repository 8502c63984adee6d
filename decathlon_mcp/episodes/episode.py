"""One attempt at one task by one client: what requests borrow. `life.py` owns it and what it stands on.

Nothing that a request needs lives in a local variable of the owner, and nothing of an episode in one of a
request: it can be reached from any connection, or from none.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property

import anyio

from decathlon_mcp.episodes.admission import Ticket
from decathlon_mcp.episodes.caller import Caller
from decathlon_mcp.episodes.calls import Calls
from decathlon_mcp.episodes.lease import Lease
from decathlon_mcp.episodes.stage import Stage
from decathlon_mcp.episodes.state import State
from decathlon_mcp.episodes.toolbox import Route, Toolbox
from decathlon_mcp.errors import DecathlonError, EpisodeClaimedError, EpisodeEndedError
from decathlon_mcp.link import Note
from decathlon_mcp.model import Ending, JsonObject, Phase, as_object
from decathlon_mcp.observe import Journal
from decathlon_mcp.rewards import Verdict
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.suites import Prompt, Task


@dataclass(frozen=True, slots=True)
class Claim:
    """How an attempt was closed to tools: by its agent, or by others (a limit, `evaluate` unclaimed).

    `turns`: how many the agent took, where its client says so.
    """

    by_agent: bool
    answer: str | None = None
    truncated: bool = False
    turns: int | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True)
class Playground:
    """What there is once an episode is ready. `offered` is what each of the task's servers listed."""

    calls: Calls
    toolbox: Toolbox
    offered: Mapping[str, Sequence[JsonObject]]


class Episode:
    """`id` is a capability (192 bits), and `agent_id` another (`seat.py`); `label`, the first quarter of the
    former, is fit for logs and containers' names."""

    def __init__(
        self,
        *,
        episode_id: str,
        agent_id: str,
        task: Task,
        task_name: str,
        owner: Caller,
        ticket: Ticket,
        stage: Stage,
        journal: Journal,
        lease: Lease,
        launch_time: datetime,
        policy: RewardPolicy,
        max_calls: int | None,
    ) -> None:
        self.id = episode_id
        self.agent_id = agent_id
        self.label = episode_id[:12]
        self.task = task
        self.task_name = task_name
        self.owner = owner
        self.ticket = ticket
        self.stage = stage
        self.journal = journal
        self.lease = lease
        self.launch_time = launch_time
        self.policy: RewardPolicy = policy
        self.started_at = time.time()
        self.state = State()
        self.ready_at: datetime | None = None
        self.image_digest: str | None = None
        self.playground: Playground | None = None
        self.claim: Claim | None = None
        self.claimed = anyio.Event()
        self.verdict: Verdict | None = None
        self.left: Ending | None = None
        self.calls = 0
        self._max_calls = max_calls

    @cached_property
    def prompt(self) -> Prompt:
        """What the agent is told. It needs no sandbox. Raises SuiteError, when it is first asked for."""
        return self.stage.suite.prompt(
            self.task,
            root=self.stage.root(f"{self.label}-agent"),
            launch_time=self.launch_time,
            names=self.stage.names,
        )

    @property
    def waits_for(self) -> str | None:
        """What it waits for before its sandbox is opened, for people; None where it does not."""
        return self.ticket.waits_for

    def hold(self) -> AbstractContextManager[None]:
        """Keep the episode from expiring while a request is answered or a stream is open."""
        return self.lease.hold()

    async def ready(self) -> Toolbox:
        """Wait until there are tools; they stay listed after the claim.

        Raises the cause of a set-up that failed, or EpisodeEndedError.
        """
        await self.state.reach(Phase.READY, Phase.CLAIMED, Phase.SCORED, Phase.ENDED)
        if self.playground is None:
            raise self._over()
        return self.playground.toolbox

    async def call(
        self,
        name: str,
        arguments: JsonObject | None,
        *,
        meta: JsonObject | None = None,
        on_progress: Note | None = None,
        on_message: Note | None = None,
    ) -> JsonObject:
        """Relay a call to the task's server; its whole reply, `result` or `error`, as the agent gets it.

        Raises UnknownToolError, EpisodeClaimedError, EpisodeEndedError, CallTimeoutError, SandboxLostError.
        """
        toolbox = await self.ready()
        route = toolbox.route(name)
        calls = self._calls_while_open()
        self.calls += 1
        params: JsonObject = {"name": route.tool}
        if arguments is not None:
            params["arguments"] = arguments
        if meta:
            params["_meta"] = meta
        with self._recorded(route, name, arguments) as outcome:
            try:
                reply = await calls.call(route, params, on_progress=on_progress, on_message=on_message)
            except DecathlonError as error:
                outcome["result"] = {"error": error.message}
                raise await self._explained(error) from None
            result = as_object(reply.get("result"))
            outcome["failed"] = result is None or bool(result.get("isError"))
            outcome["result"] = {"error": reply.get("error")} if result is None else result
        return reply

    async def claim_done(
        self, answer: str | None, *, truncated: bool = False, turns: int | None = None
    ) -> bool:
        """Close the attempt; grading starts behind it. False where it was closed already.

        `truncated`: it is not the agent that is done, but its client whose patience is at an end. Raises the
        cause of a set-up that failed, or EpisodeEndedError.
        """
        await self.ready()
        if self.state.phase is Phase.ENDED and self.claim is None:
            raise self._over()
        return self.close_attempt(Claim(not truncated, answer, truncated, turns))

    async def evaluate(self) -> Verdict:
        """Grade the attempt, once; later calls return the same verdict. Claims first where nobody has.

        Being cancelled never stops the grading.
        """
        await self.state.reach(Phase.READY, Phase.CLAIMED, Phase.SCORED, Phase.ENDED)
        self.close_attempt(Claim(by_agent=False))
        await self.state.reach(Phase.SCORED, Phase.ENDED)
        if self.verdict is None:
            raise self._over()
        return self.verdict

    def close_attempt(self, claim: Claim) -> bool:
        """No tool works any more. False where the attempt is not open."""
        if self.state.phase is not Phase.READY or self.lease.ended:
            return False
        self.claim = claim
        self.lease.suspend()
        self.state.move(Phase.CLAIMED)
        self.claimed.set()
        self.journal.add(
            "claim",
            by_agent=claim.by_agent,
            answer=claim.answer,
            truncated=claim.truncated,
            turns=claim.turns,
        )
        return True

    def close(self, ending: Ending = Ending.CLOSED) -> None:
        """Let go of the episode: it ends now or, where it was claimed, once it is graded."""
        self.left = self.left or ending
        if self.state.phase is not Phase.CLAIMED:
            self.lease.end()

    def _calls_while_open(self) -> Calls:
        if self.state.phase is Phase.ENDED:
            raise self._over()
        if self.playground is None or self.state.phase is not Phase.READY:
            raise EpisodeClaimedError("this attempt was claimed and is closed: no tool works any more")
        if self._max_calls is not None and self.calls >= self._max_calls:
            self.close_attempt(Claim(by_agent=False, truncated=True))
            raise EpisodeClaimedError(
                f"the limit of {self._max_calls} tool calls is reached: this attempt is closed and will be "
                "graded as it is",
                truncated=True,
            )
        return self.playground.calls

    @contextmanager
    def _recorded(self, route: Route, name: str, arguments: JsonObject | None) -> Generator[JsonObject]:
        """Write the call to the journal with what comes of it, whatever that is."""
        seq, started = self.calls, time.time()
        outcome: JsonObject = {"failed": True, "result": {"error": "cancelled"}}
        try:
            yield outcome
        finally:
            self.journal.add(
                "call",
                seq=seq,
                server=route.server,
                tool=route.tool,
                name=name,
                arguments=arguments or {},
                started_at=started,
                seconds=round(time.time() - started, 6),
                **outcome,
            )

    async def _explained(self, error: DecathlonError) -> DecathlonError:
        """A call that failed because the attempt was closed under it, or the sandbox lost, says that."""
        if error.code == "sandbox_lost":
            with anyio.move_on_after(5):
                await self.state.reach(Phase.CLAIMED, Phase.SCORED, Phase.ENDED)
        if self.state.phase in (Phase.CLAIMED, Phase.SCORED):
            return EpisodeClaimedError("this attempt was closed while the call ran")
        return self._over() if self.state.phase is Phase.ENDED else error

    def _over(self) -> DecathlonError:
        if self.state.cause is not None:
            return self.state.cause
        return EpisodeEndedError(f"this episode is over: {self.state.ending}", reason=str(self.state.ending))
