"""NeMo Gym: a resources server whose sessions are episodes; a command writes its folder and a data set.

    python -m decathlon_client.adapters.nemo_gym FOLDER [--url URL] [--split SPLIT] [--tasks ID,ID]

`/seed_session` opens an episode, the agent posts the model's calls to `/TOOL`, `/verify` evaluates. Without a
verdict the sample is masked (`mask_sample`). A NeMo Gym that cannot mask gets status 503, never a reward.
"""

# No `from __future__ import annotations`: NeMo Gym wraps `verify`, and FastAPI would look up the names in the
# wrapper's module.

import argparse
import asyncio
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import distribution
from itertools import groupby
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from decathlon_client import ManagedEpisode
from decathlon_client.client_errors import ClientError
from decathlon_client.client_values import TOKEN_VARIABLE, JsonObject, Verdict, playable
from decathlon_client.notes import send_conversation
from decathlon_client.sync import Decathlon

NAME = "tool_decathlon"
AGENT = f"{NAME}_agent"
DATA = "data/tasks.jsonl"
RESULT = "function_call_output"
"""The type of a tool's reply in a response; everything else is the model's."""
IDLE_SECONDS = 1800.0
"""As long as a server keeps an episode without calls by default."""

log = logging.getLogger("decathlon.client")


class ToolDecathlonConfig(BaseResourcesServerConfig):
    """The server, and the options of its episodes."""

    url: str | None = None
    """The server. [`DECATHLON_URL`, else http://127.0.0.1:8765]"""
    token_var: str = TOKEN_VARIABLE
    """The environment variable with the server's token, if it requires one."""
    max_calls: int | None = None
    """Limit on the tool calls of an episode."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the episodes."""
    idle_seconds: float = IDLE_SECONDS
    """How long an episode stays open whose agent calls no tool and asks for no verdict."""


class SeedSessionRequest(BaseSeedSessionRequest):
    """A row of the data set. An Environment Server sends it as `task_data`, with an id of its own."""

    task: str
    launch_time: str | None = None
    resources_session_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_task_data(cls, value: Any) -> Any:
        return {**value, **(value.get("task_data") or {})} if isinstance(value, Mapping) else value


class Session(BaseModel):
    """An open or a closed session. Environment Servers refuse further fields."""

    resources_session_id: str


class VerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class VerifyResponse(BaseVerifyResponse):
    """The row with the reward, `verdict`, each of its metrics as `metric/NAME`, and the episode's `page`."""

    model_config = ConfigDict(extra="allow")


class _Rollout:
    """A session: `opening` its episode, then `grading` it. Both survive a request that is given up."""

    def __init__(self, opening: asyncio.Task[ManagedEpisode]) -> None:
        self.opening = opening
        self.grading: asyncio.Task[Verdict] | None = None
        self.used_at = time.monotonic()

    async def close(self) -> None:
        """Close the episode, also one that is still being opened. Never raises."""
        self.opening.cancel()
        await asyncio.wait([self.opening])
        if not self.opening.cancelled() and self.opening.exception() is None:
            await self.opening.result().close()


class ToolDecathlonResourcesServer(SimpleResourcesServer):
    """Serves the episodes of a decathlon-mcp server to NeMo Gym's agents."""

    config: ToolDecathlonConfig
    _rollouts: dict[str, _Rollout] = PrivateAttr(default_factory=dict)
    _closed: dict[str, float] = PrivateAttr(default_factory=dict)
    """Ids of closed sessions, and when: a seed that comes after them is refused."""
    _closings: set[asyncio.Task[None]] = PrivateAttr(default_factory=set)

    def setup_webserver(self) -> FastAPI:
        if (getattr(self.config, "num_workers", None) or 1) > 1:
            raise ValueError(f"num_workers of {self.config.name} must be 1: its episodes live in one process")
        app = super().setup_webserver()
        app.post("/{tool}")(self.call_tool)  # after NeMo Gym's own, which come first
        run = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncGenerator[Any]:
            async with run(app) as state:
                try:
                    yield state
                finally:
                    await asyncio.gather(*(rollout.close() for rollout in self._rollouts.values()))

        app.router.lifespan_context = lifespan
        return app

    async def seed_session(self, request: Request, body: SeedSessionRequest) -> Session:
        """Open an episode of the row's task. With an Environment Server's id: one, however often it asks."""
        self._close_abandoned()
        key = body.resources_session_id or uuid.uuid4().hex
        if key in self._closed:
            raise HTTPException(409, f"the session {key} is closed; seed one with another id")
        request.session[SESSION_ID_KEY] = key
        if key not in self._rollouts:
            self._rollouts[key] = _Rollout(asyncio.create_task(self._open(body)))
        rollout = self._rollouts[key]
        try:
            await asyncio.shield(rollout.opening)
        except ClientError as error:
            self._rollouts.pop(key, None)
            raise HTTPException(503 if error.retryable else 500, f"{body.task}: {error.message}") from error
        except asyncio.CancelledError:
            if rollout.opening.cancelled():
                raise HTTPException(409, f"the session {key} was closed while it was opened") from None
            raise
        rollout.used_at = time.monotonic()
        return Session(resources_session_id=key)

    async def call_tool(self, tool: str, request: Request) -> PlainTextResponse:
        """Make a model's call with the body as arguments. The reply is for the model, an error too."""
        rollout = self._rollouts.get(request.session[SESSION_ID_KEY])
        if rollout is None or not rollout.opening.done():
            return PlainTextResponse("no episode is open in this session; /seed_session opens one", 409)
        rollout.used_at = time.monotonic()
        try:
            episode = rollout.opening.result().episode
            reply = await episode.act(tool, (await request.body()).decode("utf-8", "replace"))
        except ClientError as error:
            return PlainTextResponse(error.message, 503)
        return PlainTextResponse(reply.text, 422 if reply.is_error else 200)

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Grade the attempt; asked again, the same verdict. An attempt without a verdict is masked."""
        rollout = self._rollouts.get(request.session[SESSION_ID_KEY])
        if rollout is None or not rollout.opening.done():
            return _masked(body, "session_lost", "no episode is open in this session")
        managed = rollout.opening.result()
        if rollout.grading is None:
            rollout.grading = asyncio.create_task(_grade(managed, body.response))
        try:
            verdict = await asyncio.shield(rollout.grading)
        except ClientError as error:
            return _masked(body, f"{NAME}:{getattr(error, 'status', error.code)}", error.message)
        finally:
            rollout.used_at = time.monotonic()
        result = {
            **{f"metric/{name}": value for name, value in verdict.metrics.items()},
            "reward": verdict.reward,
            "verdict": dict(verdict.raw),
            "page": managed.episode.page,
        }
        return VerifyResponse.model_validate(body.model_dump() | result)

    async def close_resources_session(self, body: Session) -> Session:
        """Close an Environment Server's session; also if it is closed, or was never seeded."""
        self._closed[body.resources_session_id] = time.monotonic()
        rollout = self._rollouts.pop(body.resources_session_id, None)
        if rollout is not None:
            await rollout.close()
        return body

    async def _open(self, body: SeedSessionRequest) -> ManagedEpisode:
        return await ManagedEpisode.open(
            body.task,
            url=self.config.url,
            token=os.environ.get(self.config.token_var, ""),
            launch_time=body.launch_time,
            max_calls=self.config.max_calls,
            labels=self.config.labels,
        )

    def _close_abandoned(self) -> None:
        """Close what nobody has used for `idle_seconds`: no agent announces that it gave up."""
        before = time.monotonic() - self.config.idle_seconds
        for key in [key for key, closed_at in self._closed.items() if closed_at < before]:
            del self._closed[key]
        for key, rollout in list(self._rollouts.items()):
            is_busy = not rollout.opening.done() or (rollout.grading and not rollout.grading.done())
            if rollout.used_at < before and not is_busy:
                closing = asyncio.create_task(self._rollouts.pop(key).close())
                self._closings.add(closing)
                closing.add_done_callback(self._closings.discard)


async def _grade(managed: ManagedEpisode, response: NeMoGymResponse) -> Verdict:
    episode = managed.episode
    try:
        # The model's texts are known only now.
        await send_conversation(episode, map(_as_message, response.output))
        last = response.output[-1].type if response.output else None
        if not episode.claimed and (response.incomplete_details or last == RESULT):
            turns = sum(key for key, _ in groupby(response.output, lambda item: item.type != RESULT))
            await episode.truncate(turns=turns)
        return await episode.evaluate()
    finally:
        await managed.close()


def _as_message(item: Any) -> JsonObject:
    """An item of the Responses API as a message of a chat, as far as notes are made of it."""
    match item.type:
        case "message":
            return {"role": "assistant", "content": [part.model_dump() for part in item.content]}
        case "reasoning":
            return {"role": "assistant", "reasoning_content": "\n".join(part.text for part in item.summary)}
        case "function_call":
            return {"role": "assistant", "tool_calls": [{}]}
        case _:
            return {"role": "tool"}


def _masked(body: VerifyRequest, kind: str, reason: str) -> VerifyResponse:
    """The answer without a verdict. Raises HTTPException where NeMo Gym has no way to mask a sample."""
    log.warning("no verdict: %s", reason)
    if "mask_sample" not in BaseVerifyResponse.model_fields:
        raise HTTPException(503, f"no verdict: {reason}")
    result = {"reward": 0.0, "mask_sample": True, "failure_kind": kind, "failure_reason": reason}
    return VerifyResponse.model_validate(body.model_dump() | result)


def rows(
    url: str | None = None,
    split: str | None = None,
    *,
    token: str | None = None,
    tasks: Sequence[str] | None = None,
) -> Iterable[JsonObject]:
    """The rows of the data set: the runnable tasks of a split (default: all), or the tasks in `tasks`.

    Opens one episode for each distinct set of servers, to list its tools. Raises ValueError for tasks that
    cannot be played, and where the server's prompts are provisional: a row has its prompt before its episode.
    """
    with Decathlon(url, token) as d:
        chosen = playable(d.tasks(split=split), tasks)
        if late := [task.id for task in chosen if task.prompt_is_provisional]:
            raise ValueError(
                f"the prompts of {', '.join(late)} are known only when an episode has started; serve them in "
                "namespaces (`--isolation`) or with `--provider docker`"
            )
        for task in chosen:
            tools = [
                {"type": "function", **tool.function["function"], "strict": False} for tool in d.tools(task)
            ]
            yield {
                "responses_create_params": {
                    "input": [{"role": "user", "content": task.prompt}],
                    "tools": tools,
                },
                "agent_ref": {"type": "responses_api_agents", "name": AGENT},
                "task": task.id,
                "launch_time": task.launch_time,
            }


def write_folder(folder: Path, url: str, data: Iterable[JsonObject]) -> None:
    """Write a resources server for `gym`: program, requirements, configuration and data set."""
    config = {
        NAME: {"resources_servers": {folder.name: {"entrypoint": "app.py", "domain": "agent", "url": url}}},
        AGENT: {
            "responses_api_agents": {
                "simple_agent": {
                    "entrypoint": "app.py",
                    "resources_server": {"type": "resources_servers", "name": NAME},
                    "model_server": {"type": "responses_api_models", "name": "policy_model"},
                    "max_steps": 100,
                    "datasets": [
                        {
                            "name": "tasks",
                            "type": "train",
                            "jsonl_fpath": str(folder / DATA),
                            "license": "TBD",  # the suite's license, which is not known here
                        }
                    ],
                }
            }
        },
    }
    server = ToolDecathlonResourcesServer
    files = {
        "app.py": f"from {_MODULE} import {server.__name__}\n\n"
        f'if __name__ == "__main__":\n    {server.__name__}.run_webserver()\n',
        "requirements.txt": f"{_requirement()}\n",
        f"configs/{folder.name}.yaml": json.dumps(config, indent=2) + "\n",  # JSON is YAML
        DATA: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in data),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


_MODULE = "decathlon_client.adapters.nemo_gym"


def _requirement() -> str:
    """This package with its extra, from where it was installed."""
    package = distribution("decathlon-mcp")
    origin = json.loads(package.read_text("direct_url.json") or "null")
    if origin is None:
        return f"decathlon-mcp[nemo-gym]=={package.version}"
    repository = origin.get("vcs_info")
    url = f"{repository['vcs']}+{origin['url']}@{repository['commit_id']}" if repository else origin["url"]
    return f"decathlon-mcp[nemo-gym] @ {url}"


def main() -> None:
    """The command: see the module."""
    parser = argparse.ArgumentParser(
        f"python -m {_MODULE}", description="Write a resources server for NeMo Gym, with a data set."
    )
    parser.add_argument("folder", type=Path, help="resources_servers/NAME, below where `gym` is started")
    parser.add_argument("--url", default=os.environ.get("DECATHLON_URL", "http://127.0.0.1:8765"))
    parser.add_argument("--split", help="the tasks of this split [all]")
    parser.add_argument("--tasks", metavar="ID,ID", help="these tasks instead")
    options = parser.parse_args()
    tasks = options.tasks and options.tasks.split(",")
    try:
        data = list(rows(options.url, options.split, tasks=tasks))
    except (ClientError, ValueError) as error:
        sys.exit(f"{parser.prog}: {error}")
    write_folder(options.folder, options.url, data)
    sys.stdout.write(f"{options.folder}: {len(data)} tasks in {DATA}\n")


if __name__ == "__main__":
    main()
