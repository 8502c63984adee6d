"""openenv: a `ResourceSessionFactory` whose sessions are episodes.

openenv's own harnesses drive a session (`MCPHarnessAdapter`, `build_harness_rollout_func`). An attempt
without a verdict has `env_reward=None`, which openenv defines as unscored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import (
    Message,
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    VerifyResult,
)

from decathlon_client.client_errors import NoVerdictError
from decathlon_client.notes import send_notes
from decathlon_client.opener import RETRIES
from decathlon_client.sync import Decathlon, Episode


class ToolDecathlonSession(ResourceSession):
    """One episode."""

    def __init__(self, episode: Episode, stack: ExitStack) -> None:
        self.episode = episode
        self._stack = stack

    def initial_messages(self) -> list[Message]:
        return [{"role": "user", "content": self.episode.prompt}]

    def list_tools(self) -> list[Tool]:
        return [
            Tool(name=tool.name, description=tool.description, input_schema=dict(tool.input_schema))
            for tool in self.episode.tools
        ]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        reply = self.episode.act(name, arguments)
        return ToolResult(
            data=reply.text,
            done=self.episode.claimed,
            metadata={"structured": reply.structured} if reply.structured else {},
            error=reply.text if reply.is_error else None,
        )

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        if (
            not self.episode.claimed
            and isinstance(final_state, Mapping)
            and not final_state.get("done", True)
        ):
            self.episode.truncate(turns=sum(message["role"] == "assistant" for message in transcript))
        # The model's texts are known only now.
        send_notes(self.episode, transcript)
        try:
            verdict = self.episode.evaluate()
        except NoVerdictError as error:
            artifacts = {"verdict": error.verdict, "status": error.status, "page": self.episode.page}
            return VerifyResult(done=True, artifacts=artifacts)
        artifacts = {"verdict": dict(verdict.raw), "page": self.episode.page}
        return VerifyResult(
            env_reward=verdict.reward, done=True, metrics=dict(verdict.metrics), artifacts=artifacts
        )

    def close(self) -> None:
        self._stack.close()


class ToolDecathlonFactory(ResourceSessionFactory[ToolDecathlonSession]):
    """Creates sessions; use it in a `with`. Sessions may be used from several threads at once.

    `url` and `token` are as for `Decathlon`; `labels` are the labels of the episodes.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        max_calls: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._decathlon = Decathlon(url, token)
        self._max_calls = max_calls
        self._labels = labels

    def __enter__(self) -> Self:
        self._decathlon.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._decathlon.__exit__(*exception)

    def create(
        self, task: Any, seed: int | None = None, episode_id: str | None = None
    ) -> ToolDecathlonSession:
        """Open an episode of a task id, or of a row with an id under `task` or `id`; None draws by `seed`."""
        stack = ExitStack()
        seed = seed if task is None else None
        opening = self._decathlon.episode(
            _id(task), seed=seed, max_calls=self._max_calls, labels=self._labels, **RETRIES
        )
        episode = stack.enter_context(opening)
        return ToolDecathlonSession(episode, stack)


def _id(task: Any) -> str | None:
    if isinstance(task, Mapping):
        task_id = task.get("task") or task.get("id")
        if task_id is None:
            raise ValueError(f"the row has no task id under `task` or `id`: {json.dumps(dict(task))[:200]}")
        return str(task_id)
    return None if task is None else str(task)
