"""What is fixed when an episode starts: whose it is, its task and its limits; and how its attempt was closed.

An episode has two ids, and each is a capability. The handle is for the client that started the episode. The
agent id leads to an address that can be given to an agent: it can play, but cannot evaluate or see the
verdict, whatever the policy, and needs no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal, Self

from decathlon_mcp.episodes.clock import Instant
from decathlon_mcp.grading.attempt import TruncationCause
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject, public_id

Role = Literal["player", "controller", "admin"]


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request.

    `token` is the name of the token that was presented, None on a server without tokens. `session` is the id
    of the MCP session, if there is one. `alone`: nobody else can use the server, as it has one token or none.
    """

    token: str | None = None
    role: Role = "player"
    session: str | None = None
    alone: bool = True

    @property
    def share_key(self) -> str | None:
        """Whose share of the server's capacity a request uses; None if there is nobody to share with."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The server's defaults or, after `for_task`, the limits of one episode.

    `idle_seconds`: time without a request after which the episode ends. `first_use_seconds`: time from READY
    to the first request. `grace_seconds`: time that a client whose connection broke has to come back.
    `episode_seconds`: longest time from admission to the claim. `servers_seconds`: for the task's servers to
    start. `set_up_seconds`: for the whole set-up, `preprocess_seconds` within it. `max_calls` None: no limit.
    """

    idle_seconds: float
    first_use_seconds: float
    grace_seconds: float
    episode_seconds: float
    servers_seconds: float
    set_up_seconds: float
    evaluation_seconds: float
    workspace_bytes: int
    max_calls: int | None = None
    # Upstream's preprocess scripts take seconds; a suite.yaml can say more.
    preprocess_seconds: float = 600

    def for_task(self, task: Task, max_calls: int | None = None) -> Self:
        """These limits with the task's own deadlines; `max_calls` replaces the default if given."""
        deadlines = task.deadlines.model_dump(exclude_none=True)
        return replace(self, max_calls=max_calls or self.max_calls, **deadlines)


@dataclass(frozen=True, slots=True)
class Branch:
    """Where an episode branches from another: it starts as that one stood after call `at`.

    `episode`: the other's public id. Calls until then are the other's, under their numbers.
    """

    episode: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """What is fixed when an episode starts.

    `id` (the handle) and `agent_id` are capabilities of 192 bits. `task_name` is the task's id as clients
    spell it. `limits` are those of this episode. `operation`: id of the request that started it, by which a
    repeated request finds it. `ends_with_response`:
    it ends with the response to the request that started it. `labels`: what its client calls it, names to
    short texts; only reports read them. `branch`: None for an episode that is played whole.
    `shares_launch_time`: its client chose the launch time, so that other episodes may have the same.
    `plugins`: what each plug-in was asked for, by its name; the episode's row has it, and nothing else looks
    at it.
    """

    id: str
    agent_id: str
    task: Task
    task_name: str
    owner: Principal
    launch_time: datetime
    policy: RewardPolicy
    limits: EpisodeLimits
    operation: str | None = None
    ends_with_response: bool = False
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    branch: Branch | None = None
    shares_launch_time: bool = False
    plugins: Mapping[str, JsonObject] = field(default_factory=dict[str, JsonObject])

    @property
    def public_id(self) -> str:
        """What names the episode in verdicts, logs and the names of containers; it gives no access."""
        return public_id(self.id)


@dataclass(frozen=True, slots=True)
class Claim:
    """How an attempt was closed: by its agent, by a limit, or by `evaluate`.

    `truncated_by`: what cut the attempt short. `turns`: the agent's turns, if a controller reports them.
    `operation`: id of the request that closed it, by which a client that comes back is known. `calls`: how
    many had been sent. `at`, `instant`: when, by two clocks.
    """

    by_agent: bool
    answer: str | None = None
    truncated_by: TruncationCause | None = None
    turns: int | None = None
    operation: str | None = None
    calls: int = 0
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    instant: Instant = field(default_factory=Instant.now)
