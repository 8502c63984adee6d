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
from typing import Self

import anyio

from decathlon_mcp.driver_client.rpc import NotificationHandler
from decathlon_mcp.episodes.access import Principal, may_evaluate
from decathlon_mcp.episodes.admission import Ticket
from decathlon_mcp.episodes.lease import Lease
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.state import Ending, Phase, State
from decathlon_mcp.episodes.tools import Calls, Route, ToolRouter
from decathlon_mcp.errors import DecathlonError, EpisodeClaimedError, EpisodeEndedError
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.suites.prompts import Prompt
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject, as_object


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
class ToolSession:
    """What there is once an episode is ready. `offered` is what each of the task's servers listed."""

    calls: Calls
    toolbox: ToolRouter
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
        owner: Principal,
        ticket: Ticket,
        sandbox_factory: SandboxFactory,
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
        self.sandbox_factory = sandbox_factory
        self.journal = journal
        self.lease = lease
        self.launch_time = launch_time
        self.policy: RewardPolicy = policy
        self.started_at = time.time()
        self.state = State()
        self.ready_at: datetime | None = None
        self.image_digest: str | None = None
        self.tool_session: ToolSession | None = None
        self.claim: Claim | None = None
        self.claimed = anyio.Event()
        self.verdict: Verdict | None = None
        self.left: Ending | None = None
        self.calls = 0
        self._max_calls = max_calls

    @cached_property
    def prompt(self) -> Prompt:
        """What the agent is told. It needs no sandbox. Raises SuiteError, when it is first asked for."""
        return self.sandbox_factory.suite.prompt(
            self.task,
            root=self.sandbox_factory.root(f"{self.label}-agent"),
            launch_time=self.launch_time,
            names=self.sandbox_factory.names,
        )

    @property
    def waits_for(self) -> str | None:
        """What it waits for before its sandbox is opened, for people; None where it does not."""
        return self.ticket.waits_for

    def hold(self) -> AbstractContextManager[None]:
        """Keep the episode from expiring while a request is answered or a stream is open."""
        return self.lease.hold()

    async def ready(self) -> ToolRouter:
        """Wait until there are tools; they stay listed after the claim.

        Raises the cause of a set-up that failed, or EpisodeEndedError.
        """
        await self.state.reach(Phase.READY, Phase.CLAIMED, Phase.SCORED, Phase.ENDED)
        if self.tool_session is None:
            raise self._over()
        return self.tool_session.toolbox

    async def call(
        self,
        name: str,
        arguments: JsonObject | None,
        *,
        meta: JsonObject | None = None,
        on_progress: NotificationHandler | None = None,
        on_message: NotificationHandler | None = None,
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
        if self.tool_session is None or self.state.phase is not Phase.READY:
            raise EpisodeClaimedError("this attempt was claimed and is closed: no tool works any more")
        if self._max_calls is not None and self.calls >= self._max_calls:
            self.close_attempt(Claim(by_agent=False, truncated=True))
            raise EpisodeClaimedError(
                f"the limit of {self._max_calls} tool calls is reached: this attempt is closed and will be "
                "graded as it is",
                truncated=True,
            )
        return self.tool_session.calls

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


@dataclass(frozen=True, slots=True)
class EpisodeAccess:
    """One client's place. `id`: by which of the two it knows the episode. `judges`: may it evaluate?"""

    episode: Episode
    id: str
    can_evaluate: bool

    @classmethod
    def by_handle(cls, episode: Episode, principal: Principal) -> Self:
        """Of who knows the handle; on a server with tokens, its role must allow it too."""
        return cls(episode, episode.id, may_evaluate(episode.policy, principal))

    @classmethod
    def by_session(cls, episode: Episode, principal: Principal) -> Self:
        """Of a session, or a pipe, that is the episode: an agent's, unless its token says otherwise."""
        can_evaluate = episode.policy != "controller" or principal.controls
        return cls(episode, episode.id if can_evaluate else episode.agent_id, can_evaluate)

    @classmethod
    def by_agent_id(cls, episode: Episode) -> Self:
        """Of who knows the agent's id and no more."""
        return cls(episode, episode.agent_id, can_evaluate=False)
