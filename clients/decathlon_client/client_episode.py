"""One attempt at one task, as a client sees it."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import anyio

from decathlon_client.client_errors import (
    ERROR_KEY,
    AccessDeniedError,
    CallTimeoutError,
    ClientError,
    EpisodeEndedError,
    InvalidReplyError,
    NoVerdictError,
    ProtocolError,
    RequestError,
    SandboxLostError,
    UnknownEpisodeError,
    UnknownToolError,
    reading,
)
from decathlon_client.client_session import ReconnectingSession
from decathlon_client.client_values import (
    CLAIM,
    REWARDED,
    JsonObject,
    NoteRole,
    OnProgress,
    Reply,
    Tool,
    Verdict,
    as_object,
    as_objects,
    as_text,
)
from decathlon_client.resends import parse_arguments

CLAIM_NAMES = (CLAIM, "local-claim_done", "local_claim_done")
EVALUATE_NAME = "evaluate"
NOTE_BYTES = 60 << 10
"""Longest text of a note, as JSON: a line of the record has 64 KiB."""
EPISODE_KEY = "decathlon/episode"
READY_KEY = "decathlon/ready"
"""Key in the `_meta` of a request for the tools that waits until the episode is ready too."""
WITHHELD = (
    "this client may neither evaluate nor truncate the attempt: it is attached at the agent's address, or "
    "the policy of the reward is `controller` and the server requires a controller's token. A claimed "
    "attempt is graded all the same"
)
"""Message of AccessDeniedError."""
MISTAKES = (UnknownToolError, RequestError, CallTimeoutError)
"""Errors of a call that the model should not have made; the episode continues."""

CallLobby: TypeAlias = Callable[[str, JsonObject], Awaitable[Reply]]
"""Calls one of the lobby's tools."""


class Episode:
    """An episode that is ready to be played; made by `Decathlon.episode` and `Decathlon.attach`.

    Show `prompt` and `tools` to the model.
    """

    id: str
    """The handle, a secret: everybody who knows it can play."""
    public_id: str
    """Names it in results, verdicts and logs; gives no access."""
    page: str | None
    """Address where people watch it; None for an embedded server."""
    task: str
    labels: Mapping[str, str]
    """What it was opened with; in a batch also `run`, `group` and `attempt`. Empty after `attach`."""
    prompt: str
    address: str
    """Where other clients reach it; for an embedded server the handle again."""
    agent_address: str | None
    """Allows playing, not evaluating, for an agent that runs elsewhere; None after `attach`."""
    tools: tuple[Tool, ...]
    """The task's own and `claim_done`, without `evaluate`, by which a model could check guesses."""
    claimed: bool
    """Whether the attempt is closed to tools, as far as this client knows."""

    def __init__(
        self,
        session: ReconnectingSession,
        call_lobby: CallLobby,
        agent_address: str | None,
        server_info: JsonObject,
        tools: Iterable[Tool],
    ) -> None:
        """`server_info` is the answer to `initialize`. Raises ProtocolError if it is not an episode's."""
        details = as_object((as_object(server_info.get("_meta")) or {}).get(EPISODE_KEY)) or {}
        if not details.get("id"):
            raise ProtocolError(f"there is no episode at {session.address}")
        self.id = str(details["id"])
        self.public_id = str(details.get("public_id", ""))
        self.page = as_text(details.get("page"))
        self.task = str(details.get("task", ""))
        self.labels = {}
        self.prompt = str(server_info.get("instructions") or "")
        self.address = session.address if "://" in session.address else self.id
        self.agent_address = agent_address
        listed = tuple(tools)
        self.tools = tuple(tool for tool in listed if tool.name != EVALUATE_NAME)
        self._may_evaluate = len(self.tools) < len(listed)
        self.claimed = False
        self._calls = None if agent_address is None else 0
        """Calls that this client has made; None if others may have made some before."""
        self._session = session
        self._call_lobby = call_lobby
        names = [tool.name for tool in self.tools]
        self._claim_name = next((name for name in CLAIM_NAMES if name in names), CLAIM)

    def __repr__(self) -> str:
        return f"<Episode {self.public_id} of {self.task}>"

    async def call(
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
        params: dict[str, Any] = {"name": name, "arguments": {} if arguments is None else arguments}
        is_counted = self._calls is not None and name not in (self._claim_name, EVALUATE_NAME)
        if self._calls is not None:
            self._calls += is_counted
        try:
            raw = await self._session.request("tools/call", params, on_progress=on_progress, timeout=timeout)
        except (UnknownToolError, RequestError) as error:
            if self._calls is not None and error.data.get("source") != "task":
                self._calls -= is_counted  # it was not sent to the task's server
            raise
        except (SandboxLostError, EpisodeEndedError) as error:
            if (await self._status()).get("phase") not in (None, "ended"):
                raise RequestError(
                    f"{name} failed as if the episode were over, but the server says that it continues: "
                    f"{error.message}"
                ) from error
            raise
        except InvalidReplyError as error:
            # An agent that controls a tool's server may have caused it.
            return Reply.mistake(f"{name}: {error.message}")
        reply = Reply.read(raw)
        closed = (as_object(reply.meta.get(ERROR_KEY)) or {}).get("code") == "episode_claimed"
        self.claimed |= closed or (name in (self._claim_name, EVALUATE_NAME) and not reply.is_error)
        return reply

    async def act(
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
        if name == EVALUATE_NAME:
            return Reply.mistake(f"there is no tool {name!r}")
        try:
            parsed = parse_arguments(arguments) if isinstance(arguments, str) else arguments
            return await self.call(name, cast("JsonObject", parsed), on_progress=on_progress, timeout=timeout)
        except MISTAKES as error:
            return Reply.mistake(error.message)
        except (EpisodeEndedError, SandboxLostError) as error:
            if await self._ended_with_reward():
                return Reply.mistake(error.message)
            raise

    async def claim_done(self, answer: str | None = None) -> Reply:
        """Close the attempt. No tool works after that, and the server starts grading.

        `answer`: the agent's final answer, which some tasks are graded by. An answer that cannot be sent is a
        reply with `is_error`, as in `act`: the attempt is still open.
        """
        return await self.act(self._claim_name, None if answer is None else {"answer": answer})

    async def truncate(self, answer: str | None = None, *, turns: int | None = None) -> Reply:
        """Close the attempt because the agent may not go on; the agent claims nothing.

        The verdict's `truncated` is true. The work so far is graded, or the reward is 0:
        `grades_truncated` in its suite's `suite.yaml` decides. By default the reward is 0 for the tasks of
        Toolathlon and toolathlon_gym, as upstream.
        `turns`: the turns that the agent took, for rubrics that use them; counted only with policy
        `controller` or a controller's token. Raises AccessDeniedError if another client controls this
        episode. If the episode has ended with a reward of 0 before, the reply has `is_error`. An answer that
        cannot be sent is left out.
        """
        arguments = {"episode": self.id, "truncated": True, "answer": answer, "turns": turns}
        try:
            reply = await self._call_lobby(
                "claim_done", {key: value for key, value in arguments.items() if value is not None}
            )
        except UnknownEpisodeError as error:
            if self._may_evaluate:
                raise
            raise AccessDeniedError(WITHHELD, code="access_denied") from error
        except RequestError:
            if answer is None:
                raise
            # The model wrote the answer: it must not decide whether its attempt is truncated.
            return await self.truncate(turns=turns)
        except (EpisodeEndedError, SandboxLostError) as error:
            if await self._ended_with_reward():
                return Reply.mistake(error.message)
            raise
        self.claimed = True
        return reply

    async def note(
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
        if timeout is not None and math.isnan(timeout):
            raise ValueError("a timeout must be a number")  # NaN would disorder the event loop's timers
        # JSON in UTF-8 has no lone surrogates.
        parts = split_text(text.encode("utf-8", "replace").decode(), NOTE_BYTES)
        with anyio.move_on_after(timeout) as time_limit:
            for number, part in enumerate(parts, 1):
                arguments: JsonObject = {"episode": self.id, "text": part, "role": role, "calls": calls}
                if usage and number == len(parts):
                    arguments["usage"] = dict(usage)
                await self._call_lobby(
                    "add_note", {key: value for key, value in arguments.items() if value is not None}
                )
        if time_limit.cancelled_caught:
            raise CallTimeoutError(f"the note was not confirmed within {timeout:g} s")

    async def evaluate(
        self, *, on_progress: OnProgress | None = None, timeout: float | None = None
    ) -> Verdict:
        """Grade the attempt and return the verdict; later calls return the same. Claims an open attempt.

        Grading continues on the server if this is cancelled or times out. An attempt that cannot be graded
        for a reason that the agent may have caused has status `forfeited` and a reward of 0.0. Raises
        NoVerdictError if the infrastructure or the task failed, which is never a reward of zero, and
        AccessDeniedError if this client may not see the reward.
        """
        try:
            reply = await self.call(EVALUATE_NAME, on_progress=on_progress, timeout=timeout)
        except UnknownToolError as error:
            # The server does not tell those who may not evaluate that it can be done.
            raise AccessDeniedError(WITHHELD, code="access_denied") from error
        except SandboxLostError as error:
            raise NoVerdictError(error.message, status="sandbox_lost", verdict={}) from error
        verdict = reply.verdict
        if verdict is None:
            if reply.is_error:
                raise NoVerdictError(reply.text, status="unknown", verdict={})
            raise ProtocolError("`evaluate` answered without a verdict; is this a decathlon-mcp server?")
        if (status := str(verdict.get("status"))) not in REWARDED:
            detail = str(verdict.get("detail") or reply.text)
            raise NoVerdictError(detail, status=status, verdict=verdict)
        with reading("a verdict"):
            return Verdict.read(verdict)

    # What follows is for the other modules of this package.

    @property
    def _loss(self) -> ClientError | None:
        """Why nothing can be asked about this episode any more: its node was lost. None otherwise."""
        return self._session.loss

    async def _raise_if_ended(self) -> None:
        """Raise EpisodeEndedError if the server says that the episode has ended."""
        status = await self._status()
        if status.get("phase") == "ended":
            reason = str(status.get("ending", ""))
            raise EpisodeEndedError(
                f"the episode has ended: {reason}", code="episode_ended", data={"reason": reason}
            )

    async def _ended_with_reward(self) -> bool:
        """Whether the episode has ended with a verdict that has a reward, which `evaluate` returns.

        An agent can end its own episode: by letting its time pass, or by exhausting its memory. This is a
        reward of 0; without it, such attempts would be missing from the mean. False if the server does not
        say.
        """
        # Only then: `evaluate` claims an open attempt.
        if (await self._status()).get("phase") != "ended":
            return False
        try:
            await self.evaluate()
        except ClientError:
            return False
        self.claimed = True
        return True

    async def _status(self) -> Mapping[str, Any]:
        """The episode's status according to the server; empty if it does not say."""
        try:
            return (await self._call_lobby("episode_status", {"episode": self.id})).structured or {}
        except ClientError:
            return {}


async def connect_episode(
    session: ReconnectingSession,
    call_lobby: CallLobby,
    agent_address: str | None,
    on_progress: OnProgress | None,
) -> Episode:
    """Open the session and wait until its episode is ready. Raises SetUpError if it never will be."""
    server_info = await session.open()
    # A list that the server has cached is there before the episode has a place: the player's time would pass
    # in the queue, and a set-up that fails would be the player's and never tried again.
    params = {"_meta": {READY_KEY: True}}
    listing = await session.request("tools/list", params, on_progress=on_progress)
    with reading("a list of tools"):
        tools = [Tool.read(raw) for raw in as_objects(listing.get("tools"))]
    return Episode(session, call_lobby, agent_address, server_info, tools)


def split_text(text: str, limit_bytes: int) -> list[str]:
    """Parts of a text, each of at most `limit_bytes` as JSON."""
    if len(json.dumps(text, ensure_ascii=False).encode()) <= limit_bytes or len(text) < 2:
        return [text]
    half = len(text) // 2
    return [*split_text(text[:half], limit_bytes), *split_text(text[half:], limit_bytes)]
