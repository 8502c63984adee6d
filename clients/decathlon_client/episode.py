"""One attempt at one task, as a client sees it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from decathlon_client.connection import Line
from decathlon_client.errors import (
    CallTimeoutError,
    NoVerdictError,
    ProtocolError,
    RequestError,
    SandboxLostError,
    UnknownToolError,
)
from decathlon_client.values import JsonObject, OnProgress, Reply, Tool, Verdict, as_object, as_objects

CLAIM_NAMES = ("claim_done", "local-claim_done")
EVALUATE_NAME = "evaluate"
EPISODE_KEY = "decathlon/episode"
ERROR_KEY = "decathlon/error"
MISTAKES = (UnknownToolError, RequestError, CallTimeoutError)
"""What comes of a call that should not have been made so; the episode goes on."""

Lobby: TypeAlias = Callable[[str, JsonObject], Awaitable[Reply]]
"""One of the lobby's tools and its arguments in, its reply out."""


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

    def __init__(
        self,
        line: Line,
        lobby: Lobby,
        *,
        episode_id: str,
        agent_address: str | None,
        task: str,
        prompt: str,
        listed: list[JsonObject],
    ) -> None:
        self.id = episode_id
        self.task = task
        self.prompt = prompt
        self.address = line.where if "://" in line.where else episode_id
        self.agent_address = agent_address
        self.tools = tuple(Tool.read(raw) for raw in listed if raw.get("name") != EVALUATE_NAME)
        self.claimed = False
        self._line = line
        self._lobby = lobby
        names = [tool.name for tool in self.tools]
        self._claim_name = next((name for name in CLAIM_NAMES if name in names), CLAIM_NAMES[0])

    def __repr__(self) -> str:
        return f"<Episode {self.id[:12]} of {self.task}>"

    async def call(
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
        params: dict[str, Any] = {"name": name, "arguments": arguments or {}}
        raw = await self._line.request("tools/call", params, on_progress=on_progress, timeout=timeout)
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
        """As `call`, for a model: where the call was a mistake, a reply with `is_error` tells it so.

        Mistakes are a tool that is not there, arguments refused, a call past its `timeout`. `arguments` may
        be the JSON text that a model wrote. There is no `evaluate` here. Raises EpisodeEndedError,
        SandboxLostError, ConnectionLostError: what no model is to blame for.
        """
        if name == EVALUATE_NAME:
            return Reply.mistake(f"there is no tool {name!r}")
        try:
            given = _parsed(arguments) if isinstance(arguments, str) else arguments
            return await self.call(name, given, on_progress=on_progress, timeout=timeout)
        except MISTAKES as error:
            return Reply.mistake(error.message)

    async def claim_done(self, answer: str | None = None) -> Reply:
        """Close the attempt: no tool works any more, and the server starts to grade it.

        `answer`: the agent's last words, which some tasks are graded by.
        """
        return await self.call(self._claim_name, None if answer is None else {"answer": answer})

    async def truncate(self, answer: str | None = None, *, turns: int | None = None) -> Reply:
        """Close the attempt because the patience of whoever runs it is at an end: the agent claims nothing.

        What was done is graded, and the verdict's `truncated` is true. `turns`: how many the agent took, for
        a rubric that weighs them. Raises AccessDeniedError where another is this episode's controller.
        """
        asked = {"episode": self.id, "truncated": True, "answer": answer, "turns": turns}
        reply = await self._lobby(
            "claim_done", {key: value for key, value in asked.items() if value is not None}
        )
        self.claimed = True
        return reply

    async def evaluate(
        self, *, on_progress: OnProgress | None = None, timeout: float | None = None
    ) -> Verdict:
        """The verdict; graded once, later calls return the same. Closes the attempt where nobody has.

        Grading goes on when this is cancelled or times out. Raises NoVerdictError where there is none, which
        is never a reward of zero.
        """
        try:
            reply = await self.call(EVALUATE_NAME, on_progress=on_progress, timeout=timeout)
        except SandboxLostError as error:
            raise NoVerdictError(error.message, status="sandbox_lost", verdict={}) from error
        told = reply.verdict
        if told is None:
            if reply.is_error:
                raise NoVerdictError(reply.text, status="unknown", verdict={})
            raise ProtocolError("`evaluate` answered without a verdict; is this a decathlon-mcp server?")
        if told.get("status") != "scored":
            detail = str(told.get("detail") or reply.text)
            raise NoVerdictError(detail, status=str(told.get("status")), verdict=told)
        return Verdict.read(told)


async def attached(
    line: Line, lobby: Lobby, *, agent_address: str | None = None, on_progress: OnProgress | None = None
) -> Episode:
    """The episode at the end of a line, once it is ready. Raises SetUpError where it never will be."""
    info = await line.open()
    listed = await line.request("tools/list", {}, on_progress=on_progress)
    told = as_object((as_object(info.get("_meta")) or {}).get(EPISODE_KEY)) or {}
    if not told.get("id"):
        raise ProtocolError(f"there is no episode at {line.where}")
    return Episode(
        line,
        lobby,
        agent_address=agent_address,
        episode_id=str(told["id"]),
        task=str(told.get("task", "")),
        prompt=str(info.get("instructions") or ""),
        listed=as_objects(listed.get("tools")),
    )


def _parsed(arguments: str) -> JsonObject:
    """Raises RequestError where they are no JSON object."""
    try:
        parsed = as_object(json.loads(arguments)) if arguments.strip() else {}
    except ValueError as error:
        raise RequestError(f"the arguments are not JSON: {error}") from None
    if parsed is None:
        raise RequestError("the arguments must be a JSON object")
    return parsed
