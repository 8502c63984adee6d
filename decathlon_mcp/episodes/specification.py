"""The specification of an episode from its start: owner, task, limits; and how its attempt was closed.

An episode has two ids, and each is a capability. The handle is for the client that started the episode. The
agent id leads to an address that can be given to an agent: it can play, but cannot evaluate or see the
verdict, whatever the policy, and needs no token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, get_args

from decathlon_mcp.errors import AccessDeniedError
from decathlon_mcp.grading.attempt import TruncationCause
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject, public_id

Role = Literal["player", "controller", "admin"]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Instant:
    """A time on this machine by a clock that is never set, also for the next server.

    `seconds`: since the machine's start, sleep included. `boot`: which start that was.
    """

    boot: str
    seconds: float

    @classmethod
    def now(cls) -> Instant:
        return cls(_boot(), time.clock_gettime(time.CLOCK_BOOTTIME))

    def until(self, later: Instant) -> float | None:
        """Seconds from this to the later one; None if the machine was started again in between."""
        return later.seconds - self.seconds if self.boot and self.boot == later.boot else None


@cache
def _boot() -> str:
    try:
        return BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request.

    `token` is the name of the token that was presented, None on a server without tokens. `session` is the id
    of the MCP session, if there is one. `alone`: the server has one token or none, so no other client can use
    it.
    """

    token: str | None = None
    role: Role = "player"
    session: str | None = None
    alone: bool = True

    @property
    def share_key(self) -> str | None:
        """The token whose share of the server's capacity a request uses; None if no other token shares it."""
        return None if self.alone else self.token

    @property
    def controls(self) -> bool:
        """Whether the token belongs to a controller or an administrator."""
        return self.role != "player"

    def in_session(self, session: str | None) -> Principal:
        """The same principal in this MCP session."""
        # `replace` takes twice as long, and every request needs this.
        return Principal(self.token, self.role, session, self.alone)

    def may_use(self, owner: Principal) -> bool:
        """Whether this principal may use an episode of `owner` when it knows the episode's id."""
        return owner.token is None or self.role == "admin" or self.token == owner.token

    def owns(self, owner: Principal) -> bool:
        """Whether an episode of `owner` appears in this principal's list of episodes."""
        if self.role == "admin":
            return True
        if owner.token is not None or self.token is not None:
            return owner.token == self.token
        # Without tokens only the MCP session distinguishes clients.
        return self.session is not None and self.session == owner.session

    def may_evaluate(self, policy: RewardPolicy) -> bool:
        """Whether this principal may evaluate an episode whose handle it knows."""
        return policy != "controller" or self.token is None or self.controls

    def choose_policy(self, requested: RewardPolicy | None, default: RewardPolicy) -> RewardPolicy:
        """The reward policy of a new episode.

        Raises AccessDeniedError if the requested policy reveals more than the server's default and this
        principal is not a controller.
        """
        order = get_args(RewardPolicy)
        if requested and not self.controls and order.index(requested) < order.index(default):
            raise AccessDeniedError(
                f"this server's policy of the reward is {default!r}: only a controller's token may start an "
                f"episode with one more open, such as {requested!r}"
            )
        return requested or default


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The server's defaults or, after `for_task`, the limits of one episode."""

    idle_seconds: float
    """Time without a request after which the episode ends."""
    first_use_seconds: float
    """Time from READY to the first request."""
    grace_seconds: float
    """Time that a client whose connection broke has to come back."""
    episode_seconds: float
    """Longest time from admission to the claim."""
    servers_seconds: float
    """Deadline for each of the task's servers to start."""
    set_up_seconds: float
    """Deadline for the whole set-up."""
    evaluation_seconds: float
    """Deadline for the task's evaluator."""
    workspace_bytes: int
    """Largest workspace that is graded."""
    max_calls: int | None = None
    """Maximum number of tool calls; None: no limit."""
    # Upstream's preprocess scripts take seconds; a suite.yaml can say more.
    preprocess_seconds: float = 600
    """Deadline for the preprocess script, within `set_up_seconds`."""

    def for_task(self, task: Task, max_calls: int | None = None) -> Self:
        """These limits with the task's own deadlines; `max_calls` replaces the default if given."""
        deadlines = task.deadlines.model_dump(exclude_none=True)
        return replace(self, max_calls=max_calls or self.max_calls, **deadlines)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """What is fixed when an episode starts."""

    id: str
    """The handle, a capability of 192 bits."""
    agent_id: str
    """The agent's id, a capability of 192 bits that allows playing only."""
    task: Task
    task_name: str
    """The task's id as clients spell it."""
    owner: Principal
    """The sender of the request that started the episode."""
    launch_time: datetime
    """The current time as the task sees it."""
    policy: RewardPolicy
    limits: EpisodeLimits
    """The limits of this episode: the server's with the task's own deadlines."""
    operation: str | None = None
    """Id of the request that started the episode; a repeated request finds the episode by this id."""
    ends_with_response: bool = False
    """Whether the episode ends with the response to the request that started it."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """The client's labels of the episode, names to short texts; only reports read them."""
    calls_before: int = 0
    """Calls that a plug-in makes before the episode is ready; the agent's have higher numbers."""
    shares_launch_time: bool = False
    """Whether the client chose the launch time, so that other episodes may have the same."""
    plugins: Mapping[str, JsonObject] = field(default_factory=dict[str, JsonObject])
    """What each plug-in was asked for, by the plug-in's name. Only the episode's row stores the values."""
    reported: JsonObject = field(default_factory=dict[str, Any])
    """What a plug-in reports of the episode from its start on: members of the head of its trajectory, its
    status and its verdict. The last two have what the plug-in notes later in their place."""

    @property
    def public_id(self) -> str:
        """The episode's name in verdicts, logs and the names of containers; the public id gives no access."""
        return public_id(self.id)


@dataclass(frozen=True, slots=True)
class Claim:
    """How an attempt was closed: by its agent, by a limit, or by `evaluate`."""

    by_agent: bool
    """Whether the agent called `claim_done`."""
    answer: str | None = None
    """The agent's answer, if the claim has one."""
    truncated_by: TruncationCause | None = None
    """What cut the attempt short."""
    turns: int | None = None
    """The agent's turns, if a controller reports them."""
    operation: str | None = None
    """Id of the request that closed the attempt; a client that comes back is known by this id."""
    calls: int = 0
    """Number of calls that had been sent."""
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """Time of the claim, by the machine's clock, which may be set."""
    instant: Instant = field(default_factory=Instant.now)
    """Time of the claim, by a clock that is never set."""
