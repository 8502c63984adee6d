"""What the server tells, as frozen values; `raw` is always the whole of it as it came."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

JsonObject: TypeAlias = dict[str, Any]
OnProgress: TypeAlias = Callable[[float, float | None, str | None], Awaitable[None]]
"""Called with progress, total (where it is known) and a message (where there is one)."""

Policy: TypeAlias = Literal["visible", "meta", "controller"]
"""Who sees a reward; the later, the fewer."""

CLAIM = "claim_done"
"""The tool that closes an attempt, by its usual name."""
VERDICT_KEY = "decathlon/verdict"


def as_object(value: object) -> JsonObject | None:
    """`value` where it is a JSON object, else None."""
    return cast("JsonObject", value) if isinstance(value, dict) else None


def as_objects(value: object) -> list[JsonObject]:
    """The JSON objects of a JSON array; none where it is no array."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [found for item in items if (found := as_object(item)) is not None]


@dataclass(frozen=True, slots=True)
class Task:
    """One task that the server has. `prompt` is None unless prompts were asked for, and where it has none.

    `pass_rate` is the share of its `attempts` that succeeded, where the server knows of any.
    """

    id: str
    suite: str
    splits: tuple[str, ...]
    servers: tuple[str, ...]
    local_tools: tuple[str, ...]
    network: bool
    runnable: bool
    missing: tuple[str, ...]
    prompt: str | None
    pass_rate: float | None
    attempts: int
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, raw: JsonObject) -> Task:
        """From an entry of `list_tasks`."""
        return cls(
            id=str(raw["id"]),
            suite=str(raw.get("suite", "")),
            splits=tuple(raw.get("splits", ())),
            servers=tuple(raw.get("servers", ())),
            local_tools=tuple(raw.get("local_tools", ())),
            network=bool(raw.get("network")),
            runnable=bool(raw.get("runnable", True)),
            missing=tuple(raw.get("missing", ())),
            prompt=raw.get("prompt"),
            pass_rate=raw.get("pass_rate"),
            attempts=int(raw.get("attempts", 0)),
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of an episode; `input_schema` is JSON Schema."""

    name: str
    description: str
    input_schema: Mapping[str, Any] = field(repr=False)
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, raw: JsonObject) -> Tool:
        """From an entry of `tools/list`."""
        return cls(
            name=str(raw["name"]),
            description=str(raw.get("description") or ""),
            input_schema=as_object(raw.get("inputSchema")) or {"type": "object"},
            raw=raw,
        )

    @property
    def function(self) -> JsonObject:
        """As the `tools` of OpenAI's endpoints, and of those like them, take it."""
        told = {"name": self.name, "description": self.description, "parameters": dict(self.input_schema)}
        return {"type": "function", "function": told}


@dataclass(frozen=True, slots=True)
class Reply:
    """What a tool answered. `text` is its text content, joined; `content` every part of it, as it came.

    `is_error`: the tool failed, and the text says why; that is for the agent, the episode goes on.
    """

    text: str
    is_error: bool
    structured: Mapping[str, Any] | None
    content: tuple[Mapping[str, Any], ...]
    meta: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, raw: JsonObject) -> Reply:
        """From the result of a `tools/call`."""
        content = as_objects(raw.get("content"))
        return cls(
            text="\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text"),
            is_error=bool(raw.get("isError")),
            structured=as_object(raw.get("structuredContent")),
            content=tuple(content),
            meta=as_object(raw.get("_meta")) or {},
            raw=raw,
        )

    @classmethod
    def mistake(cls, why: str) -> Reply:
        """To a call that never reached a tool, in the form of a tool's own failure."""
        return cls.read({"content": [{"type": "text", "text": why}], "isError": True})

    @property
    def verdict(self) -> JsonObject | None:
        """The verdict that `evaluate` put in it, wherever the server's policy wants it."""
        kept = as_object(self.meta.get(VERDICT_KEY))
        return kept or (dict(self.structured) if self.structured and "status" in self.structured else None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an evaluation said of an attempt. There is none unless it was scored (see `NoVerdictError`)."""

    reward: float
    success: bool
    metrics: Mapping[str, float]
    status: str
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, raw: JsonObject) -> Verdict:
        """From the verdict of a scored attempt. Raises KeyError, TypeError or ValueError for another."""
        return cls(
            reward=float(raw["reward"]),
            success=bool(raw["success"]),
            metrics=dict(raw.get("metrics") or {}),
            status=str(raw["status"]),
            raw=raw,
        )
