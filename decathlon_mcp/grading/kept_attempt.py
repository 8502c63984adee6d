"""A closed attempt as it is kept on disk, so that it can be graded again later.

`attempt.json` has everything but the files and the calls; the calls are in `trajectory.jsonl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self, TypeVar, cast, get_args

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.grading.attempt import Attempt, CallCounts, TruncationCause
from decathlon_mcp.sandboxes.base import Isolation, LimitName
from decathlon_mcp.suites.prompts import Prompt
from decathlon_mcp.suites.release import Release
from decathlon_mcp.types import JsonObject, Language, Network, as_object

ATTEMPT_FILE: Final = "attempt.json"
KEPT_WORKSPACE: Final = "workspace.tar.gz"
"""The captured workspace. It comes out of the agent's sandbox, so nothing in it is trusted."""
KEPT_SEALED: Final = "sealed.tar.gz"
"""The task's folder as preprocess left it, with names relative to that folder."""
ORIGINAL_FILE: Final = "sealed.json"
"""What was in the task's folder before preprocess: `archives.overlay.content_ids` as member `files`."""
VERSION = 1

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAttempt:
    """One closed attempt, as it is in `attempt.json`.

    `attempt` has no calls when it was read from a file. `task_id` is the task's id within its suite,
    `language` that of the task. `in_place`: it was graded in the agent's sandbox, of which nothing is kept.
    `sealed`: preprocess has changed the task's folder, so that `KEPT_SEALED` exists.
    """

    attempt: Attempt
    task_id: str
    language: Language
    in_place: bool
    sealed: bool

    def to_json(self) -> JsonObject:
        attempt = self.attempt
        return {
            "version": VERSION,
            "episode": attempt.episode,
            "labels": dict(attempt.labels),
            "task": attempt.task,
            "suite": attempt.suite,
            "task_id": self.task_id,
            "language": self.language,
            "suite_revision": attempt.suite_revision,
            "suite_changed": attempt.suite_changed,
            "suite_release": attempt.suite_release,
            "preprocess_failure": attempt.preprocess_failure,
            "isolation": attempt.isolation,
            "unlimited": list(attempt.unlimited),
            "dense": attempt.dense,
            "coerced_arguments": attempt.coerced_arguments,
            "agent_network": attempt.agent_network,
            "grader_network": attempt.grader_network,
            "image_digest": attempt.image_digest,
            "launch_time": attempt.launch_time.isoformat(),
            "prompt": {"system": attempt.prompt.system, "task": attempt.prompt.task},
            "claimed": attempt.claimed,
            "truncated_by": attempt.truncated_by,
            "answer": attempt.answer,
            "turns": attempt.turns,
            "started_at": _iso(attempt.started_at),
            "claimed_at": _iso(attempt.claimed_at),
            "calls": {
                "calls": attempt.call_counts.calls,
                "failed": attempt.call_counts.failed,
                "tools": attempt.call_counts.tools,
            },
            "tools": {server: list(tools) for server, tools in attempt.tools.items()},
            "in_place": self.in_place,
            "sealed": self.sealed,
        }

    @classmethod
    def parse(cls, values: JsonObject) -> Self:
        """Read the content of `attempt.json`. Raises BadRequestError."""
        # Not a pydantic model: those refuse texts with lone surrogates, which an agent can send.
        if values.get("version") != VERSION:
            raise BadRequestError(
                f"{ATTEMPT_FILE} has version {values.get('version')!r}; this release reads version {VERSION}"
            )
        try:
            return cls._parse(values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRequestError(f"{ATTEMPT_FILE} is damaged: {type(error).__name__}: {error}") from None

    @classmethod
    def _parse(cls, values: JsonObject) -> Self:
        prompt, counts = values["prompt"], values["calls"]
        attempt = Attempt(
            episode=str(values["episode"]),
            labels={str(name): str(value) for name, value in values["labels"].items()},
            task=str(values["task"]),
            suite=str(values["suite"]),
            suite_revision=str(values["suite_revision"]),
            suite_changed=bool(values["suite_changed"]),
            suite_release=_one_of(values["suite_release"], (None, *get_args(Release))),
            preprocess_failure=str(values["preprocess_failure"]),
            isolation=_one_of(values["isolation"], get_args(Isolation)),
            unlimited=tuple(_one_of(name, get_args(LimitName)) for name in values["unlimited"]),
            dense=bool(values["dense"]),
            coerced_arguments=bool(values["coerced_arguments"]),
            agent_network=_one_of(values["agent_network"], get_args(Network)),
            grader_network=_one_of(values["grader_network"], get_args(Network)),
            image_digest=_optional(values["image_digest"], str),
            launch_time=datetime.fromisoformat(values["launch_time"]),
            prompt=Prompt(_optional(prompt["system"], str), str(prompt["task"])),
            claimed=bool(values["claimed"]),
            truncated_by=_one_of(values["truncated_by"], (None, *get_args(TruncationCause))),
            answer=_optional(values["answer"], str),
            turns=_optional(values["turns"], int),
            started_at=_time(values["started_at"]),
            claimed_at=_time(values["claimed_at"]),
            call_counts=CallCounts(int(counts["calls"]), int(counts["failed"]), int(counts["tools"])),
            tools={server: _objects(tools) for server, tools in values["tools"].items()},
        )
        return cls(
            attempt=attempt,
            task_id=str(values["task_id"]),
            language=_one_of(values["language"], get_args(Language)),
            in_place=bool(values["in_place"]),
            sealed=bool(values["sealed"]),
        )


def _one_of(value: Any, choices: tuple[str | None, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, choices))}")
    return value


def _optional(value: Any, kind: type[_Value]) -> _Value | None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _objects(values: Any) -> Sequence[JsonObject]:
    return [as_object(value) or {} for value in cast("list[object]", values)]


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
