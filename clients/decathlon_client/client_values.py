"""Typed values that pass between client and server, labels of episodes as texts, addresses of servers.

A server and the token for it are named by arguments, or else by environment variables.

`raw` is always the complete JSON as received. The server checks the names and values of labels.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict, cast
from urllib.parse import quote, urlsplit

JsonObject: TypeAlias = dict[str, Any]
OnProgress: TypeAlias = Callable[[float, float | None, str | None], Awaitable[None]]
"""Called with the progress, the total (None if unknown) and a message (None if there is none)."""

Policy: TypeAlias = Literal["visible", "meta", "controller"]
"""Who sees the reward: everybody, readers of `_meta`, or only the episode's controller."""

NoteRole: TypeAlias = Literal["system", "user", "assistant", "reasoning"]
"""Whose message a note is. `reasoning`: what a model thought before it answered."""

OnDifference: TypeAlias = Literal["refuse", "report"]
"""What becomes of a branch if a call that is made again has another reply."""

Order: TypeAlias = Literal["easy_first", "hard_first", "curriculum"]
"""An order of tasks by their pass rates."""

CLAIM = "claim_done"
"""The usual name of the tool that closes an attempt."""
VERDICT_KEY = "decathlon/verdict"
REWARDED = frozenset({"scored", "forfeited"})
"""The statuses of verdicts with a reward. A forfeited attempt has 0.0."""


SERVER_METRICS = ("calls", "failed_calls", "tools_used", "seconds", "turns", "success")
"""The metrics that every task has: the server counts them, and `success` is the evaluator's exit code."""
_TOOL_METRIC = re.compile(r"(tool_calls|failed_calls)\([^()]+\)")
LABEL_HEADER = "Decathlon-Labels"
RUN, GROUP, ATTEMPT = "run", "group", "attempt"
"""The labels that a batch sets."""
ALONG = "along"
"""The label of a branch that only shows what an attempt was worth after a call: the call's number."""


class Filters(TypedDict, total=False):
    """Conditions on tasks; a task must meet all of them."""

    needs: Sequence[str]
    """Servers, local tools or hosted services by name, or `network`, `credentials`, `services`; `*` matches
    anything. A task must need all of them."""
    without: Sequence[str]
    """The same names; a task must need none of them."""
    search: str | None
    """Text that the id contains."""
    min_pass_rate: float | None
    """0 to 1, like `max_pass_rate`; from the server's `--results`, or else its own graded episodes."""
    max_pass_rate: float | None
    pass_rate_run: str | None
    """Take pass rates from the server's own episodes of this run."""
    pass_rate_last: int | None
    """Take pass rates from so many of the server's own last episodes of each task."""
    order: Order | None


def filter_arguments(**filters: Any) -> JsonObject:
    """Filters as arguments of the lobby's tools; filters that are None are left out."""
    lists = {
        name: [value] if isinstance(value := filters[name], str) else list(value)
        for name in ("needs", "without")
        if filters.get(name)
    }
    return {name: value for name, value in filters.items() if value is not None and name not in lists} | lists


def as_object(value: object) -> JsonObject | None:
    """`value` if it is a JSON object, else None."""
    return cast("JsonObject", value) if isinstance(value, dict) else None


def as_text(value: object) -> str | None:
    """`value` if it is a text, else None."""
    return value if isinstance(value, str) else None


def one_line(text: str) -> str:
    """A text for a terminal or a log, without line breaks and control characters."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))


def as_objects(value: object) -> list[JsonObject]:
    """The JSON objects in a JSON array; empty if `value` is not an array."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [item_object for item in items if (item_object := as_object(item)) is not None]


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the server."""

    id: str
    suite: str
    splits: tuple[str, ...]
    servers: tuple[str, ...]
    local_tools: tuple[str, ...]
    network: bool
    runnable: bool
    missing: tuple[str, ...]
    prompt: str | None
    """None if prompts were not requested or the task has none."""
    prompt_is_provisional: bool
    """Whether paths in it are known only when the episode has started: show `Episode.prompt` to the model."""
    launch_time: str | None
    """An episode with this launch time has the same prompt, unless it is provisional."""
    pass_rate: float | None
    """The share of its `attempts` that succeeded; None if the server has no results for it."""
    attempts: int
    metrics: tuple[str, ...] | None
    """Names of its verdicts' metrics, `tool_calls(TOOL)` for one of each tool; None if only an evaluation
    tells them."""
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, raw: JsonObject) -> Task:
        """Read an entry of `list_tasks`. Raises KeyError, TypeError, ValueError or OverflowError."""
        rate, metrics = raw.get("pass_rate"), raw.get("metrics", ())
        return cls(
            id=str(raw["id"]),
            suite=str(raw.get("suite", "")),
            splits=tuple(map(str, raw.get("splits", ()))),
            servers=tuple(map(str, raw.get("servers", ()))),
            local_tools=tuple(map(str, raw.get("local_tools", ()))),
            network=bool(raw.get("network")),
            runnable=bool(raw.get("runnable", True)),
            missing=tuple(map(str, raw.get("missing", ()))),
            prompt=as_text(raw.get("prompt")),
            prompt_is_provisional=bool(raw.get("prompt_is_provisional")),
            launch_time=as_text(raw.get("launch_time")),
            pass_rate=None if rate is None else float(rate),
            attempts=int(raw.get("attempts", 0)),
            metrics=None if metrics is None else (*map(str, metrics), *SERVER_METRICS),
            raw=raw,
        )


def playable(tasks: Iterable[Task], ids: Iterable[str] | None = None) -> list[Task]:
    """The tasks that can run on their server, or the tasks with these ids.

    Raises ValueError for ids that cannot be played: without these, a run would be smaller than it was meant.
    """
    listed = {task.id: task for task in tasks}
    if ids is None:
        return [task for task in listed.values() if task.runnable]
    chosen = list(dict.fromkeys(ids))
    problems: list[str] = []
    for name in chosen:
        if name not in listed:
            near = difflib.get_close_matches(name, listed, n=1)
            problems.append(
                f"there is no task {name!r} here" + (f"; did you mean {near[0]}?" if near else "")
            )
        elif not listed[name].runnable:
            problems.append(f"{name} cannot run: {'; '.join(listed[name].missing)}")
    if problems:
        raise ValueError(", ".join(problems))
    return [listed[name] for name in chosen]


def check_weights(weights: Iterable[str], tasks: Iterable[Task]) -> None:
    """Check the names of weighted metrics before tasks are played.

    Raises ValueError, with the metrics that there are, for a metric that none of the tasks has. A task whose
    metrics are unknown may have any.
    """
    known: set[str] = set()
    for task in tasks:
        if task.metrics is None:
            return
        known.update(task.metrics)
    names = {name: _TOOL_METRIC.sub(r"\1(TOOL)", name) for name in weights}
    if known and (unknown := [name for name, metric in names.items() if metric not in known]):
        raise ValueError(f"no task has the metric {unknown[0]!r}; metrics: {', '.join(sorted(known))}")


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of an episode; `input_schema` is JSON Schema."""

    name: str
    description: str
    input_schema: Mapping[str, Any] = field(repr=False)
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, raw: JsonObject) -> Tool:
        """Read an entry of `tools/list`. Raises KeyError."""
        return cls(
            name=str(raw["name"]),
            description=str(raw.get("description") or ""),
            input_schema=as_object(raw.get("inputSchema")) or {"type": "object"},
            raw=raw,
        )

    @property
    def function(self) -> JsonObject:
        """The tool in the format of OpenAI's `tools` parameter."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.input_schema)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Reply:
    """A tool's reply. `text` is its text content, joined; `content` is every part of it, unchanged.

    `is_error`: the tool failed and the text says why. That is for the agent to read; the episode continues.
    """

    text: str
    is_error: bool
    structured: Mapping[str, Any] | None
    content: tuple[Mapping[str, Any], ...]
    meta: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, raw: JsonObject) -> Reply:
        """Read the result of a `tools/call`."""
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
    def mistake(cls, message: str) -> Reply:
        """The reply to a call that never reached a tool, in the form of a tool's own failure."""
        return cls.read({"content": [{"type": "text", "text": message}], "isError": True})

    @property
    def verdict(self) -> JsonObject | None:
        """The verdict in a reply of `evaluate`, wherever the server's reward policy puts it."""
        in_meta = as_object(self.meta.get(VERDICT_KEY))
        return in_meta or (dict(self.structured) if self.structured and "status" in self.structured else None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of evaluating an attempt, with a reward (without one, see `NoVerdictError`).

    `status` is `scored`, or `forfeited` for an attempt that could not be graded for a reason that the agent
    may have caused; its reward is 0.0, and counts like any other.
    """

    reward: float
    success: bool
    metrics: Mapping[str, float]
    status: str
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, raw: JsonObject) -> Verdict:
        """Read a verdict with a reward. Raises KeyError, TypeError, ValueError, OverflowError."""
        return cls(
            reward=float(raw["reward"]),
            success=bool(raw["success"]),
            metrics=dict(raw.get("metrics") or {}),
            status=str(raw["status"]),
            raw=raw,
        )


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Labels of texts `NAME=VALUE`. Raises ValueError for another text, and for a name that comes twice."""
    labels: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"a label is NAME=VALUE, not {text!r}")
        if name in labels:
            raise ValueError(f"the label {name!r} is given twice")
        labels[name] = value
    return labels


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise TypeError if a name or a value is no text; numbers are not converted: `1` and `1.0` differ."""
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the label {name!r} must have a text as value, such as {str(value)!r}")


def label_headers(labels: Mapping[str, str]) -> dict[str, str]:
    """The headers that carry labels."""
    pairs = [f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in labels.items()]
    return {LABEL_HEADER: ", ".join(pairs)} if pairs else {}


URL_VARIABLE = "DECATHLON_URL"
TOKEN_VARIABLE = "DECATHLON_TOKEN"
DEFAULT_URL = "http://127.0.0.1:8765"
"""Where `decathlon-mcp serve` listens by default."""


def server_url(url: str | None, *, is_root: bool = False) -> str:
    """`url`, by default `DECATHLON_URL`, or else the default address of `serve`.

    Raises ValueError if it is not an HTTP URL, and with `is_root` also if it is a task's or an episode's.
    """
    source = "url"
    if url is None:
        source, url = URL_VARIABLE, os.environ.get(URL_VARIABLE, DEFAULT_URL)
    if not is_http_url(url) or (is_root and ("/tasks/" in url or "/episodes/" in url)):
        raise ValueError(f"{source}: not the address of a server, such as {DEFAULT_URL}: {url!r}")
    return url


def is_http_url(text: str) -> bool:
    """Whether a text is an address with `http` or `https` and a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def server_token(token: str | None) -> str:
    """`token`, by default `DECATHLON_TOKEN`; empty for none.

    Raises ValueError if no header can carry it; the message does not contain it.
    """
    source = "token"
    if token is None:
        source, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE, "")
        if token.startswith("${"):  # a template variable that a desktop program had no value for
            return ""
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(f"{source}: not a token: it has a space, a line break or a character beyond ASCII")
    return token


def authorization(token: str) -> dict[str, str]:
    """The headers that carry a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


DIRECT = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
"""`mounts` of an HTTP client: no proxy of the environment (`HTTP_PROXY`) is asked for this machine."""
